"""The server's configuration: where it listens, and how much one client may request."""

import math
import re
from dataclasses import dataclass

from tilewright.engine.config import option

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "ServerConfig"]

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
TOOL_FORMATS = ("deepseek_v3", "deepseek_v31", "harmony", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
MAX_REPLICAS = 64
MAX_FRONTS = 64
MAX_BODY_BYTES = 1 << 30
"""gRPC stores the length of a message in 32 bits."""
_COLLECTOR = re.compile(r"https?://[^\s?#]+")
_ORIGIN = re.compile(r"https?://[^/\s*]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The address to listen on, and limits for sizes that clients choose. Fields with a help text are options of `serve`.

    Raises:
        ValueError: a value out of range; the message names the field.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces")
    port: int = option(8000, "port to listen on; 0: any free port")
    api_key: str | None = option(None, "key that clients must send as `Authorization: Bearer <key>`; default: no key is needed")
    grpc_port: int | None = option(
        None, "port for ordinary models over gRPC (Open Inference Protocol); 0: any free port; default: no gRPC"
    )
    shared_memory: bool = option(
        False, "let clients on this machine pass the tensors of ordinary models in shared memory; see docs/deploy.md"
    )
    max_body_bytes: int = option(16 << 20, "largest request body that is accepted, in MiB")
    max_connections: int = option(
        4096, "most connections open at once; at the limit, idle connections are closed to make room for new ones"
    )
    replicas: int = option(
        1, "copies of the model on this machine, behind one router; each gets its own GPU if there are enough"
    )
    ray: bool = option(False, "start the replicas on a Ray cluster: one that is running, or else one that this command starts")
    max_replicas: int | None = option(
        None, "with --ray: most replicas that may run under load; default: the number of --replicas"
    )
    scale_down_after_s: float = option(120.0, "with --ray: stop an extra replica after this many seconds of lower load")
    fronts: int | None = option(
        None,
        "number of front processes that handle HTTP while the engine runs in a separate process; 0: one process does both; "
        "default: 1 for a language model alone on one device, if this machine has 2 cores or more; otherwise 0; for ordinary "
        "models, fronts read and write the HTTP of small inference requests",
    )
    drain_timeout_s: float = option(60.0, "seconds to let running requests finish after SIGTERM or Ctrl-C")
    cors_origins: tuple[str, ...] | None = option(
        None,
        "allow web pages from this origin to use the server (CORS), such as https://chat.example; may be given several times",
    )
    log_level: str = option("info", f"least important messages to log: {', '.join(LOG_LEVELS)}; each request is logged at info")
    log_format: str = option("text", f"format of the log lines: {' or '.join(LOG_FORMATS)}")
    tool_format: str = option(
        "auto",
        f"format in which the model writes tool calls: auto (found from its chat template), none, {', '.join(TOOL_FORMATS)}",
    )
    adapter_dir: str | None = option(
        None, "folder from which clients may load LoRA adapters while the server runs; default: clients cannot load adapters"
    )
    traces: str | None = option(
        None, "send a trace of each request to this OpenTelemetry collector, such as http://127.0.0.1:4318; default: no traces"
    )
    trace_share: float = option(1.0, "share of the requests to trace, 0 to 1, if the client does not decide itself")
    head_timeout_s: float = 10.0
    """Longest time that the head of a request may take to arrive, and a new connection may wait before its first."""
    body_timeout_s: float = 60.0
    """Longest time that a request body may take to arrive."""
    max_wait_s: float = option(
        2.0, "longest time in seconds that a request may wait for its start; it is refused if the expected wait is longer"
    )
    write_timeout_s: float = 30.0
    """A connection is closed if the client reads nothing of its answer for this long."""
    step_timeout_s: float = 120.0
    """If a step of the engine takes longer, it counts as hung and /health answers 503."""
    max_bodies: int = 64
    """Memory for the bodies of all requests together, as a multiple of `max_body_bytes`."""
    max_prompts: int = 256
    """Most prompts in one completion request."""
    max_inputs: int = 2048
    """Most texts in one request for embeddings, scores or reranking; the limit of OpenAI's API."""
    max_n: int = 128
    """Most samples for one prompt."""
    max_logit_bias: int = 1024
    """Most entries in logit_bias."""
    max_stop: int = 4
    """Most stop strings; the limit of OpenAI's API."""
    max_stop_chars: int = 256
    """Longest stop string in characters; streaming holds back at most this much text."""
    max_stop_token_ids: int = 128
    """Most stop token ids."""
    max_logprobs: int = 20
    """Most alternatives reported for a token."""
    max_messages: int = 4096
    """Most messages in one chat request."""

    def __post_init__(self) -> None:
        if self.traces is not None and not _COLLECTOR.fullmatch(self.traces):
            raise ValueError(f"traces is {self.traces!r}, wanted the address of a collector, such as http://127.0.0.1:4318")
        if not 0 <= self.trace_share <= 1:
            raise ValueError(f"trace_share is {self.trace_share}, wanted 0 to 1")
        if not 0 < self.max_wait_s < math.inf:
            raise ValueError(
                f"max_wait_s is {self.max_wait_s}, wanted a finite number of seconds above 0; for no limit, use a large number"
            )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, wanted 0 to 65535 (0: any free port)")
        if self.grpc_port is not None and not 0 <= self.grpc_port <= 65535:
            raise ValueError(f"grpc_port is {self.grpc_port}, wanted 0 to 65535 (0: any free port)")
        if not self.host:
            raise ValueError("host is empty, wanted an address such as 127.0.0.1, or 0.0.0.0 for every interface")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ValueError("api_key is empty or has characters that an HTTP header cannot carry; wanted printable ASCII")

        formats = ("auto", "none", *TOOL_FORMATS)
        for name, known in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS), ("tool_format", formats)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, wanted one of {', '.join(known)}")
        if self.max_connections < 1:
            raise ValueError(f"max_connections is {self.max_connections}, wanted 1 or more")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas is {self.replicas}, wanted 1 to {MAX_REPLICAS}")
        if self.fronts is not None and not 0 <= self.fronts <= MAX_FRONTS:
            raise ValueError(f"fronts is {self.fronts}, wanted 0 (one process for everything) to {MAX_FRONTS}")
        if self.max_replicas is not None and not (self.ray and self.replicas <= self.max_replicas <= MAX_REPLICAS):
            got = f"max_replicas is {self.max_replicas}" + ("" if self.ray else " without --ray")
            raise ValueError(f"{got}, wanted {self.replicas} to {MAX_REPLICAS}, and --ray, which changes their number")
        if not 1 <= self.scale_down_after_s <= 86400:
            raise ValueError(f"scale_down_after_s is {self.scale_down_after_s}, wanted 1 to 86400 seconds")
        if self.ray and (self.fronts or self.grpc_port is not None):
            raise ValueError("--ray uses one front, which only serves HTTP; leave out --fronts and --grpc-port")
        if self.shared_memory and not self.loopback:
            raise ValueError(
                f"shared_memory is for clients on this machine only, but host is {self.host!r}, which other "
                "machines can reach; listen on 127.0.0.1, or leave shared_memory out"
            )
        if self.shared_memory and (self.ray or self.replicas > 1):
            raise ValueError("shared_memory is for a single server only; leave out --ray and --replicas")
        if self.replicas > 1 and self.fronts:
            raise ValueError(
                f"replicas is {self.replicas} and fronts is {self.fronts}, but each replica has one front; leave one "
                "of them out"
            )
        if not 0 <= self.drain_timeout_s <= 86400:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}, wanted 0 to 86400 seconds")
        if not 1 <= self.max_body_bytes <= MAX_BODY_BYTES:
            raise ValueError(f"max_body_bytes is {self.max_body_bytes}, wanted 1 to {MAX_BODY_BYTES} (1024 MiB)")
        for origin in self.cors_origins or ():
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins contains {origin!r}, which is not an origin; wanted scheme and host, such as "
                    "https://chat.example"
                )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")
