"""A replica on a Ray cluster: the app of a complete server, without a port. Ray starts it, and front.py sends it requests.

Its configuration is a dict of plain values (`spec`):

    {"folder": working directory of the command, "language": a model or None, "name", "engine": options of the engine,
     "models": [NAME=SOURCE ...], "ordinary": fields of HostConfig, "server": fields of ServerConfig, "threads"}
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from tilewright.host.config import HostConfig
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.on_ray.scaling import METRIC, language_load, ordinary_load

__all__ = ["Head", "Replica", "app_of_spec"]

logger = logging.getLogger(__name__)

Head = tuple[int, list[tuple[bytes, bytes]]]
"""(status, headers) of an answer."""
QUEUE = 64
"""Most pieces of an answer that wait for the front. At this limit the app has to wait."""
END_S = 1.0
"""How long the app may take to notice that a client has gone."""
JOINED_BYTES = 1 << 20
"""Waiting pieces are joined until they have this size."""


def app_of_spec(spec: dict[str, Any]) -> FastAPI:
    """The app of a replica. Raises ValueError or OSError if a model cannot be loaded."""
    import torch

    from tilewright.host.sources import host_of_sources

    if Path(spec["folder"]).is_dir():  # on another machine the folder may not exist
        os.chdir(spec["folder"])
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    config = ServerConfig(**spec["server"])
    host = host_of_sources(spec["models"], HostConfig(**spec["ordinary"]))
    if spec["language"] is None:
        from tilewright.server.v2.app import create_models_app

        assert host is not None
        return create_models_app(host, config)
    from tilewright.engine.llm import LLM
    from tilewright.server.app import create_app
    from tilewright.server.prompts import Served

    llm = LLM(spec["language"], **spec["engine"])
    pooler = llm.pooler
    pooled, run_pass = (None, None) if pooler is None else (pooler.pooled, pooler.run)
    served = Served.of(llm.engine, spec["name"], pooled=pooled, generates=llm.generates)
    app = create_app(llm.engine, served, config, run_pass)
    if host is not None:
        from tilewright.server.v2.app import attach

        attach(app, host, config)
    return app


class Replica:
    """The deployment class of Ray Serve: each replica's process has one instance."""

    async def __init__(self, spec: dict[str, Any]):  # pyright: ignore[reportGeneralTypeIssues]  # Ray Serve awaits it
        self._log = Log(spec["server"]["log_level"], spec["server"]["log_format"])
        self._log.__enter__()
        self.app = await asyncio.to_thread(app_of_spec, spec)
        self._server = self.app.state.server
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self.app.router.lifespan_context(self.app))
        if (loaded := getattr(self.app.state, "loaded", None)) is not None:
            await loaded  # Ray must not send requests before the ordinary models are loaded
        await self.check_health()

    async def __del__(self) -> None:  # Ray Serve awaits this too, once the replica has drained
        await self.close()

    async def close(self) -> None:
        """End the app and the log."""
        await self._stack.aclose()
        self._log.__exit__(None, None, None)

    async def check_health(self) -> None:
        """Called by Ray. Raises RuntimeError if the replica has to be replaced."""
        if self._server.failure is not None:
            raise RuntimeError(f"the replica failed: {self._server.failure}")
        watchdog = getattr(self._server, "watchdog", None)
        if watchdog is not None and watchdog.hangs:
            raise RuntimeError("the engine is in a step that does not end")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray. Returns the load of the replica."""
        loads = [0.0]
        if hasattr(self._server, "watchdog"):
            stats = (await self._server.worker.scrape()).stats
            engine = self._server.worker.engine
            places = engine.scheduler.max_seqs
            loads.append(language_load(stats.running, stats.waiting, places, stats.pages_used, stats.pages_total))
        if (host := getattr(self.app.state, "host", None)) is not None:
            for model in host.models.values():
                open_requests = sum(version.waiting + version.running for version in model.versions.values())
                loads.append(ordinary_load(open_requests, model.config.max_batch, model.config.instances))
        return {METRIC: max(loads)}

    async def about(self) -> dict[str, Any]:
        """A description of what is served, for the front."""
        return {"name": self._server.served.name, "api": self._server.api, "pid": os.getpid()}

    async def whole(self, scope: dict[str, Any], body: bytes) -> tuple[Head, bytes]:
        """The complete answer to a request, as (head, body). Used for requests that go to all replicas."""
        head, parts = None, list[bytes]()
        async for piece in self.answer(scope, body):
            if isinstance(piece, bytes):
                parts.append(piece)
            else:
                head = piece
        assert head is not None
        return head, b"".join(parts)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Head | bytes]:
        """The answer to a request: first its head, then its body in pieces as they become available.

        Args:
            scope: the ASGI scope of the request.
            body: the complete body of the request.
        """
        pieces = asyncio.Queue[Message | None](QUEUE)
        gone, given = asyncio.Event(), False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self.app({"type": "http", "state": {}, **scope}, receive, pieces.put)
            finally:
                await pieces.put(None)

        running = asyncio.ensure_future(run())
        try:
            while (message := await pieces.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message.get("headers", ()))
                elif piece := _joined(message, pieces):
                    yield piece
        finally:
            gone.set()  # if this generator is closed early, the front's client has gone
            done, late = await asyncio.wait({running}, timeout=END_S)
            for task in late:
                task.cancel()
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    logger.error("the app failed on a request", exc_info=error)


def _joined(message: Message, pieces: "asyncio.Queue[Message | None]") -> bytes:
    """A piece of a body, joined with the pieces that wait after it."""
    piece = bytearray(message.get("body", b""))
    while len(piece) < JOINED_BYTES and not pieces.empty():
        more = pieces.get_nowait()
        if more is None:
            pieces.put_nowait(None)  # put the end mark back: the caller looks for it
            break
        piece += more.get("body", b"")
    return bytes(piece)
