"""The report of quantising: each layer's error and bytes, why a layer was left out, and the speed of the format."""

from dataclasses import asdict, dataclass
from typing import Any

from tilewright.quant.speed import speed_of, speed_text

__all__ = ["LayerReport", "Report"]


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One row of the report: a linear layer."""

    name: str
    format: str | None
    """None: the layer was not quantised, and `note` states why."""
    shape: tuple[int, int]
    """[outputs, inputs]."""
    error: float | None
    """RMS of the difference from the float layer / RMS of the float layer: with calibration, of the outputs (without the bias)
    on that input; otherwise of the weight. None if nothing was measured."""
    bytes_before: int
    bytes_after: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All linear layers of a model, in the model's order. `str(report)` is a table."""

    format: str
    layers: tuple[LayerReport, ...]
    calibrated: bool
    """True: errors are those of the outputs on calibration input. False: errors are those of the weights."""

    @property
    def bytes_before(self) -> int:
        """Bytes of the weights of all linear layers before quantising."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """The same after quantising."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        """The layers that are quantised now."""
        return tuple(layer for layer in self.layers if layer.format is not None)

    @property
    def speed(self) -> dict[str, Any] | None:
        """The measured speed of layers in this format relative to bf16; None if the format was not measured.

        Keys: "card", "measured" (the day), "ratios" (by rows of the input; below 1 is slower than bf16). The model itself is
        not timed.
        """
        found = speed_of(self.format)
        return None if found is None else found._asdict()

    def to_json(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        totals = {"format": self.format, "calibrated": self.calibrated}
        totals |= {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "speed": self.speed}
        return {**totals, "layers": [{**asdict(layer), "shape": list(layer.shape)} for layer in self.layers]}

    def __str__(self) -> str:
        head = ("layer", "format", "shape", "error", "bytes before", "after", "")
        rows = [head, *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(_padded(row, widths)).rstrip() for row in rows]
        what = "outputs on the calibration input" if self.calibrated else "weights"
        saved = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        total = (
            f"{len(self.quantized)} of {len(self.layers)} linear layers are now {self.format}: {self.bytes_before:,} "
            f"bytes before, {self.bytes_after:,} after ({saved:.2f} times less); errors are those of the {what}"
        )
        return "\n".join([*lines, total, *filter(None, [speed_text(self.format)])])


def _row(layer: LayerReport) -> tuple[str, ...]:
    error = "" if layer.error is None else f"{100 * layer.error:.3f} %"
    shape = "{} x {}".format(*layer.shape)
    return (layer.name, layer.format or "-", shape, error, f"{layer.bytes_before:,}", f"{layer.bytes_after:,}", layer.note)


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """Names aligned to the left, numbers to the right."""
    return [cell.rjust(width) if 2 < i < 6 else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))]
