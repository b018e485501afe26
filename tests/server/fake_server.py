"""A server process around the engine that says the alphabet, for tests of signals, exit codes and the log.

`python -m tests.server.fake_server <seconds a step> [broken] [hangs] [many] [missing] [loads] [field=value ...]`; with
`fronts=2` it is four processes: this one, the engine's (`... engine FOLDER CONTROL` behind the same words), and the fronts'.
"""

import ast
import os
import sys
import threading
import time
from pathlib import Path

from tests.server.fake_engine import fake_engine
from tilewright.engine.core import Engine
from tilewright.server.app import create_app
from tilewright.server.config import ServerConfig
from tilewright.server.engine_main import Loaded, serve_engine
from tilewright.server.logs import Log
from tilewright.server.prompts import Served
from tilewright.server.serve import bind, run_server
from tilewright.server.supervisor import Supervisor, private_folder


def made(words: list[str]) -> Engine:
    """The engine that the words of the command ask for."""
    seqs, waiting = (512, 4096) if "many" in words else (64, 1024)
    if "loads" in words:  # for ever
        print("the engine is being made", file=sys.stderr, flush=True)
        threading.Event().wait()
    if "missing" in words:
        raise ValueError("there is no such model")
    seqs, waiting, pages = (512, 4096, 1 << 16) if "many" in words else (64, 1024, 4096)
    engine = fake_engine(delay_s=float(words[1]), max_model_len=4096, pages=pages, max_seqs=seqs, max_waiting=waiting)
    if "broken" in words:  # a bug that every step has
        engine.step = engine.advance = {}.popitem  # type: ignore[method-assign]
    if "hangs" in words:  # a device that never answers
        engine.step = engine.advance = lambda: time.sleep(3600)  # type: ignore[method-assign]
    return engine


def _loaded(words: list[str], log: Log) -> Loaded:
    log.stage("loading weights 3/9")
    return _served(made(words))


def _served(engine: Engine) -> Loaded:
    return engine, Served.of(engine, "letters"), None


def main(words: list[str]) -> int:
    """The exit code."""
    fields = dict(word.split("=", 1) for word in words[2:] if "=" in word)
    config = ServerConfig(**{"port": 0, "log_level": "warning", **{name: ast.literal_eval(v) for name, v in fields.items()}})
    if "engine" in words:
        return serve_engine(Path(words[-2]), int(words[-1]), lambda log: _loaded(words, log))
    with Log(config.log_level, config.log_format) as log:
        if config.fronts:
            command = [sys.executable, "-m", "tests.server.fake_server", *words[1:], "engine"]
            with private_folder() as folder:
                return Supervisor(config, command, folder, bind(config), log).run("letters")
        engine = made(words)
        return run_server(create_app(engine, Served.of(engine, "letters"), config), bind(config), log)


if __name__ == "__main__":
    code = main(sys.argv)
    if "engine" in sys.argv:
        os._exit(code)
    sys.exit(code)
