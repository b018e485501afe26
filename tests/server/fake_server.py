"""A server process around the engine that says the alphabet, for tests of signals, exit codes and the log.

`python -m tests.server.fake_server <seconds a step> [broken] [hangs] [field=value of ServerConfig ...]`
"""

import ast
import sys
import time

from tests.server.fake_engine import fake_engine
from tilewright.server.app import create_app
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.prompts import Served
from tilewright.server.serve import bind, run_server

if __name__ == "__main__":
    fields = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
    config = ServerConfig(**{"port": 0, "log_level": "warning", **{name: ast.literal_eval(v) for name, v in fields.items()}})
    engine = fake_engine(delay_s=float(sys.argv[1]), max_model_len=4096, pages=4096, max_seqs=64, max_waiting=1024)
    if "broken" in sys.argv:
        engine.step = {}.popitem  # type: ignore[method-assign]  # a bug that every step has
    if "hangs" in sys.argv:
        engine.step = lambda: time.sleep(3600)  # type: ignore[method-assign]  # a device that never answers
    app = create_app(engine, Served.of(engine, "letters"), config)
    with Log(config.log_level, config.log_format) as log:
        code = run_server(app, bind(config), log)
    sys.exit(code)
