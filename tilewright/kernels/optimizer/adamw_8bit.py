"""AdamW with 8-bit moments, over all tensors of a model in one launch.

The update is that of adamw.py. The moments are decoded before it and encoded after it. 256 elements share one scale, which is
their largest magnitude (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021). The codes (quantised values)
are the dynamic tree of that paper: the number of a code's leading zeros gives a power of ten, and the bits after the first 1
are linear within it:

    code n >= 1, k = floor(log2(n)):   value = 10^(k - K) (0.1 + 0.9 (n + 1 - 2^k) / 2^k),   code 0: 0

with K = 7 for the second moment (1e-8 to 1, 255 levels) and K = 6 for the magnitude of the first, stored as 128 + sign n. The
largest level is exactly 1, so repeated encoding does not change a block's largest element. Encoding rounds to the nearest
level. But a second moment that is not zero never becomes zero, because the update would then divide by eps alone.

    p (master): flat float32; m_codes, v_codes: uint8 like p; m_scales, v_scales: float32 [elements / 256];
    weights, grads, rates, control: as in adamw.py.

Limited by bytes: with bf16 gradients and weights 8 in and 8 out for each element. In that time there is room for about 100
instructions per element, but only about 60 if they are comparisons or integer instructions. Codes are decoded by a table of 256
levels in shared memory. The encoder does not search for the power of ten: for each power, the code is a linear function of the
value, and the smallest of these functions' results is the right one.
Not supported: stochastic rounding; tensors that stay in 32 bits, which bitsandbytes has (use AdamW for those).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.optimizer.adamw import adamw_step, adamw_update
from tilewright.kernels.optimizer.multi_tensor import (
    CHUNK,
    Problem,
    flat_arguments,
    gathered,
    load_gradient,
    moved_bytes,
    problem_of,
    put,
    spread,
    tables,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["GROUP", "adamw_8bit_op", "decode", "encode"]

GROUP = 256
"""The number of elements that share a scale."""

# ---- reference


class Coded(NamedTuple):
    """Codes, and one scale for every GROUP codes."""

    codes: Tensor
    scales: Tensor


def _level(codes: Tensor, top: int) -> Tensor:
    """The values of codes n >= 0 by the formula above, float64. top: K."""
    n = codes.double()
    # Not log2, which on a GPU may be slightly below a whole number.
    k = torch.frexp(n.clamp_min(1)).exponent.double() - 1
    return torch.where(n > 0, 10 ** (k - top) * (0.1 + 0.9 * (n + 1 - 2**k) / 2**k), 0.0)


def decode(coded: Coded, signed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that the codes stand for, flat."""
    n = coded.codes.int() - 128 if signed else coded.codes.int()
    level = _level(n.abs(), 6 if signed else 7) * n.sign()
    return (level.view(-1, GROUP) * coded.scales.double()[:, None]).view(-1).to(dtype)


def encode(values: Tensor, signed: bool) -> Coded:
    """The nearest codes of `values`. Their count must be a multiple of GROUP; without `signed` they must not be negative."""
    groups = values.view(-1, GROUP).double()
    scales = groups.abs().amax(1)
    share = (groups.abs() / torch.where(scales > 0, scales, 1.0)[:, None]).view(-1)
    top = 6 if signed else 7
    levels = _level(torch.arange(2 ** (top + 1), device=values.device), top)
    n = torch.bucketize(share, (levels[1:] + levels[:-1]) / 2, right=False)
    if signed:
        n = 128 + n * values.sign().to(n.dtype)
    else:
        n = torch.where(values > 0, n.clamp_min(1), n)
    return Coded(n.to(torch.uint8), scales.to(torch.promote_types(values.dtype, torch.float32)))


def _reference(
    master: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor, weights: Tensor | None,
    grads: list[Tensor], rates: Tensor, control: Tensor, lr: float, eps: float,
) -> None:  # fmt: skip
    rate, decay = (spread(rates[:, i], grads, master) for i in (0, 1))
    m = decode(Coded(m_codes, m_scales), True, master.dtype)
    v = decode(Coded(v_codes, v_scales), False, master.dtype)
    new, m, v = adamw_update(master, m, v, gathered(grads, master), rate, decay, control, lr, eps)
    results = (new, *encode(m, True), *encode(v, False))
    put((master, m_codes, m_scales, v_codes, v_scales), results, weights, control)


