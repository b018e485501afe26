"""A replica around the engine that says the alphabet: `python -m tests.server.fake_replica LISTENER CONTROL`.

Its model is the seconds of a step, "loads" for one that is never loaded, or "broken".
"""

import socket
import sys
import threading

from tilewright.server.digests import take_spec


def main(listener: socket.socket, control: socket.socket, spec: dict) -> int:
    from tests.server.fake_engine import fake_engine
    from tilewright.server.app import create_app
    from tilewright.server.config import ServerConfig
    from tilewright.server.digests import Publisher
    from tilewright.server.logs import Log
    from tilewright.server.prompts import Served
    from tilewright.server.serve import run_server

    publisher = Publisher(control)
    if spec["model"] == "loads":
        publisher.stage("loading weights 3/9")
        threading.Event().wait()
    config = ServerConfig(**spec["server"])
    engine = fake_engine(delay_s=float(spec["model"]), max_model_len=4096, pages=512, max_seqs=16, max_waiting=64)
    served = Served.of(engine, spec["name"])
    publisher.hello({"served": served.description(), "page_tokens": engine.scheduler.blocks.page_size})
    engine.scheduler.blocks.listener = publisher
    with Log(config.log_level, config.log_format) as log:
        return run_server(create_app(engine, served, config), listener, log)


if __name__ == "__main__":
    control = socket.socket(fileno=int(sys.argv[2]))
    given = take_spec(control)
    if given["model"] == "broken":
        sys.exit(3)
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=int(sys.argv[1]))
    sys.exit(main(tcp, control, given))
