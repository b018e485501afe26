"""Group norm of images with what may stand before and behind it, in one launch.

    # N images, S places of an image (height x width, or time), C channels in G groups
    h[n, s, c] = x[n, s, c] + added[n, c]
    y[n, s, c] = activation((h[n, s, c] - mean[n, g]) / sqrt(variance[n, g] + eps) * weight[c] + bias[c])

    x, y: [N, S, C] of bf16, fp16 or fp32, dense in memory as [N, S, C] (channels last) or as [N, C, S].
    added: [N, C], weight, bias: [C] of bf16, fp16 or fp32, each or None. mean and variance of a group's places and channels.

Wu and He, "Group Normalization", 2018. The networks of diffusion models add a number for each channel, which says how noisy
the image is, before the norm, and have silu behind it. float32 inside, one rounding. A program has one group of one image. It
reads that once where it fits into a tile, and twice otherwise. Squares are of distances from the mean of the first tile, so
that a variance is not the difference of two large sums.

Limited by bytes, and at small images by the launch. A large image of few groups leaves most of a GPU idle: ops/channel_norms.py
makes that one of channel sums and a map. Not supported: gradients.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import activate, activated
from tilewright.kernels.launch.autograd import dense
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch, pointer_kind
from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.kernels.norm.channel.inputs import group_norm_arguments
from tilewright.kernels.norm.channel.sums_and_affine import channels_last, place_offsets, places_at_once
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["group_norm_op"]


def _reference(
    x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, activation: str
) -> Tensor:
    n, s, c = x.shape
    if not x.numel():
        return torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) if added is None else x.to(wide) + added.to(wide)[:, None]
    parts = h.reshape(n, s, groups, c // groups)
    variance, mean = torch.var_mean(parts, dim=(1, 3), correction=0, keepdim=True)
    y = ((parts - mean) * (variance + eps).rsqrt()).reshape(n, s, c)
    y = y if weight is None else y * weight.to(wide)
    y = y if bias is None else y + bias.to(wide)
    return torch.empty_like(x).copy_(activated(y, activation))


def _cost(x: Tensor, *vectors: Any) -> Cost:
    return Cost(flops=7 * x.numel(), bytes=2 * x.nbytes + sum(t.nbytes for t in vectors if isinstance(t, Tensor)))


# ---- space and examples


class Problem(NamedTuple):
    """All that a config may depend on: not the number of images."""

    dtype: torch.dtype
    last: bool
    """Whether the channels are dense in memory, not the places."""
    width: int
    """Channels of a group, as a power of two."""
    places: int
    """As a power of two, at most 16384."""


_ONE_TILE, _TILE = 8192, 4096
"""Elements of a group that is one tile, at most, which stays in registers; and of a tile of a larger group."""


def _default(device: Device, problem: Problem) -> Config:
    whole = problem.places * problem.width <= _ONE_TILE
    block_s = problem.places if whole else max(1, _TILE // problem.width)
    return {"BLOCK_S": block_s, "num_warps": 8 if block_s * problem.width > 2048 else 4}


SPACE = row_space(_default, BLOCK_S=tuple(1 << i for i in range(14)), num_warps=(4, 8))


@Example.of
def _example(
    inputs: Inputs, n: int, s: int, c: int, groups: int, dtype: torch.dtype, *, last: bool = True, added: bool = False,
    affine: bool = True, activation: str = "none", mean: float = 0.0,
) -> tuple[object, ...]:  # fmt: skip
    x, extra, weight, bias, *rest = group_norm_arguments(
        inputs, B=n, M=s, N=c, groups=groups, dtype=dtype, first=not last, added=added, activation=activation
    )
    return x + mean, extra, weight if affine else None, bias if affine else None, *rest


EXAMPLES = (
    _example("channels last", 2, 100, 48, 6, torch.bfloat16),
    _example("added, then silu", 2, 70, 40, 4, torch.float16, added=True, activation="silu"),
    _example("channels first", 3, 33, 12, 4, torch.float32, last=False, added=True),
    _example("no affine map", 1, 64, 16, 1, torch.float32, last=False, affine=False, activation="relu"),
    _example("several tiles", 1, 1000, 20, 2, torch.float32, activation="gelu"),
    _example("far from zero", 2, 65, 6, 3, torch.float32, mean=20.0),
    _example("one place", 3, 1, 320, 32, torch.bfloat16, activation="silu"),
    _example("no images", 0, 4, 8, 2, torch.float16),
)

# ---- kernel


@triton.jit(do_not_specialize=["s_units"])
def _kernel(
    x_ptr, added_ptr, weight_ptr, bias_ptr, y_ptr, s_units, eps,
    C: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr, LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    ONE_TILE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A group of an image."""
    S = s_units * VECTOR
    WIDTH: tl.constexpr = C // GROUPS
    image = (tl.program_id(0) // GROUPS).to(tl.int64)
    within = tl.arange(0, BLOCK_C)
    c = tl.program_id(0) % GROUPS * WIDTH + within
    inside = within < WIDTH
    x_ptr += image * S * C
    y_ptr += image * S * C
    added = tl.zeros([BLOCK_C], tl.float32)
    if added_ptr is not None:
        added = tl.load(added_ptr + image * C + c, mask=inside, other=0.0).to(tl.float32)
    places = tl.arange(0, BLOCK_S)
    at = place_offsets(places, c, C, S, LAST)
    mask = (places < S)[:, None] & inside[None, :]
    h = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) + added[None, :]
    shift = tl.sum(tl.where(mask, h, 0.0)) / (tl.minimum(S, BLOCK_S) * WIDTH)
    gap = tl.where(mask, h - shift, 0.0)
    first, second = gap, gap * gap
    if not ONE_TILE:
        for start in tl.range(BLOCK_S, S, BLOCK_S, num_stages=2):
            s = start + places
            mask = (s < S)[:, None] & inside[None, :]
            h = tl.load(x_ptr + place_offsets(s, c, C, S, LAST), mask=mask, other=0.0).to(tl.float32) + added[None, :]
            gap = tl.where(mask, h - shift, 0.0)
            first += gap
            second += gap * gap
    count = S * WIDTH
    off = tl.sum(first) / count
    mean = shift + off
    scale = tl.rsqrt(tl.maximum(tl.sum(second) / count - off * off, 0.0) + eps)
    factor = tl.full([BLOCK_C], 1.0, tl.float32) * scale
    if weight_ptr is not None:
        factor *= tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    rest = tl.zeros([BLOCK_C], tl.float32)
    if bias_ptr is not None:
        rest = tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if ONE_TILE:
        y = activate((h - mean) * factor[None, :] + rest[None, :], ACTIVATION)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        for start in tl.range(0, S, BLOCK_S, num_stages=2):
            s = start + places
            at = place_offsets(s, c, C, S, LAST)
            mask = (s < S)[:, None] & inside[None, :]
            h = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) + added[None, :]
            y = activate((h - mean) * factor[None, :] + rest[None, :], ACTIVATION)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# ---- launcher and op


