"""The parent process of a server that has several processes: one engine, and fronts that share a listening socket.

| event                      | reaction                                                                                    |
|----------------------------|---------------------------------------------------------------------------------------------|
| a front ends               | a new one is started; the engine aborts the requests of the old one                         |
| the engine ends            | a new one is started, after a pause that grows; until it is ready, fronts answer 503        |
| a signal                   | the fronts get it and drain as a server of one process does; then the engine is told to end |
| this process ends          | the other processes notice that their control socket is closed, and end                     |
| the engine does not start  | the server ends with the exit code of the engine                                            |

The processes share only a folder with mode 0700. It contains the engine's socket and the files with the configuration of the
processes.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.serve import url_of
from tilewright.server.starting import Starting

__all__ = ["ENGINE", "Supervisor", "control_of", "private_folder", "read_config", "tell_stage", "write_config"]

ENGINE = (sys.executable, "-m", "tilewright.server.engine_main")
FRONT = (sys.executable, "-m", "tilewright.server.front")
"""Commands. Their arguments are the folder, the descriptor of the control socket and, for a front, the listening socket's."""
LOOK_S = 0.05
PAUSE_LEAST_S, PAUSE_MOST_S = 1.0, 60.0
"""Shortest and longest pause before a process is started again that ended before it had run for `STEADY_S`."""
STEADY_S = 30.0
START_S = 120.0
"""Time limit for a front to start: Python itself starts slowly on a busy machine."""
END_S = 10.0
"""A front is killed if it has not ended this long after the drain timeout, an engine this long after it was told to end."""
MAX_STAGE_BYTES = 200
"""Most bytes of a stage's description."""
SOCKET_PATH_MOST = 100
"""Bytes; the system's limit for the path of a socket is 104 to 108."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for the files of one server, with mode 0700. It is deleted at the end of the context."""
    base = None if len(tempfile.gettempdir()) < SOCKET_PATH_MOST - 40 else "/tmp"  # the path of a socket must be short
    with tempfile.TemporaryDirectory(prefix="tilewright-", dir=base) as folder:
        yield Path(folder)


def write_config(folder: Path, config: ServerConfig) -> None:
    """Write the configuration for the fronts into the folder."""
    (folder / "server.json").write_text(json.dumps(dataclasses.asdict(config)))


