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

Limited by bytes: with bf16 gradients and weights 8 in and 8 out for each element. That leaves about 100 instructions and few
special functions an element, so powers of ten are products of constants, and a group divides by its scale once.
Not supported: stochastic rounding; unlike bitsandbytes, tensors that stay in 32 bits (use AdamW for those).
"""

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
def _to_the(j, ONE: tl.constexpr, TWO: tl.constexpr, FOUR: tl.constexpr):
    """b^j for j from 0 to 7, of the constants b, b^2 and b^4."""
    power = tl.where((j & 1) != 0, ONE, 1.0) * tl.where((j & 2) != 0, TWO, 1.0)
    return power * tl.where((j & 4) != 0, FOUR, 1.0)


@triton.jit
def _decoded(n, TOP: tl.constexpr):
    """The level of codes 0, 1, 2 ...; n is int32."""
    wide = n.to(tl.float32)
    k = (wide.to(tl.int32, bitcast=True) >> 23) - 127
    part = (wide + 1.0) * ((127 - k) << 23).to(tl.float32, bitcast=True)  # (n + 1) / 2^k
    value = _to_the(TOP - k, 0.1, 0.01, 0.0001) * (1.0 - 0.9 * (2.0 - part))  # exactly 1 at the top
    return tl.where(n > 0, value, 0.0)


@triton.jit
def _encoded(share, TOP: tl.constexpr):
    """The nearest code of numbers in [0, 1], int32. Neighbouring powers of ten agree where they meet: which one is taken
    there does not matter."""
    # share >= 2^-halvings, so its power of ten is this one or the next: 77 / 256 is a little less than log10(2).
    halvings = 127 - (share.to(tl.int32, bitcast=True) >> 23)
    tens = tl.minimum(tl.maximum(((halvings - 1) * 77) >> 8, 0), TOP - 1)
    scaled = share * _to_the(tens + 1, 10.0, 100.0, 10000.0)
    below = scaled <= 1.0
    tens = tl.where(below, tens + 1, tens)
    power = ((127 + TOP - tens) << 23).to(tl.float32, bitcast=True)  # 2^k
    place = power * (scaled * tl.where(below, 1.0 / 0.9, 0.1 / 0.9) + (1.0 - 0.1 / 0.9)) - 1.0
    # Between 0 and the lowest level, 10^-TOP, the nearest is a matter of its own.
    lowest = tl.where(scaled < 0.5, 0.0, 1.0)
    return tl.where(tens == TOP, lowest, tl.floor(place + 0.5)).to(tl.int32)


@triton.jit
def _inverse(scales):
    """1 / scale; of a group of zeros 1. A scale below float32's normal numbers would have none: its group becomes zeros."""
    return tl.where(scales >= 1.2e-38, 1.0 / scales, tl.where(scales > 0.0, 0.0, 1.0))


@triton.jit(do_not_specialize_on_alignment=["like_ptr"])
def _adamw_8bit_kernel(
    p_ptr, m_codes_ptr, m_scales_ptr, v_codes_ptr, v_scales_ptr, weights_ptr, like_ptr, owners_ptr, spans_ptr, addresses_ptr,
    rates_ptr, control_ptr, lr, eps,
    HAS_WEIGHTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(control_ptr + 8) != 0.0:
        GROUPS: tl.constexpr = BLOCK // GROUP
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        groups = start // GROUP + tl.arange(0, GROUPS)
        p = tl.load(p_ptr + at)
        m_codes, v_codes = tl.load(m_codes_ptr + at), tl.load(v_codes_ptr + at)
        m_scales, v_scales = tl.load(m_scales_ptr + groups)[:, None], tl.load(v_scales_ptr + groups)[:, None]
        owner = tl.load(owners_ptr + start // CHUNK)
        grad = load_gradient(like_ptr, owner, spans_ptr, addresses_ptr, start, BLOCK, CHUNK)
        p, grad = tl.reshape(p, [GROUPS, GROUP]), tl.reshape(grad, [GROUPS, GROUP])
        signed = tl.reshape(m_codes, [GROUPS, GROUP]).to(tl.int32) - 128
        m = _decoded(tl.abs(signed), 6) * m_scales
        m = tl.where(signed < 0, -m, m)
        v = _decoded(tl.reshape(v_codes, [GROUPS, GROUP]).to(tl.int32), 7) * v_scales
        p, m, v = adamw_step(p, m, v, grad, rates_ptr, owner, control_ptr, lr, eps)
        m_scales, v_scales = tl.max(tl.abs(m), axis=1), tl.max(v, axis=1)
        n = _encoded(tl.abs(m) * _inverse(m_scales)[:, None], 6)
        m_codes = (128 + tl.where(m < 0.0, -n, n)).to(tl.uint8)
        n = _encoded(v * _inverse(v_scales)[:, None], 7)
        v_codes = tl.where(v > 0.0, tl.maximum(n, 1), n).to(tl.uint8)
        p = tl.reshape(p, [BLOCK])
        tl.store(p_ptr + at, p)
        tl.store(m_codes_ptr + at, tl.reshape(m_codes, [BLOCK]))
        tl.store(v_codes_ptr + at, tl.reshape(v_codes, [BLOCK]))
        tl.store(m_scales_ptr + groups, m_scales)
        tl.store(v_scales_ptr + groups, v_scales)
        if HAS_WEIGHTS:
            tl.store(weights_ptr + at, p.to(weights_ptr.dtype.element_ty))


def _launch(
    config: Config, master: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor,
    weights: Tensor | None, grads: list[Tensor], rates: Tensor, control: Tensor, lr: float, eps: float,
) -> None:  # fmt: skip
    table = tables(grads, master.device)
    if master.numel():
        _adamw_8bit_kernel[(master.numel() // config["BLOCK"],)](
            master, m_codes, m_scales, v_codes, v_scales, master if weights is None else weights, grads[0], *table[:3], rates,
            control, lr, eps, HAS_WEIGHTS=weights is not None, CHUNK=CHUNK, GROUP=GROUP, **config,
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
