"""A replica: a complete server in a process of its own, behind a router. Only fleet.py starts it.

Command: `python -m tilewright.server.replica LISTENER CONTROL`, where both arguments are descriptors of inherited sockets. Its
configuration comes through CONTROL as JSON:
{"model", "name", "engine": options of the engine, "server": options of the server, "index", "count"}.
"""

import socket
import sys
from typing import Any

from tilewright.server.config import ServerConfig
from tilewright.server.digests import Publisher, take_spec
from tilewright.server.logs import Log

__all__ = ["main"]


def _device(options: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """Choose the device: a GPU per replica if there are enough. Without any GPU, each replica gets its share of the threads."""
    import torch

    from tilewright.hw.device import cuda_count

    if options.get("device") is None and cuda_count() >= count:
        return {**options, "device": f"cuda:{index}"}
    if not cuda_count():
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    return options


def main(listener: socket.socket, control: socket.socket, spec: dict[str, Any]) -> int:
    """Load the model, send the hello, and serve. Returns the exit code."""
    publisher = Publisher(control)  # first: it ends this process if the router ends, even while torch is being imported
    publisher.stage("importing torch")
    from tilewright.engine.llm import LLM
    from tilewright.server.app import create_app
    from tilewright.server.prompts import Served
    from tilewright.server.serve import run_server

    config = ServerConfig(**spec["server"])
    with Log(config.log_level, config.log_format) as log:
        try:
            llm = LLM(spec["model"], progress=publisher.stage, **_device(spec["engine"], spec["index"], spec["count"]))
        except (ValueError, OSError, MemoryError, ImportError) as error:
            log.say(f"error: replica {spec['index']}: {str(error).strip() or type(error).__name__}")
            return 1
        blocks = llm.engine.scheduler.blocks
        pooler = llm.pooler
        pooled, run_pass = (None, None) if pooler is None else (pooler.pooled, pooler.run)
        served = Served.of(llm.engine, spec["name"], pooled=pooled, generates=llm.generates)
        publisher.hello({"served": served.description(), "page_tokens": blocks.page_size})
        blocks.listener = publisher
        return run_server(create_app(llm.engine, served, config, run_pass), listener, log)


if __name__ == "__main__":
    inherited = [socket.socket(fileno=int(word)) for word in sys.argv[1:3]]
    # asyncio sets TCP_NODELAY on accepted connections only if the socket's protocol is explicitly TCP; see `bind` in serve.py.
    first = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=inherited[0].detach())
    sys.exit(main(first, inherited[1], take_spec(inherited[1])))
