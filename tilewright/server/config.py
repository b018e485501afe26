"""What a server is told at its start: where it listens and how much one client may ask for."""

import math
from dataclasses import dataclass

from tilewright.engine.config import option

__all__ = ["ServerConfig"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Listening address and the caps on every size a client can name. Fields with a help text are options of `serve`.

    Raises:
        ValueError: a value out of range; the message names the field.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 takes any free one")
    api_key: str | None = option(None, "key that clients must send as `Authorization: Bearer <key>`; default: none")
    max_body_bytes: int = option(16 << 20, "largest request body, in MiB")
    body_timeout_s: float = 60.0
    """Longest time that a request body may take to arrive."""
    max_wait_s: float = option(2.0, "seconds that a request may wait to be started; it is refused where it would wait longer")
    max_prompts: int = 256
    """Most prompts in one completion request."""
    max_n: int = 128
    """Most samples for one prompt."""
    max_logit_bias: int = 1024
    """Most entries in logit_bias."""
    max_stop: int = 4
    """Most stop strings; OpenAI's number."""
    max_stop_chars: int = 256
    """Longest stop string: the text held back while streaming is at most that long."""
    max_stop_token_ids: int = 128
    """Most stop token ids."""
    max_logprobs: int = 20
    """Most alternatives reported for a token."""
    max_messages: int = 4096
    """Most messages in one chat request."""

    def __post_init__(self) -> None:
        if not 0 < self.max_wait_s < math.inf:
            raise ValueError(f"max_wait_s is {self.max_wait_s}, wanted seconds above 0; a large number is no limit")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, wanted 0 to 65535 (0: any free port)")
        if not self.host:
            raise ValueError("host is empty, wanted an address such as 127.0.0.1, or 0.0.0.0 for every interface")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ValueError("api_key has characters that an HTTP header cannot carry; wanted printable ASCII, not empty")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")
