"""A front process. It handles HTTP, chat templates, tokenization, text and events for an engine in another process.

supervisor.py starts it as `python -m tilewright.server.front FOLDER CONTROL LISTENER`; the last two are descriptors of sockets.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI

from tilewright.server.app import Server, app_of
from tilewright.server.config import ServerConfig
from tilewright.server.link import EngineLink
from tilewright.server.logs import Log
from tilewright.server.metrics import Metrics
from tilewright.server.prompts import Served
from tilewright.server.remote import RemoteEngine, ask_for_served
from tilewright.server.serve import run_server
from tilewright.server.supervisor import control_of, read_config
from tilewright.server.wire import address_of

__all__ = ["front_app", "run_front"]

ENGINE_S = 3600.0
"""How long a front waits for its engine, which may still load its model. Normally the parent ends the front earlier."""


def front_app(address: str, config: ServerConfig, served: Served) -> FastAPI:
    """The ASGI app that serves the engine at `address`. Its `Server` is `app.state.server`."""

    def connect(metrics: Metrics, on_failure: Callable[[BaseException], None]) -> EngineLink:
        return RemoteEngine(address, served, metrics, on_failure, max_wait_s=config.max_wait_s)

    return app_of(Server(connect, served, config))


def _watch(control: socket.socket, go: threading.Event) -> None:
    """Set `go` when the parent allows this process to listen. End this process when the parent has gone."""
    try:
        while words := control.recv(64):
            if b"go" in words:
                go.set()
    except OSError:
        pass
    os._exit(1)


def run_front(folder: Path, control: int, listener: socket.socket) -> int:
    """Serve until a signal. Returns the exit code."""
    config = read_config(folder)
    with Log(config.log_level, config.log_format) as log, control_of(control) as parent:
        go = threading.Event()
        threading.Thread(target=_watch, args=(parent, go), name="tilewright-parent", daemon=True).start()
        address = address_of(folder)
        try:
            served = ask_for_served(address, ENGINE_S)
        except (ValueError, TimeoutError) as error:
            log.say(f"error: {error}")
            return 1
        parent.send(b"loaded\n")
        go.wait()
        return run_server(front_app(address, config, served), listener, log, ready=lambda: parent.send(b"ready\n"))


if __name__ == "__main__":
    code = run_front(Path(sys.argv[1]), int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
    os._exit(code)
