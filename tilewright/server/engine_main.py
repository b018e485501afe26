"""The program of the engine process: `python -m tilewright.server.engine_main FOLDER CONTROL`, started by supervisor.py."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from tilewright.engine.core import Engine
from tilewright.engine.pooling import Pass
from tilewright.extras import MissingExtra
from tilewright.server.cores import share_cores
from tilewright.server.engine_process import EngineProcess
from tilewright.server.logs import Log
from tilewright.server.memory import settle
from tilewright.server.prompts import Served
from tilewright.server.supervisor import END_S, control_of, engine_spec, read_config, tell_stage

__all__ = ["Loaded", "serve_engine"]

Loaded = tuple[Engine, Served, Callable[[Pass], np.ndarray] | None]
"""(engine, what it serves, function that computes embeddings or scores of whole texts; None if the model has none)."""


def serve_engine(folder: Path, control: int, load: Callable[[Log], Loaded]) -> int:
    """Serve what `load` returns until the parent has gone. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when this process ends
    config = read_config(folder)
    with Log(config.log_level, config.log_format) as log, control_of(control) as parent:
        loaded = threading.Event()
        threading.Thread(target=_end_with, args=(parent, loaded), name="tilewright-parent", daemon=True).start()
        log.staged = partial(tell_stage, parent)
        try:
            engine, served, run_pass = load(log)
            process = EngineProcess(engine, served.description(), folder, parent.fileno(), run_pass=run_pass)
        except (ValueError, OSError, MemoryError, MissingExtra) as error:
            log.say(f"error: {str(error).strip() or type(error).__name__}")
            return 1
        settle()
        log.staged = None
        loaded.set()
        with suppress(OSError):
            parent.send(b"ready\n")
        return process.run()


def _end_with(parent: socket.socket, loaded: threading.Event) -> None:
    """Wait for the end of the parent, which may be killed, and end this process too: at once while it loads, otherwise after
    `END_S` if it has not ended by itself, because a step may hang."""
    try:
        parent.recv(1, socket.MSG_PEEK)  # the parent never writes, so this returns when it ends
    except ConnectionError:
        pass
    except OSError:  # closed here: this process ends by itself
        return
    if loaded.is_set():
        time.sleep(END_S)
    os._exit(1)


def _load(folder: Path, log: Log) -> Loaded:
    spec = engine_spec(folder)
    started_s = time.perf_counter()
    log.say(f"Loading {spec['model']} ...")
    log.stage("importing torch")
    from tilewright.engine.llm import LLM

    llm = LLM(spec["model"], progress=log.stage, **spec["options"])
    share_cores(llm)
    log.say(f"Loaded in {time.perf_counter() - started_s:.1f} s")
    pooler = llm.pooler
    pooled = None if pooler is None else pooler.pooled
    served = Served.of(llm.engine, spec["name"], pooled=pooled, generates=llm.generates)
    return llm.engine, served, None if pooler is None else pooler.run


if __name__ == "__main__":
    here = Path(sys.argv[1])
    code = serve_engine(here, int(sys.argv[2]), lambda log: _load(here, log))
    os._exit(code)  # do not wait for threads: a step or a device may hang