def _key(
    config: Config, x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float,
    activation: str,
) -> tuple[Any, ...]:  # fmt: skip
    kinds = map(pointer_kind, (x, added, weight, bias))
    return (x.get_device(), x.shape, x.stride(), *kinds, groups, eps, activation, *config.values())


def _launch(
    config: Config, x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float,
    activation: str,
) -> Tensor:  # fmt: skip
    y = torch.empty_like(x)
    operands = (x, *map(dense, (added, weight, bias)), y)
    if x.numel():
        _PLANS.fill(config, y, (*operands[:-1], groups, eps, activation), operands)
    return y


def _first_launch(config: Config, y: Tensor, x: Tensor, *rest: Any) -> Plan:
    """Fill y."""
    (n, s, c), vector = x.shape, places_at_once(x)
    *vectors, groups, eps, activation = rest
    operands = (x, *vectors, y)
    constants = {
        "C": c, "GROUPS": groups, "VECTOR": vector, "LAST": channels_last(x), "ACTIVATION": activation,
        "ONE_TILE": s <= config["BLOCK_S"], "BLOCK_C": next_pow2(c // groups), **config,
    }  # fmt: skip
    return Plan(first_launch(_kernel, (n * groups,), (*operands, s // vector, eps), constants, range(5), operands))


_PLANS = Planned(_key, _first_launch)

group_norm_op = Op(
    name="group_norm",
    reference=_reference,
    problem=lambda x, added, weight, bias, groups, *_: Problem(
        x.dtype, channels_last(x), next_pow2(x.shape[2] // groups), min(16384, next_pow2(x.shape[1]))
    ),
    cost=_cost,
    examples=EXAMPLES,
    make=group_norm_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)
