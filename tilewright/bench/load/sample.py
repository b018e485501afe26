"""The result of one request, with the times that its user would have seen."""

from dataclasses import dataclass, field

import numpy as np

__all__ = ["FAILED", "OK", "REJECTED", "Sample"]

OK, REJECTED, FAILED = "ok", "rejected", "failed"


@dataclass(slots=True)
class Sample:
    """Times are seconds from the beginning of the stage.

    Latencies count from `planned_s`, the time at which the user wanted the answer, not from `sent_s`: a client that is held up
    by a slow service would otherwise leave out just the requests that a real user would have had to wait for (coordinated
    omission). In a closed loop the two are equal, since its users ask again only when they have their answer.
    """

    planned_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    """When each piece of the answer that holds text arrived."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the service says it had in its cache."""
    status: str = FAILED
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """Time to the first token; None if the service does not stream or did not answer."""
        return self.pieces_s[0] - self.planned_s if self.pieces_s and self.status == OK else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: times between two pieces. A piece may hold several tokens."""
        return [after - before for before, after in zip(self.pieces_s, self.pieces_s[1:])] if self.status == OK else []

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.status != OK or self.output_tokens < 2 or len(self.pieces_s) < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Time to the end of the answer."""
        return self.end_s - self.planned_s if self.status == OK else None

    @property
    def latencies(self) -> dict[str, float | None]:
        """Latency by metric, with the names used in objectives; `itl` is the 95th percentile of this request's gaps."""
        gaps = self.gaps
        itl = float(np.percentile(gaps, 95)) if gaps else None
        return {"ttft": self.ttft, "itl": itl, "tpot": self.tpot, "e2e": self.e2e}
