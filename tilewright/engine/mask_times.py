"""What the masks of grammars cost the thread of an engine."""

from dataclasses import dataclass, replace

__all__ = ["MaskTimes"]


@dataclass(slots=True)
class MaskTimes:
    """Sums over the steps that had masks; seconds on the clock."""

    steps: int = 0
    masks: int = 0
    wait_s: float = 0.0
    """Waiting for the step before, the device's time included. Near 0, the host is slower than the device."""
    accept_s: float = 0.0
    """Accepting the samples of the step before."""
    commit_s: float = 0.0
    """Following the grammars along the tokens that have arrived."""
    fill_s: float = 0.0
    """Filling masks."""
    send_s: float = 0.0
    """Sending masks to the device, and launching head and sampling."""

    def copy(self) -> "MaskTimes":
        """The present values."""
        return replace(self)

    def since(self, before: "MaskTimes") -> "MaskTimes":
        """What has been added after `before`."""
        return MaskTimes(
            self.steps - before.steps, self.masks - before.masks, self.wait_s - before.wait_s,
            self.accept_s - before.accept_s, self.commit_s - before.commit_s,
            self.fill_s - before.fill_s, self.send_s - before.send_s,
        )  # fmt: skip