def _cost(
    master: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor, weights: Tensor | None,
    grads: list[Tensor], rates: Tensor, control: Tensor, lr: float, eps: float,
) -> Cost:  # fmt: skip
    states = (master, m_codes, m_scales, v_codes, v_scales)
    return Cost(flops=60 * master.numel(), bytes=moved_bytes(states, weights, grads))


# ---- space and examples


def _default(device: Device, problem: Problem) -> Config:
    # One warp has one group, so its scale is computed by warp shuffles.
    return {"BLOCK": 2048, "num_warps": 8}


SPACE = Space(default=_default, axes={"BLOCK": (1024, 2048, 4096), "num_warps": (4, 8)})


def _arguments(
    inputs: Inputs, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.bfloat16,
    weights: torch.dtype | None = torch.bfloat16, norm: float | None = None,
) -> tuple:  # fmt: skip
    (master,), grads, rates, control = flat_arguments(inputs, shapes, dtype, 1, norm)
    count = master.numel()
    m_codes = inputs.randint(1, 256, count, dtype=torch.uint8)
    v_codes = inputs.randint(100, 256, count, dtype=torch.uint8)
    m_scales, v_scales = inputs.randn(count // GROUP).square() + 0.1, inputs.randn(count // GROUP).square() + 0.1
    compute = master.to(weights) if weights else None
    return master, m_codes, m_scales, v_codes, v_scales, compute, grads, rates, control, 1e-2, 1e-8


_example = Example.of(_arguments)
EXAMPLES = (
    _example("several", ((3, 50), (1,), (4097,), (64, 64))),
    _example("fp32", ((5, 1000), (7,)), torch.float32, None),
    _example("empty among them", ((0,), (100,))),
    _example("not finite", ((3, 50), (9,)), norm=float("nan")),
)


def _make(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16) -> tuple:
    """M tensors [N, N], gradients and weights of `dtype`."""
    return _arguments(inputs, ((N, N),) * M, dtype, dtype if dtype != torch.float32 else None)


# ---- kernel


@triton.jit
def _place(share, TOP: tl.constexpr):
    """The position of numbers in [0, 1] among the levels, from level 1 up. Level n has position n; between levels it is linear.

    For the levels from 10^(k - 1 - TOP) to 10^(k - TOP), the position is the line 2^k (8 / 9 + 10^(TOP - k) share / 0.9) - 1.
    Lines get steeper towards zero, and consecutive lines meet at a level, so the right line is the one with the lowest value.
    """
    place = share * (2.0**TOP / 0.9) + (2.0**TOP * (8.0 / 9.0) - 1.0)
    for down in tl.static_range(1, TOP):
        line = share * (2.0**TOP / 0.9 * 5.0**down) + (2.0 ** (TOP - down) * (8.0 / 9.0) - 1.0)
        place = tl.minimum(place, line)
    return place


@triton.jit
def _byte(place, ZERO: tl.constexpr):
    """ZERO + the nearest integer, as uint8. From 2^23 to 2^24 float32 numbers are spaced 1 apart, so the addition rounds."""
    return (place + (12582912.0 + ZERO)).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def _encoded_signed(m, inverse):
    """The codes of m; `inverse` is 1 / scale."""
    share = tl.abs(m) * inverse
    # There is a separate line between zero and level 1.
    place = tl.minimum(_place(share, 6), share * 1e6)
    sign = m.to(tl.int32, bitcast=True) & -0x80000000
    return _byte((place.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), 128)


@triton.jit
def _encoded(v, inverse):
    """The codes of v >= 0. A number that is not zero gets at least level 1."""
    place = tl.maximum(_place(v * inverse, 7), 1.0)
    return _byte(place * tl.where(v > 0.0, 1.0, 0.0), 0)


@triton.jit
def _inverse(scales):
    """1 / scale, or 0 for scales of zero or below float32's normal numbers. Such a group gets the lowest codes."""
    return tl.where(scales >= 1.2e-38, 1.0 / scales, 0.0)


@triton.jit(do_not_specialize_on_alignment=["like_ptr"])
def _adamw_8bit_kernel(
    p_ptr, m_codes_ptr, m_scales_ptr, v_codes_ptr, v_scales_ptr, weights_ptr, like_ptr, owners_ptr, spans_ptr, addresses_ptr,
    rates_ptr, control_ptr, levels_ptr, lr, eps,
    HAS_WEIGHTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(control_ptr + 8) != 0.0:
        GROUPS: tl.constexpr = BLOCK // GROUP
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        groups = start // GROUP + tl.arange(0, GROUPS)
        m_levels, v_levels = tl.load(levels_ptr + tl.arange(0, 256)), tl.load(levels_ptr + 256 + tl.arange(0, 256))
        p = tl.load(p_ptr + at)
        m_codes, v_codes = tl.load(m_codes_ptr + at), tl.load(v_codes_ptr + at)
        m_scales, v_scales = tl.load(m_scales_ptr + groups)[:, None], tl.load(v_scales_ptr + groups)[:, None]
        owner = tl.load(owners_ptr + start // CHUNK)
        grad = load_gradient(like_ptr, owner, spans_ptr, addresses_ptr, start, BLOCK, CHUNK)
        p, grad = tl.reshape(p, [GROUPS, GROUP]), tl.reshape(grad, [GROUPS, GROUP])
        m = tl.reshape(tl.gather(m_levels, m_codes.to(tl.int32), 0), [GROUPS, GROUP]) * m_scales
        v = tl.reshape(tl.gather(v_levels, v_codes.to(tl.int32), 0), [GROUPS, GROUP]) * v_scales
        p, m, v = adamw_step(p, m, v, grad, rates_ptr, owner, control_ptr, lr, eps)
        m_scales, v_scales = tl.max(tl.abs(m), axis=1), tl.max(v, axis=1)
        m_codes = _encoded_signed(m, _inverse(m_scales)[:, None])
        v_codes = _encoded(v, _inverse(v_scales)[:, None])
        p = tl.reshape(p, [BLOCK])
        tl.store(p_ptr + at, p)
        tl.store(m_codes_ptr + at, tl.reshape(m_codes, [BLOCK]))
        tl.store(v_codes_ptr + at, tl.reshape(v_codes, [BLOCK]))
        tl.store(m_scales_ptr + groups, m_scales)
        tl.store(v_scales_ptr + groups, v_scales)
        if HAS_WEIGHTS:
            tl.store(weights_ptr + at, p.to(weights_ptr.dtype.element_ty))


@cache
def _levels(device: torch.device) -> Tensor:
    """The values of all codes of the first and of the second moment, for a scale of 1: float32 [2, 256]."""
    n = torch.arange(256)
    first = _level((n - 128).abs(), 6) * (n - 128).sign()
    return torch.stack([first, _level(n, 7)]).float().to(device)


def _launch(
    config: Config, master: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor,
    weights: Tensor | None, grads: list[Tensor], rates: Tensor, control: Tensor, lr: float, eps: float,
) -> None:  # fmt: skip
    table = tables(grads, master.device)
    if master.numel():
        _adamw_8bit_kernel[(master.numel() // config["BLOCK"],)](
            master, m_codes, m_scales, v_codes, v_scales, master if weights is None else weights, grads[0], *table[:3], rates,
            control, _levels(master.device), lr, eps, HAS_WEIGHTS=weights is not None, CHUNK=CHUNK, GROUP=GROUP, **config,
        )  # fmt: skip


adamw_8bit_op = Op(
    name="adamw_8bit",
    reference=_reference,
    problem=lambda master, m_codes, m_scales, v_codes, v_scales, weights, grads, *_: problem_of(weights, grads),
    cost=_cost,
    examples=EXAMPLES,
    make=_make,
    mutates=("master", "m_codes", "m_scales", "v_codes", "v_scales", "weights"),
    codes_may_move=True,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)
