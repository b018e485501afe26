"""How the batches of a model are formed (batcher.py)."""

from dataclasses import dataclass

__all__ = ["BatchPolicy"]


@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """How batches are formed.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    max_rows: int = 64
    """Most rows of a batch."""
    max_delay_s: float = 0.0
    """Seconds for which an item may wait for others to join its batch while an instance is free."""
    preferred: tuple[int, ...] = ()
    """Batch sizes in rows at which a batch leaves before the delay is over; the largest one that waiting rows fill is used."""
    max_waiting: int = 1024
    """Most items in the queue; more are refused."""
    max_wait_s: float = 2.0
    """Longest expected wait of a new item, estimated from the last batches; applies if the rows of a batch already wait."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_rows <= 1 << 16:
            raise ValueError(f"max_batch is {self.max_rows}, wanted 1 to {1 << 16}")
        if not 0 <= self.max_delay_s <= 60:
            raise ValueError(f"max_delay is {self.max_delay_s * 1e3:g} ms, wanted 0 to 60000")
        if any(not 1 <= size <= self.max_rows for size in self.preferred):
            raise ValueError(f"preferred sizes are {list(self.preferred)}, wanted sizes from 1 to max_batch={self.max_rows}")
        if not 1 <= self.max_waiting <= 1 << 20:
            raise ValueError(f"max_waiting is {self.max_waiting}, wanted 1 to {1 << 20}")
        if not 0 < self.max_wait_s <= 86400:
            raise ValueError(f"max_wait_s is {self.max_wait_s:g}, wanted more than 0 and at most 86400")
