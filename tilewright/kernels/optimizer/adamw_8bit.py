"""AdamW whose moments are 8-bit codes, over all tensors of a model in one launch.

The update is adamw.py's, on moments that are decoded before and encoded behind it: 256 elements share one scale, their largest
magnitude (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021). The codes are that paper's dynamic tree:
leading zeros of a code are a power of ten, the bits behind the first one are linear within it:

    code n >= 1, k = floor(log2(n)):   value = 10^(k - K) (0.1 + 0.9 (n + 1 - 2^k) / 2^k),   code 0: 0

with K = 7 for the second moment (1e-8 to 1, 255 levels) and K = 6 for the magnitude of the first, stored as 128 + sign n. The
largest level is 1 exactly: a block's largest element keeps its size for ever. Encoding takes the nearest level; a second moment
that is not zero never becomes zero, or its step would be a division by eps.

    p (master): flat float32; m_codes, v_codes: uint8 like p; m_scales, v_scales: float32 [elements / 256];
    weights, grads, rates, control: as in adamw.py.

Limited by bytes: with bf16 gradients and weights 8 in and 8 out for each element. That leaves about 100 instructions each, of
comparisons and integer instructions about 60. Codes are decoded by a table of 256 levels in shared memory. The encoder finds
no power of ten: on each of them codes are a linear function of the value, and the right one of these functions is the lowest.
Not supported: stochastic rounding; unlike bitsandbytes, tensors that stay in 32 bits (use AdamW for those).
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
"""Elements with one scale."""

# ---- reference


class Coded(NamedTuple):
    """Codes and the scale of every GROUP of them."""

    codes: Tensor
    scales: Tensor


def _level(codes: Tensor, top: int) -> Tensor:
    """The values of codes 0, 1, 2 ... as the formula above has them, float64."""
    n = codes.double()
    # Not log2, which falls short of whole numbers on a GPU.
    k = torch.frexp(n.clamp_min(1)).exponent.double() - 1
    return torch.where(n > 0, 10 ** (k - top) * (0.1 + 0.9 * (n + 1 - 2**k) / 2**k), 0.0)


def decode(coded: Coded, signed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers behind codes, flat."""
    n = coded.codes.int() - 128 if signed else coded.codes.int()
    level = _level(n.abs(), 6 if signed else 7) * n.sign()
    return (level.view(-1, GROUP) * coded.scales.double()[:, None]).view(-1).to(dtype)


def encode(values: Tensor, signed: bool) -> Coded:
    """The nearest codes of numbers whose count is a multiple of GROUP; without `signed` they are not negative."""
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
    # A warp holds a group: its scale is a reduction by shuffles.
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
    """Where numbers in [0, 1] lie between the levels, from level 1 up: level n is at n, and it is linear between neighbours.

    Line k, of the levels from 10^(k - 1 - TOP) to 10^(k - TOP), is 2^k (8 / 9 + 10^(TOP - k) share / 0.9) - 1. Lines get
    steeper towards zero, and neighbours meet at a level, so that the lowest is the right one.
    """
    place = share * (2.0**TOP / 0.9) + (2.0**TOP * (8.0 / 9.0) - 1.0)
    for down in tl.static_range(1, TOP):
        line = share * (2.0**TOP / 0.9 * 5.0**down) + (2.0 ** (TOP - down) * (8.0 / 9.0) - 1.0)
        place = tl.minimum(place, line)
    return place


@triton.jit
def _byte(place, ZERO: tl.constexpr):
    """ZERO + the nearest whole number, as uint8. From 2^23 to 2^24 a float32 counts in ones: the addition rounds."""
    return (place + (12582912.0 + ZERO)).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def _encoded_signed(m, inverse):
    """The codes of m; `inverse` is 1 / scale."""
    share = tl.abs(m) * inverse
    # Between zero and level 1 a line of its own.
    place = tl.minimum(_place(share, 6), share * 1e6)
    sign = m.to(tl.int32, bitcast=True) & -0x80000000
    return _byte((place.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), 128)


@triton.jit
def _encoded(v, inverse):
    """The codes of v >= 0; what is not zero is level 1 at least."""
    place = tl.maximum(_place(v * inverse, 7), 1.0)
    return _byte(place * tl.where(v > 0.0, 1.0, 0.0), 0)


@triton.jit
def _inverse(scales):
    """1 / scale. A scale of zero, or below float32's normal numbers, has none: its group becomes zeros."""
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
    """What codes of the first and of the second moment mean where the scale is 1: float32 [2, 256]."""
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
