"""A server process around the engine that says the alphabet, for tests of signals and exit codes.

`python -m tests.server.fake_server <seconds a step> [broken]`
"""

import sys

from tests.server.fake_engine import fake_engine
from tilewright.server.app import create_app
from tilewright.server.config import ServerConfig
from tilewright.server.prompts import Served
from tilewright.server.serve import bind, run_server

if __name__ == "__main__":
    config = ServerConfig(port=0)
    engine = fake_engine(delay_s=float(sys.argv[1]))
    if "broken" in sys.argv:
        engine.step = {}.popitem  # type: ignore[method-assign]  # a bug that every step has
    app = create_app(engine, Served.of(engine, "letters"), config)
    sys.exit(run_server(app, bind(config), lambda line: print(line, file=sys.stderr, flush=True)))
