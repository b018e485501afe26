"""How far outputs are from the right ones, and how far they may be.

Each output has two errors relative to the RMS of the right output, however small that is: RMS error and largest error. NaNs and
infinities must be in the same places. For integers and flags (of argmax, of a comparison), the share that differs counts.
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
    """How far one output is from the float model's; inf if its shape, NaNs or infinities differ."""

    name: str
    """Its path in the model's result: "" for a single tensor, ['logits'], [0] ..."""
    rms: float
    """RMS error over the RMS of the right values; for integers and flags the share that differs."""
    largest: float
    """The largest error, relative to the RMS plus the right value; for integers as `rms`."""
    words: str = ""
    """What is wrong, if a number does not say it."""
    discrete: bool = False
    """Whether the output has integers or flags."""


class Tolerance(NamedTuple):
    """How far an output may be from the float model's, relative to its RMS."""

    rms: float
    largest: float
    apart: float = 0.0
    """The share of an output's integers or flags that may differ."""

    @classmethod
    def given(cls, tolerance: float) -> "Tolerance":
        """The tolerance for a number given by the user."""
        return cls(tolerance, tolerance * LARGEST_OVER_RMS, tolerance)

    def allows(self, d: "Difference", margin: float = 1.0) -> bool:
        """Whether an output is within this part of the tolerance."""
        if d.discrete:
            return d.rms <= margin * self.apart
        return d.rms <= margin * self.rms and d.largest <= margin * self.largest


LARGEST_OVER_RMS = 16.0
"""Measured ratios are 0.5 to 4 for the models of docs/optimize.md#how-errors-are-judged; a single wrong value is far above."""
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-4 * LARGEST_OVER_RMS),
    "fp16": Tolerance(1e-2, 1e-2 * LARGEST_OVER_RMS),
    "bf16": Tolerance(5e-2, 5e-2 * LARGEST_OVER_RMS),
    "int8": Tolerance(1e-1, 1e-1 * LARGEST_OVER_RMS),
}
"""Precision -> what `verify` allows; torch's own models have 4e-4 to 2e-3 in fp16, 2e-3 to 2e-2 in bf16 (docs/optimize.md)."""
CEILING = 0.1
"""Highest tolerance in any precision: an output that is off by more than a tenth of its RMS is useless. The largest error may
be
16 times that, as in the table."""


def difference(name: str, want: Any, got: Any) -> Difference:
    """The difference of one output, tensor or not, with its name."""
    if isinstance(want, float) and isinstance(got, float):  # from `.item()` and `.tolist()`: rounded like tensors
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
    """Which NaNs and infinities are in different places."""
    new = int((want.isfinite() & ~got.isfinite()).sum())
    kind = "NaN" if bool((want.isfinite() & got.isnan()).any()) else "infinite"
    if new:
        return f"{new} of {want.numel()} values are {kind} and finite in the float model"
    return "NaNs or infinities of the float model are missing, or others"


def compare_outputs(want: Any, got: Any) -> tuple[Difference, ...]:
    """Compare all leaves of a model's result: tuples, dicts, dataclasses and plain numbers, too.

    Args:
        want: the float model's result.
        got: the optimised model's result.

    Returns:
        One `Difference` per leaf, in order; a single one of inf if the structures differ.
    """
    wanted, structure = pytree.tree_flatten_with_path(opened(want))
    found, other = pytree.tree_flatten(opened(got))
    if structure != other:
        return (Difference("", math.inf, math.inf, f"got the structure {other}, wanted {structure}"),)
    return tuple(difference(pytree.keystr(path), w, g) for (path, w), g in zip(wanted, found, strict=True))
