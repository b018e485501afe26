"""Decides whether a result is right. This sets the status "wrong" in the tuning database; conformance has the same limits.

The oracle is the reference in float64 on the rounded arguments. The RMS error is relative to the RMS of the oracle. The largest
error is relative to that RMS plus the element's own magnitude (a 10 cannot be as exact as a 1). Conformance runs on small
examples. Problems that are tuned add up thousands of terms in float32, so limits grow with the square root of their number,
like the error of a random walk. This growth is negligible in bf16, and 5e-6 for 4096 products in float32.

If an op quantises its result (`Op.codes_may_move`), a few quantised values may be one step away from the reference's, and
scales may differ as 16-bit numbers do. The oracle is then the reference in the arguments' own dtypes. If an op quantises
intermediate values (`Op.codes_inside`), a value that moved by a step affects single elements: their error is at most one step
of e4m3, relative to the largest element.

This module may not import `tilewright.op`. It uses these attributes of operators and implementations: `reference`, `mutates`,
`roundings`, `codes_may_move`, `codes_inside`, `tolerance`, `cost` and `extra_roundings`.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = [
    "LIMITS",
    "MOVED_CODES",
    "STEP",
    "Poisoned",
    "bits",
    "codes_apart",
    "errors",
    "flat",
    "limits",
    "oracle",
    "written",
    "wrong",
]

LIMITS = {
    torch.float32: (1e-5, 1e-6),
    torch.float16: (1e-3, 5e-4),
    torch.bfloat16: (8e-3, 4e-3),
    torch.float64: (1e-12, 1e-13),
    # Quantised values and their scales must be exactly right.
    torch.float8_e4m3fn: (0.0, 0.0),
    torch.float8_e5m2: (0.0, 0.0),
    torch.float8_e8m0fnu: (0.0, 0.0),
}
"""dtype -> (largest error, RMS error) of one rounding; half an ulp of bf16 is 2^-9 to 2^-8 of the value."""

MOVED_CODES = (1, 0.02)
"""(steps, share of values) by which quantised values may differ from the definition's."""

STEP = 2.0**-3
"""The relative distance of a quantised value's neighbour: e4m3 has three bits after the leading one."""

_FLOAT32_ULP = 2.0**-24
_POISON = {torch.bool: True, torch.uint8: 0xA5, torch.int16: -0x5A5A}


class Poisoned(TorchFunctionMode):
    """While active, newly allocated tensors are filled with NaN (integers: with a value that no kernel writes).

    If a kernel forgets to write something, its result is then wrong. Otherwise the memory could still contain the right result
    of the preceding candidate.
    """

    _ALLOCATORS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return _poison(result) if func in self._ALLOCATORS else result


def _poison(t: Tensor) -> Tensor:
    value = math.nan if t.is_floating_point() else _POISON.get(t.dtype, -(2**30) if t.dtype != torch.int8 else -77)
    return t.fill_(value)


def flat(result: Any) -> list[Tensor]:
    """The tensors of an op's result, for every form of result."""
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def bits(t: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaN equals NaN."""
    if not t.is_floating_point():
        return t
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def written(op: Any) -> list[int]:
    """Positions of the arguments that the op declares to write."""
    names = list(inspect.signature(op.reference).parameters)
    return [names.index(name) for name in op.mutates]


def oracle(op: Any, args: Sequence[Any], *, wide: bool = True) -> list[Tensor]:
    """The expected results of the op, then the expected content of arguments written in place; in float64 if `wide`.

    The arguments are not changed.
    """
    places = written(op)
    wide = wide and not op.codes_may_move
    taken = [a.double() if wide and isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    for i in places:
        if taken[i] is args[i]:
            taken[i] = args[i].clone()
    return flat(op.reference(*taken)) + [taken[i] for i in places]


def codes_apart(got: Tensor, want: Tensor) -> tuple[int, float]:
    """(largest distance in steps, share that differs) of int8 or float8 values; NaN is far away from all numbers."""
    places = []
    for t in (got, want):
        place = bits(t).int()
        places.append(torch.where(place < 128, place, 128 - place) if t.is_floating_point() else place)
    apart = (places[0] - places[1]).abs()
    return (int(apart.max()), float(apart.ne(0).double().mean())) if apart.numel() else (0, 0.0)


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(largest, RMS) error, relative as in the module's docstring; inf if infinities or NaNs are in different places."""
    got, want = got.double(), want.double()
    finite = want.isfinite()
    special = (got[~finite].nan_to_num(), want[~finite].nan_to_num())
    if not torch.equal(finite, got.isfinite()) or not torch.equal(*special):
        return math.inf, math.inf
    got, want = got[finite], want[finite]
    if not want.numel():
        return 0.0, 0.0
    rms = want.square().mean().sqrt().clamp_min(1e-30)
    gap = (got - want).abs()
    return float((gap / (rms + want.abs())).max()), float(gap.square().mean().sqrt() / rms)


def limits(op: Any, impl: Any, dtype: torch.dtype, terms: float = 1.0) -> tuple[float, float]:
    """The highest (largest, RMS) error of an implementation: from the table, or the op's own limits if they are tighter.

    Args:
        terms: the number of products that are added for one result.
    """
    roundings = op.roundings + impl.extra_roundings
    table = tuple(roundings * limit for limit in LIMITS[dtype])
    most, rms = op.tolerance.get(dtype, table)
    walk = _FLOAT32_ULP * math.sqrt(max(0.0, terms - 1)) if dtype != torch.float64 else 0.0
    # The largest of a million errors is about five times their RMS.
    return most + 5 * walk, rms + walk


def wrong(op: Any, impl: Any, got: Sequence[Tensor], want: Sequence[Tensor], flops: float, doubt: int = 1) -> str | None:
    """A description of what is wrong with the results of an implementation, or None.

    Args:
        got: its results, then the arguments that it wrote in place.
        want: the same from `oracle`.
        flops: operations of the whole call, `op.cost(...).flops`.
        doubt: the factor on the limits: 2 if `want` was rounded as often as `got`.
    """
    if len(got) != len(want):
        return f"{len(got)} results, but the reference has {len(want)}"
    terms = flops / 2 / max(1, sum(w.numel() for w in want))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape:
            return f"output {i}: shape {tuple(g.shape)}, but the reference has {tuple(w.shape)}"
        if op.codes_may_move and g.element_size() == 1:
            steps, share = codes_apart(g, w)
            if steps > MOVED_CODES[0] or share > MOVED_CODES[1]:
                return (
                    f"output {i}: {share:.2%} of the codes differ, by up to {steps} steps; allowed are 2%, by {MOVED_CODES[0]}"
                )
            continue
        if not g.is_floating_point():
            if not torch.equal(g, w):
                return f"output {i}: {int((g != w).sum())} of {w.numel()} integers differ"
            continue
        found = errors(g, w)
        if op.codes_inside and found[0] < math.inf:
            most, largest = float((g.double() - w.double()).abs().nan_to_num().max()), float(w.abs().nan_to_num().max())
            if most > doubt * STEP * largest:
                return f"output {i}: largest error {most:.3g}, limit an eighth of {largest:.3g}"
            found = (0.0, found[1])
        for what, error, limit in zip(
            ("largest", "RMS"), found, limits(op, impl, torch.bfloat16 if op.codes_may_move else g.dtype, terms), strict=True
        ):
            if not error <= doubt * limit:
                return f"output {i}: {what} error {error:.3g} of the RMS, limit {doubt * limit:.3g}"
    return None
