"""Starts, watches and restarts the replicas of one model on this machine.

| event                               | reaction                                                                        |
|-------------------------------------|---------------------------------------------------------------------------------|
| a replica ends                      | it gets no requests, and is started again after a pause that grows              |
| /health of a replica answers 503    | after three times in a row: it is killed and started again                      |
| /ready of a replica answers 503     | it gets no requests until it is ready again                                     |
| one ends before any is loaded       | the server does not start                                                       |
| this process ends, for any reason   | replicas notice that their control socket is closed; they drain and end         |
"""

import asyncio
import json
import logging
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp

from tilewright.server.config import ServerConfig
from tilewright.server.digests import Frames, send_spec, split
from tilewright.server.router import Router
from tilewright.server.serve import bind, url_of

__all__ = ["Fleet", "Replica"]

PAUSE_LEAST_S, PAUSE_MOST_S = 1.0, 60.0
"""Shortest and longest pause before a replica that has ended is started again."""
STEADY_S = 60.0
"""After a replica has run for this long, its next pause is the shortest one again."""
TOLD = ("max_body_bytes", "max_connections", "drain_timeout_s", "log_format", "tool_format", "max_wait_s", "traces")
TOLD += ("adapter_dir",)
"""The fields of the server's config that are passed to the replicas."""
LOOK_S = 0.5
LOOK_TIMEOUT_S = 5.0
MAX_STUCK = 3
"""A replica is restarted after its /health has answered 503 this many times in a row."""
END_S = 10.0
"""A replica that has not ended this long after the drain timeout is killed."""

logger = logging.getLogger(__name__)


class Replica:
    """One process."""

    def __init__(self, index: int):
        self.index = index
        self.url = ""
        self.ready = False
        """Whether it accepts requests."""
        self.stage = ""
        """The stage of its loading; "" once it has loaded the model."""
        self.restarts = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.frames = Frames()
        self.started_s = 0.0
        self.pause_s = PAUSE_LEAST_S / 2
        self.stuck = 0

    def close(self) -> None:
        """Close the control socket. If the process still runs, it drains and ends."""
        if self.control is not None:
            self.control.close()
            self.control = None
        self.ready = False


