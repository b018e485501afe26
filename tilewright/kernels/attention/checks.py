"""Checks of the arguments of `attention`, and the bounds that a window means."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from tilewright.kernels.attention.problem import DTYPES, LARGEST_HEAD_DIM, side_by_side

__all__ = [
    "DTYPES",
    "LARGEST_HEAD_DIM",
    "check_bends",
    "check_lengths",
    "check_operands",
    "scale_of",
    "side_by_side",
    "window_bounds",
]


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check shapes, dtypes, devices and strides. Raises ValueError."""
    if q.dim() not in (3, 4) or k.dim() != q.dim() or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "attention: needs q [B, S, H, D], k [B, SK, G, D] and v [B, SK, G, V], or packed q [T, H, D], k [TK, G, D] and "
            f"v [TK, G, V], with one D; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.dim() == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"attention: q has {q.shape[0]} sequences, k and v have {k.shape[0]}: the numbers must be equal")
    heads, groups, dim = q.shape[-2], k.shape[-2], q.shape[-1]
    if not heads or not groups or heads % groups:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {groups} key/value heads")
    for name, width in (("head dim", dim), ("values' head dim", v.shape[-1])):
        if not 1 <= width <= LARGEST_HEAD_DIM:
            raise ValueError(f"attention: {name} is {width}, wanted 1 to {LARGEST_HEAD_DIM}")
    if q.dtype not in DTYPES:
        raise ValueError(f"attention: q is {q.dtype}, wanted bfloat16, float16 or float32")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(f"attention: {name} is {t.dtype} on {t.device}; it must match q, {q.dtype} on {q.device}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            raise ValueError(f"attention: {name} has strides {t.stride()}; the last must be 1, call .contiguous()")


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor on q . k: `scale`, or 1 / sqrt(D) by default. Raises ValueError if it is not a finite number above 0."""
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0.0 < factor < math.inf:
        raise ValueError(f"attention: scale is {factor}, wanted a finite number above 0 (for a negative one negate q)")
    return factor


def check_lengths(name: str, cu: Tensor | None, longest: int | None, t: Tensor) -> tuple[Tensor, int]:
    """The cumulative lengths of q or k, and the longest length. Values are checked only on a CPU; reading a GPU's would wait.

    Raises:
        ValueError: they are missing, are not a contiguous int32 vector on the operand's device, or do not fit its rows.
    """
    if cu is None or longest is None:
        raise ValueError(
            f"attention: packed operands need cu_q, cu_k, max_q and max_k; cu_{name} or max_{name} is missing "
            f"(max_{name} = int(cu_{name}.diff().max()) waits for the device, so compute it once and keep it)"
        )
    if cu.dim() != 1 or not cu.numel() or cu.dtype != torch.int32 or cu.device != t.device or not cu.is_contiguous():
        raise ValueError(
            f"attention: cu_{name} must be contiguous int32 [sequences + 1] on {t.device}; "
            f"got {cu.dtype} {list(cu.shape)} with strides {cu.stride()} on {cu.device}"
        )
    if not 0 <= longest <= t.shape[0]:
        raise ValueError(f"attention: max_{name} is {longest}, wanted 0 to {t.shape[0]}, the rows of all sequences")
    if type(cu) is Tensor and cu.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != t.shape[0] or min(lengths, default=0) < 0:
            raise ValueError(f"attention: cu_{name} must rise from 0 to {t.shape[0]}, the rows of all sequences; got {bounds}")
        if max(lengths, default=0) > longest:
            raise ValueError(f"attention: max_{name} is {longest}, but the longest sequence of cu_{name} has {max(lengths)}")
    return cu, longest


def window_bounds(window: int | tuple[int | None, int | None] | None, causal: bool) -> tuple[int | None, int | None]:
    """(left, right): how many keys a query sees before and after its own key; None for all.

    Raises:
        ValueError: a number of 0 (a query would see nothing), a negative bound, or a right bound with a causal mask.
    """
    if window is None:
        return None, None
    if isinstance(window, int):
        if window < 1:
            raise ValueError(f"attention: window is {window}, wanted at least 1: a query sees its own key (None for no window)")
        return window - 1, None if causal else window - 1
    if len(window) != 2 or any(bound is not None and bound < 0 for bound in window):
        raise ValueError(f"attention: window is {window}, wanted (left, right), each at least 0 or None for all on that side")
    if causal and window[1]:
        raise ValueError(f"attention: window is {window}, but a causal mask ends at a query's own key: wanted {(window[0], 0)}")
    return window[0], None if causal else window[1]


def check_bends(
    q: Tensor, batch: int, causal: bool, prefix: int | Tensor | None, softcap: float | None, sinks: Tensor | None,
    slopes: Tensor | None,
) -> None:  # fmt: skip
    """Check the options that change a mask or a score. Raises ValueError."""
    if prefix is not None and not causal:
        raise ValueError("attention: prefix adds keys that every query sees to those of a causal mask; it needs causal=True")
    if isinstance(prefix, Tensor):
        if prefix.shape != (batch,) or prefix.dtype != torch.int32 or prefix.device != q.device or not prefix.is_contiguous():
            raise ValueError(
                f"attention: prefix must be a number, or contiguous int32 [{batch}] on {q.device}, one number per sequence; "
                f"got {prefix.dtype} {list(prefix.shape)} on {prefix.device}"
            )
    elif prefix is not None and prefix < 0:
        raise ValueError(f"attention: prefix is {prefix}, wanted a number of keys, at least 0")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"attention: softcap is {softcap}, wanted a finite number above 0 (None for none)")
    heads = q.shape[-2]
    for name, t, dtypes in (("sinks", sinks, DTYPES), ("alibi_slopes", slopes, (torch.float32,))):
        if t is None:
            continue
        if t.shape != (heads,) or t.dtype not in dtypes or t.device != q.device or not t.is_contiguous():
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ValueError(
                f"attention: {name} must be contiguous {wanted} [{heads}] on {q.device}, one number per query head; "
                f"got {t.dtype} {list(t.shape)} on {t.device}"
            )
