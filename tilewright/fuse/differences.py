"""Measures the errors of outputs, and defines how large they may be.

Each output has two errors. The RMS error is relative to the RMS of the reference output, however small that RMS is. The largest
error of an element is relative to the sum of this RMS and the element's magnitude. NaNs and infinities must be at the same
positions. For integers and flags (results of argmax or of a comparison), the error is the share of elements that differ.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.fuse.structure import opened
from tilewright.tune.tolerance import errors

__all__ = ["CEILING", "LARGEST_OVER_RMS", "TOLERANCES", "Difference", "Tolerance", "compare_outputs", "difference"]


@dataclass(frozen=True)
class Difference:
    """The errors of one output, compared with the float model's. They are inf if the shape, NaNs or infinities differ."""

    name: str
    """The path of the output in the model's result: "" for a single tensor, ['logits'], [0] ..."""
    rms: float
    """RMS error divided by the RMS of the reference values; for integers and flags the share that differs."""
    largest: float
    """The largest error of an element, relative to the RMS plus the element's magnitude; for integers the same as `rms`."""
    words: str = ""
    """A text that describes the error, if the numbers do not."""
    discrete: bool = False
    """Whether the output has integers or flags."""


class Tolerance(NamedTuple):
    """Limits for the errors of an output, in the units of `Difference`."""

    rms: float
    largest: float
    apart: float = 0.0
    """The share of integers or flags that may differ."""

    @classmethod
    def given(cls, tolerance: float) -> "Tolerance":
        """The tolerance that corresponds to a number given by the user."""
        return cls(tolerance, tolerance * LARGEST_OVER_RMS, tolerance)

    def allows(self, d: "Difference", margin: float = 1.0) -> bool:
        """Whether an output's errors are at most `margin` times the tolerance."""
        if d.discrete:
            return d.rms <= margin * self.apart
        return d.rms <= margin * self.rms and d.largest <= margin * self.largest


LARGEST_OVER_RMS = 16.0
"""The allowed largest error, divided by the allowed RMS error. For the models of docs/optimize.md#how-errors-are-judged, the
measured ratios are 0.5 to 4. With a single wrong value the ratio is far higher."""
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-4 * LARGEST_OVER_RMS),
    "fp16": Tolerance(1e-2, 1e-2 * LARGEST_OVER_RMS),
    "bf16": Tolerance(5e-2, 5e-2 * LARGEST_OVER_RMS),
    "int8": Tolerance(1e-1, 1e-1 * LARGEST_OVER_RMS),
}
"""Precision -> the errors that `verify` allows. For comparison, the RMS errors of torch's own models are 4e-4 to 2e-3 in fp16,
and 2e-3 to 2e-2 in bf16 (docs/optimize.md)."""
CEILING = 0.1
"""The highest allowed RMS error in any precision: an output with an error of more than a tenth of its RMS is useless. The
largest error may be 16 times as high, as in the table."""


def difference(name: str, want: Any, got: Any) -> Difference:
    """The difference of one output, tensor or not, with its name."""
    if isinstance(want, float) and isinstance(got, float):  # results of `.item()` and `.tolist()` have rounding errors too
        want, got = torch.tensor(want, dtype=torch.float64), torch.tensor(got, dtype=torch.float64)
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        same = type(want) is type(got) and want == got
        return Difference(name, 0.0, 0.0) if same else Difference(name, math.inf, math.inf, f"got {got!r}, wanted {want!r}")
    if want.shape != got.shape:
        words = f"got shape {list(got.shape)}, wanted {list(want.shape)}"
        return Difference(name, math.inf, math.inf, words)
    if want.is_complex() and got.is_complex():
        want, got = torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj())
    if not want.is_floating_point():
        if got.is_floating_point() or got.is_complex() != want.is_complex():
            return Difference(name, math.inf, math.inf, f"got {got.dtype}, wanted {want.dtype}", True)
        apart = float((want != got.to(want.device)).double().mean()) if want.numel() else 0.0
        return Difference(name, apart, apart, f"{apart:.2%} of the values differ" if apart else "", True)
    got = got.to(want.device)
    largest, rms = errors(got, want)
    return Difference(name, rms, largest, _not_finite(want, got) if rms == math.inf else "")


def _not_finite(want: Tensor, got: Tensor) -> str:
    """A text that describes which NaNs and infinities differ."""
    new = int((want.isfinite() & ~got.isfinite()).sum())
    kind = "NaN" if bool((want.isfinite() & got.isnan()).any()) else "infinite"
    if new:
        return f"{new} of {want.numel()} values are {kind}, but finite in the float model"
    return "NaNs or infinities of the float model are missing or different"


def compare_outputs(want: Any, got: Any) -> tuple[Difference, ...]:
    """Compare all leaves of two results, which may contain tuples, dicts, dataclasses and plain numbers.

    Args:
        want: the float model's result.
        got: the optimised model's result.

    Returns:
        One `Difference` per leaf, in order. If the structures differ: a single one, with infinite errors.
    """
    wanted, structure = pytree.tree_flatten_with_path(opened(want))
    found, other = pytree.tree_flatten(opened(got))
    if structure != other:
        return (Difference("", math.inf, math.inf, f"got the structure {other}, wanted {structure}"),)
    return tuple(difference(pytree.keystr(path), w, g) for (path, w), g in zip(wanted, found, strict=True))