class Fleet:
    """The replicas and their router.

    Args:
        spec: model, name and the engine's options, for `replica.py`.
        config: the config of the whole server. Replicas listen on this machine only, with a random key of their own.
        say: called with lines for the log.
        command: the command that starts a replica; for tests.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        config: ServerConfig,
        say: Callable[[str], None],
        command: tuple[str, ...] = (sys.executable, "-m", "tilewright.server.replica"),
    ):
        server = {name: getattr(config, name) for name in TOLD}
        count = config.replicas
        self.key = secrets.token_urlsafe(32)
        """The API key of the replicas. It keeps other users of this machine from bypassing the front's key."""
        server |= {"port": 0, "log_level": "warning", "api_key": self.key}
        self._spec = {**spec, "count": count, "server": server}
        self._config, self._say, self._command = config, say, command
        self.replicas = [Replica(index) for index in range(count)]
        self.hello: dict[str, Any] = {}
        self.router = Router(count, 1)  # a placeholder until the first replica has reported its page size
        self.ending = False
        self.prepare: Callable[[Replica], Awaitable[None]] | None = None
        """Awaited before a replica gets its first requests."""

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of every replica's engine."""
        return self._spec.get("engine", {})

    @property
    def ready(self) -> list[int]:
        """Indices of the replicas that accept requests."""
        return [replica.index for replica in self.replicas if replica.ready]

    def start(self, replica: Replica) -> None:
        """Start the process of a replica."""
        listener = bind(ServerConfig(port=0))
        ours, theirs = socket.socketpair()
        replica.url = url_of(listener)
        with listener, theirs:
            send_spec(ours, {**self._spec, "index": replica.index})
            words = [*self._command, str(listener.fileno()), str(theirs.fileno())]
            replica.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(), theirs.fileno()),
                start_new_session=True,  # Ctrl-C reaches only this process, which decides what to do
            )
        ours.setblocking(False)
        replica.control, replica.frames, replica.stuck, replica.stage = ours, Frames(), 0, "starting a process"
        replica.started_s = time.monotonic()
        replica.restarts += 1

    def start_all(self, note: Callable[[str], None] = lambda stage: None) -> None:
        """Start all replicas, and wait until one has loaded the model. `note` is called with the stage of the first replica.

        Raises:
            ValueError: a replica ends before that.
        """
        first = self.replicas[0]
        for replica in self.replicas:
            self.start(replica)
        with selectors.DefaultSelector() as selector:
            for replica in self.replicas:
                assert replica.control is not None
                selector.register(replica.control, selectors.EVENT_READ, replica)
            while not self.hello:
                note(f"replica {first.index}, {first.stage}")
                for key, _ in selector.select():
                    replica = key.data
                    if not self._read(replica):
                        code = replica.process.wait()
                        self.end()
                        raise ValueError(f"replica {replica.index} ended with exit code {code} while loading the model")

    def end(self) -> None:
        """Tell all replicas to drain, wait until they have ended, and kill those that do not end in time."""
        self.ending = True
        for replica in self.replicas:
            replica.close()
        end_s = time.monotonic() + self._config.drain_timeout_s + END_S
        for replica in self.replicas:
            if replica.process is not None:
                try:
                    replica.process.wait(max(0.1, end_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    replica.process.kill()
                    replica.process.wait()

    # Messages of replicas --------------------------------------------------------------------------------------------

    def _read(self, replica: Replica) -> bool:
        """Handle the messages of a replica. Returns False if it has ended."""
        assert replica.control is not None
        while True:
            try:
                data = replica.control.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            for kind, body in replica.frames.feed(data):
                self._heard(replica, kind, body)

    def _heard(self, replica: Replica, kind: bytes, body: bytes) -> None:
        if kind == b"h":
            hello, replica.stage = json.loads(body), ""
            if not self.hello:
                self.hello = hello
                self.router = Router(len(self.replicas), int(hello["page_tokens"]))
        elif kind == b"l":
            replica.stage = body.decode(errors="replace")
        elif kind == b"+":
            self.router.known(replica.index, split(body))
        elif kind == b"-":
            self.router.forgotten(replica.index, split(body))
        else:
            self.router.emptied(replica.index)

    # Watching, on the event loop -------------------------------------------------------------------------------------

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Watch all replicas until cancelled."""
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self._watch(replica, session))

    async def _watch(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        while True:
            await self._life(replica, session)
            if self.ending:
                return
            self.router.lost(replica.index)
            assert replica.process is not None
            replica.process.kill()
            code = await asyncio.to_thread(replica.process.wait)
            replica.close()
            lived_s = time.monotonic() - replica.started_s
            replica.pause_s = PAUSE_LEAST_S if lived_s > STEADY_S else min(PAUSE_MOST_S, 2 * replica.pause_s)
            logger.error("replica %d ended with exit code %d; starting it again in %g s", replica.index, code, replica.pause_s)
            await asyncio.sleep(replica.pause_s)
            self.start(replica)

    async def _life(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        """Watch one run of a process. Returns when it has ended or is stuck."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        control = replica.control
        if control is None:
            return

        def readable() -> None:
            if not self._read(replica):
                loop.remove_reader(control)
                replica.ready = False
                ended.set()

        loop.add_reader(control, readable)
        try:
            while not ended.is_set() and replica.stuck < MAX_STUCK:
                await self._look(replica, session)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), LOOK_S)
        finally:
            if control.fileno() >= 0:
                loop.remove_reader(control)

    async def _look(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        before = replica.ready
        answers = {}
        for path in ("ready", "health"):
            try:
                timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
                async with session.get(f"{replica.url}/{path}", timeout=timeout) as response:
                    answers[path] = response.status
            except (aiohttp.ClientError, TimeoutError, OSError):
                answers[path] = 0  # the replica does not listen yet, or is too busy to answer
        ready = answers["ready"] == 200 and not self.ending
        if ready and not before and self.prepare is not None:
            await self.prepare(replica)
        replica.ready = ready
        replica.stuck = replica.stuck + 1 if answers["health"] == 503 else 0
        if replica.ready and not before:
            again = f" again, restart {replica.restarts}" if replica.restarts else ""
            self._say(f"Replica {replica.index} is ready at {replica.url}{again}")

    def suspect(self, index: int) -> None:
        """Record that a replica did not answer. It gets no requests until its /ready answers 200 again."""
        self.replicas[index].ready = False
