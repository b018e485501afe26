"""A front process: HTTP, templates, tokenizing, text and events, for an engine in another process."""

from collections.abc import Callable

from fastapi import FastAPI

from tilewright.server.app import Server, app_of
from tilewright.server.config import ServerConfig
from tilewright.server.link import EngineLink
from tilewright.server.metrics import Metrics
from tilewright.server.prompts import Served
from tilewright.server.remote import RemoteEngine

__all__ = ["front_app"]


def front_app(address: str, config: ServerConfig, served: Served) -> FastAPI:
    """The ASGI app that serves the engine at `address`; its `Server` is at `app.state.server`."""

    def connect(metrics: Metrics, on_failure: Callable[[BaseException], None]) -> EngineLink:
        return RemoteEngine(address, metrics, on_failure, max_wait_s=config.max_wait_s)

    return app_of(Server(connect, served, config))
