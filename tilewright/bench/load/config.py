"""The configuration of a load test: a frozen dataclass, from which the options of `tilewright load` are made."""

from dataclasses import dataclass

from tilewright.bench.load.schedule import span
from tilewright.bench.load.slo import Slo
from tilewright.engine.config import option

__all__ = ["ENDPOINTS", "LoadConfig"]

ENDPOINTS = ("completions", "chat", "v2")
ARRIVALS = ("poisson", "constant")


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """A load test. Raises ValueError for values that make none."""

    endpoint: str = option(
        "completions", f"API to send requests to: {', '.join(ENDPOINTS)} (v2 is the Open Inference Protocol)"
    )
    model: str | None = option(None, "name of the model; default: the first one that the service lists; v2 needs it")
    concurrency: str | None = option(
        None,
        "closed loop: number of users, each of whom waits for an answer before asking again; 1,2,4,8 "
        "runs one stage for each number",
    )
    rate: str | None = option(
        None, "open loop: requests sent per second, without waiting for answers; 2,4,8 runs one stage for each rate"
    )
    arrivals: str = option("poisson", f"times between the requests of an open loop: {' or '.join(ARRIVALS)}")
    trace: str | None = option(
        None, "replay a recorded trace: a CSV or JSON lines file, also as .xz or .gz; docs/load.md describes the format"
    )
    speed: float = option(1.0, "replay a trace this many times faster than it was recorded")
    length_scale: float = option(1.0, "multiply the lengths of a trace's prompts and answers by this factor")
    limit: int | None = option(None, "most requests in a stage; default: no limit")
    prompt_tokens: str = option("128", "length of a prompt in tokens, or a range such as 64-256")
    output_tokens: str = option("64", "length of an answer in tokens, or a range such as 64-256")
    shared_prefix: int = option(0, "number of tokens that all prompts have in common at their beginning")
    batch: int = option(1, "size of the dimensions that a v2 model leaves open, such as the batch")
    shared_memory: bool = option(
        False, "pass a v2 model's tensors in shared memory; only on the machine on which the service runs"
    )
    duration: float = option(30.0, "seconds during which a stage sends requests; a trace is always sent to its end")
    warmup: float = option(5.0, "seconds at the beginning of a stage that are left out of the results")
    until_stable: float | None = option(
        None, "end a stage early once three windows of this many seconds agree within 10 %; at most a third of duration"
    )
    slo: str | None = option(
        None, "latency limits of a good answer, such as ttft=200ms,itl=20ms; tpot and e2e may be given as well"
    )
    ignore_eos: bool = option(
        True, "ask for answers of exactly the given length; many servers support this request field, but OpenAI's API does not"
    )
    timeout: float = option(600.0, "seconds after which a request counts as failed")
    wait: float = option(600.0, "longest time in seconds to wait for a service that says that it is loading; 0: do not wait")
    max_in_flight: int = option(4096, "most requests in flight at once")
    api_key: str | None = option(None, "API key, sent as `Authorization: Bearer <key>`")
    seed: int = option(0, "seed of the prompts, lengths and arrival times")

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint is {self.endpoint!r}, wanted one of {', '.join(ENDPOINTS)}")
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"arrivals is {self.arrivals!r}, wanted {' or '.join(ARRIVALS)}")
        given = [name for name in ("concurrency", "rate", "trace") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given, wanted only one of them")
        for name in ("speed", "length_scale", "duration", "timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted above 0 and below a million")
        if not 0 <= self.wait < 1e6:
            raise ValueError(f"wait is {self.wait}, wanted 0 to a million seconds")
        if not 0 <= self.warmup < self.duration and self.trace is None:
            raise ValueError(f"warmup is {self.warmup} s, wanted less than the duration, {self.duration} s")
        if self.until_stable is not None and not 0 < self.until_stable <= self.duration / 3:
            raise ValueError(f"until_stable is {self.until_stable} s, wanted at most a third of the duration")
        for name, least in {"limit": 1, "shared_prefix": 0, "batch": 1, "max_in_flight": 1}.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= 1 << 24:
                raise ValueError(f"{name} is {value}, wanted {least} or more")
        if self.endpoint == "v2" and self.model is None:
            raise ValueError("endpoint v2 needs --model, the model's name in the service")
        if self.endpoint == "v2" and set(self.objective.bounds) - {"e2e"}:
            raise ValueError("a v2 service does not stream, so only an objective for e2e is possible")
        if self.shared_memory and self.endpoint != "v2":
            raise ValueError(f"shared_memory is only for endpoint v2, but the endpoint is {self.endpoint}")
        _ = self.lengths, self.objective, self.loads

    @property
    def objective(self) -> Slo:
        """The bounds that count."""
        return Slo.parse(self.slo or "")

    @property
    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ranges of tokens of prompts and answers."""
        return span(self.prompt_tokens), span(self.output_tokens)

    @property
    def loads(self) -> list[float]:
        """Numbers of users, or rates, of the stages."""
        text = self.rate or self.concurrency or "8"
        try:
            found = [float(part) for part in text.split(",")]
        except ValueError:
            found = []
        whole = self.rate is not None or all(value == int(value) for value in found)
        if not found or not whole or not all(0 < value <= 1e5 for value in found):
            name = "rate" if self.rate is not None else "concurrency"
            raise ValueError(f"{name} is {text!r}, wanted numbers above 0, separated by commas, such as 1,2,4")
        return found
