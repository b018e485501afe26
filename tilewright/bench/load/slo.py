"""Service-level objectives: limits on latencies. A request counts as good if it meets all of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["METRICS", "Slo"]

METRICS = ("ttft", "itl", "tpot", "e2e")
"""Time to first token; inter-token latency; time per output token; end to end."""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Upper bounds in seconds; None is no bound. A request meets `itl` if 95 % of its gaps between pieces are within it."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse a list such as "ttft=200ms,itl=20ms". Raises ValueError if it is invalid."""
        bounds: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            found = re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)(us|ms|s)", part)
            if found is None or found[1] not in METRICS or found[1] in bounds:
                wanted = f"wanted {', '.join(METRICS)}, each at most once, as in ttft=200ms,itl=20ms (units us, ms, s)"
                raise ValueError(f"the objective {part!r} cannot be read; {wanted}")
            bounds[found[1]] = float(found[2]) * _UNITS[found[3]]
            if not bounds[found[1]]:
                raise ValueError(f"the objective {part!r} can never be met; wanted a bound above 0")
        return cls(**bounds)

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set."""
        return {name: bound for name in METRICS if (bound := getattr(self, name)) is not None}

    def kept_by(self, latencies: Mapping[str, float | None]) -> bool:
        """Whether latencies by metric meet all bounds. None meets any bound: a request of one token has no gap."""
        values = ((latencies.get(name), bound) for name, bound in self.bounds.items())
        return all(value is None or value <= bound for value, bound in values)

    def __str__(self) -> str:
        said = [f"{name}={bound * 1000:g}ms" for name, bound in self.bounds.items()]
        return ",".join(said) or "none"