def read_config(folder: Path) -> ServerConfig:
    """Read the configuration in a front. Limits on connections and bodies are this front's share of the server's limits."""
    fields = json.loads((folder / "server.json").read_text())
    if fields["cors_origins"] is not None:
        fields["cors_origins"] = tuple(fields["cors_origins"])
    for name in ("max_connections", "max_bodies"):
        fields[name] = -(-fields[name] // (fields["fronts"] or 1))
    return ServerConfig(**fields)


def control_of(descriptor: int) -> socket.socket:
    """The control socket of a child process. When it closes, the parent has ended.

    The child writes lines to it: "ready", and before that "stage" with the stage of its loading. A front first writes "loaded",
    and listens once the parent has written "go".
    """
    return socket.socket(fileno=descriptor)


def tell_stage(parent: socket.socket, words: str) -> None:
    """Tell the parent of a child how far the child's loading is, unless the parent has not read earlier words."""
    with suppress(OSError):
        parent.send(b"stage %b\n" % words.encode()[:MAX_STAGE_BYTES], socket.MSG_DONTWAIT)


class _Child:
    """A child process and its control socket."""

    def __init__(self, name: str, command: Sequence[str], *descriptors: int):
        self.name = name
        self._command, self._descriptors = tuple(command), descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started_s = 0.0
        self._pause_s = 0.0
        self._again_s = 0.0
        self.ready = self.loaded = False
        """A front that is `loaded` waits for `go`."""
        self.stage = ""
        """The stage of its loading."""
        self._line = b""
        """The beginning of a line whose end has not arrived."""

    def start(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        with theirs:
            words = map(str, (theirs.fileno(), *self._descriptors))
            self._process = subprocess.Popen(
                [*self._command, *words],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self._descriptors),
                start_new_session=True,  # Ctrl-C reaches only the parent, which decides what to do
            )
        ours.setblocking(False)
        self._control, self.ready, self.loaded, self._started_s = ours, False, False, time.monotonic()
        self.stage, self._line = "starting a process", b""

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs; the negative signal number if a signal ended it."""
        return None if self._process is None else self._process.poll()

    def heard(self) -> None:
        """Check whether the child has reported that it is loaded or ready, or the stage of its loading."""
        if self._control is not None and not self.ready:
            with suppress(OSError):  # no data yet, or the socket is closed
                *lines, self._line = (self._line + self._control.recv(1 << 16)).split(b"\n")
                for line in lines:
                    self.loaded |= line == b"loaded"
                    self.ready |= line == b"ready"
                    if line.startswith(b"stage "):
                        self.stage = line[6:].decode(errors="replace")

    def go(self) -> None:
        """Allow a loaded front to listen."""
        if self._control is not None and self.loaded and not self.ready:
            self.loaded = False
            with suppress(OSError):
                self._control.send(b"go\n")

    def revive(self) -> str | None:
        """If the process has ended, start it again after a pause. Returns a line for the log, or None."""
        now_s, code = time.monotonic(), self.code
        if code is None:
            return None
        if not self._again_s:
            lived = now_s - self._started_s > STEADY_S
            self._pause_s = 0.0 if lived else min(PAUSE_MOST_S, max(PAUSE_LEAST_S, 2 * self._pause_s))
            self._again_s = now_s + self._pause_s
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            when = "at once" if not self._pause_s else f"in {self._pause_s:g} s"
            return f"{self.name} {how}; it is restarted {when}"
        if now_s >= self._again_s:
            self._again_s = 0.0
            self.close()
            self.start()
        return None

    def send(self, number: int) -> None:
        """Send a signal to the process if it runs."""
        if self._process is not None and self.code is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Close the control socket; the child ends as a result."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def wait(self, timeout_s: float) -> int:
        """Wait for the process to end; kill it after the timeout. Returns the exit code."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Supervisor:
    """Starts and supervises the processes of a server. `log` must have been entered.

    Args:
        engine: the command of the engine process; the folder and the descriptor of its control socket are appended.
        listener: a bound socket. This process answers on it until the fronts do.
    """

    def __init__(self, config: ServerConfig, engine: Sequence[str], folder: Path, listener: socket.socket, log: Log):
        self._config, self._log, self._listener = config, log, listener
        write_config(folder, config)
        self._engine = _Child("the engine process", (*engine, str(folder)))
        command = (*FRONT, str(folder))
        self._fronts = [_Child(f"front process {i}", command, listener.fileno()) for i in range(1, (config.fronts or 1) + 1)]
        self._open = False
        """Whether fronts may listen."""
        self._signals: list[int] = []
        self._passed_on = 0
        self._kill_s: float | None = None

    def run(self, name: str) -> int:
        """Serve until a signal. Returns the exit code. `name` is the name of the model, for the log line with the address."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._run(name)
        finally:
            for child in (*self._fronts, self._engine):
                child.close()
                child.wait(END_S)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 2:
            for child in (*self._fronts, self._engine):
                child.send(signal.SIGKILL)
            os._exit(128 + number)

    def _run(self, name: str) -> int:
        with Starting(self._config, self._listener, self._log.say, f"{name} in its engine process") as starting:
            code = self._start(starting)
        if code is None:
            # Only now may fronts listen. Earlier, this process would share the socket and still answer that it is loading.
            self._open = True
            code = self._wait_for(lambda front: front.ready)
        if code is not None:
            return code
        if not self._signals:
            url = url_of(self._listener)
            self._log.say(f"Serving {name} at {url}  (API: {url}/v1, {self._count()}, Ctrl-C ends)")
        while not self._signals:
            time.sleep(LOOK_S)
            self._see_to(self._fronts)
            self._see_to([self._engine])
        return self._drain()

    def _start(self, starting: Starting) -> int | None:
        """Start all processes. Returns the exit code if the server ends before they are loaded, otherwise None.

        The fronts start together with the engine and wait for it. So their imports run while the engine loads its model.
        """
        for child in (self._engine, *self._fronts):
            child.start()
        while not self._engine.ready:
            time.sleep(LOOK_S)
            self._engine.heard()
            starting.stage(self._engine.stage)
            if self._signals:
                self._engine.send(signal.SIGKILL)  # it does not serve any client yet
                self._log.say("interrupted" if self._signals[0] == signal.SIGINT else "terminated")
                return 128 + self._signals[0]
            if self._engine.code is not None:
                return self._engine.code if self._engine.code > 0 else 1
            self._see_to(self._fronts)
        starting.stage("starting front processes")
        return self._wait_for(lambda front: front.loaded)

    def _wait_for(self, state: Callable[[_Child], bool]) -> int | None:
        """Wait until all fronts are in this state, or for a signal. Returns the exit code 1 after `START_S`, otherwise None."""
        end_s = time.monotonic() + START_S
        while not self._signals and not all(map(state, self._fronts)):
            time.sleep(LOOK_S)
            self._see_to(self._fronts)
            self._see_to([self._engine])
            if time.monotonic() > end_s:
                self._log.say(f"the front processes are not ready after {START_S:g} s; the server ends")
                return 1
        return None

    def _count(self) -> str:
        count = len(self._fronts)
        return "1 front process" if count == 1 else f"{count} front processes"

    def _see_to(self, children: Sequence[_Child]) -> None:
        for child in children:
            was_ready, stage = child.ready, child.stage
            child.heard()
            if child is self._engine and child.stage != stage and not child.ready:
                self._log.stage(child.stage)  # it was started again: there is no other place for this
            if self._open:
                child.go()
            line = child.revive()
            if line is not None:
                self._log.say(line)
            elif child.ready and not was_ready and child is self._engine:
                self._log.say("the engine process is running again")

    def _drain(self) -> int:
        """Pass the signals on to the fronts until all have ended. Returns the exit code."""
        end_s = time.monotonic() + self._config.drain_timeout_s + END_S
        while any(front.code is None for front in self._fronts):
            while self._passed_on < len(self._signals):
                for front in self._fronts:
                    front.send(self._signals[self._passed_on])
                self._passed_on += 1
            if time.monotonic() > end_s:
                for front in self._fronts:
                    front.send(signal.SIGKILL)
            time.sleep(LOOK_S)
        codes = {front.code for front in self._fronts}
        last = self._signals[-1]
        by_signal = {128 + last, -last, -signal.SIGKILL}  # -last: the signal came when a front no longer handled signals
        return 0 if codes <= {0} else 128 + last if codes & by_signal else 1


def engine_spec(folder: Path) -> dict[str, Any]:
    """The configuration of the engine process."""
    return json.loads((folder / "engine.json").read_text())
