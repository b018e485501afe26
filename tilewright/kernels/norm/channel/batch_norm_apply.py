"""Batch norm by statistics that are given, with the residual and the activation behind it, in one launch.

    # N images, S places of an image (height x width, or time), C channels
    y[n, s, c] = activation((x[n, s, c] - mean[c]) / sqrt(variance[c] + eps) * weight[c] + bias[c] + residual[n, s, c])

    x, residual, y: [N, S, C] of bf16, fp16 or fp32, dense in memory as [N, S, C] (channels last) or as [N, C, S], all alike.
    mean, variance, weight, bias: [C] of bf16, fp16 or fp32; weight, bias and residual may be None.

The residual is added before the activation, as in residual networks. float32 inside, one rounding. What a layer of a network
in evaluation does (Ioffe and Szegedy, "Batch Normalization", 2015) without a launch for each of its steps: of one image those
are host time alone.

Limited by bytes. Not supported: statistics of the batch itself (sums_and_affine.py makes them), gradients.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import activate, activated
from tilewright.kernels.launch.autograd import dense
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch, pointer_kind
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.kernels.norm.channel.inputs import normalize_channels_arguments
from tilewright.kernels.norm.channel.sums_and_affine import (
    CHANNEL_SPACE,
    channel_problem,
    channels_last,
    place_offsets,
    places_at_once,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["launched", "normalize_channels_op"]


def _reference(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    activation: str,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x.to(wide) - mean.to(wide)) * (variance.to(wide) + eps).rsqrt()
    y = y if weight is None else y * weight.to(wide)
    y = y if bias is None else y + bias.to(wide)
    y = y if residual is None else y + residual.to(wide)
    return torch.empty_like(x).copy_(activated(y, activation))


def _cost(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *_: Any
) -> Cost:
    moved = 2 * x.nbytes + sum(t.nbytes for t in (mean, variance, weight, bias, residual) if t is not None)
    return Cost(flops=(4 + (residual is not None)) * x.numel(), bytes=moved)


# ---- examples


@Example.of
def _example(
    inputs: Inputs, n: int, s: int, c: int, dtype: torch.dtype, vectors: torch.dtype = torch.float32, *, last: bool = True,
    affine: bool = True, residual: bool = False, activation: str = "none",
) -> tuple[object, ...]:  # fmt: skip
    x, mean, variance, weight, bias, rest, eps, kind = normalize_channels_arguments(
        inputs, B=n, M=s, N=c, dtype=dtype, first=not last, residual=residual, activation=activation
    )
    mean, variance, weight, bias = (t.to(vectors) for t in (mean, variance, weight, bias))
    return x, mean, variance, weight if affine else None, bias if affine else None, rest, eps, kind


EXAMPLES = (
    _example("channels last", 2, 100, 48, torch.bfloat16),
    _example("residual and relu", 2, 70, 40, torch.float16, torch.float16, residual=True, activation="relu"),
    _example("channels first", 3, 33, 5, torch.float32, last=False, residual=True),
    _example("no affine map", 1, 64, 16, torch.float32, last=False, affine=False, activation="silu"),
    _example("one place", 3, 1, 300, torch.bfloat16, activation="relu"),
    _example("no images", 0, 4, 8, torch.float16),
)

# ---- kernel


@triton.jit
def _of_channels(ptr, c, C: tl.constexpr):
    return tl.load(ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["s_units"])
def _normalize_kernel(
    x_ptr, mean_ptr, variance_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, s_units, eps,
    C: tl.constexpr, VECTOR: tl.constexpr, LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    S = s_units * VECTOR
    TILES_C: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    tiles_s = tl.cdiv(S, BLOCK_S)
    c = program % TILES_C * BLOCK_C + tl.arange(0, BLOCK_C)
    s = program // TILES_C % tiles_s * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = (s < S)[:, None] & (c < C)[None, :]
    at = (program // TILES_C // tiles_s).to(tl.int64) * S * C + place_offsets(s, c, C, S, LAST)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(_of_channels(variance_ptr, c, C) + eps)
    if weight_ptr is not None:
        factor *= _of_channels(weight_ptr, c, C)
    y = (x - _of_channels(mean_ptr, c, C)[None, :]) * factor[None, :]
    if bias_ptr is not None:
        y += _of_channels(bias_ptr, c, C)[None, :]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, activate(y, ACTIVATION).to(y_ptr.dtype.element_ty), mask=mask)


# ---- launcher and op


def _key(
    config: Config, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, eps: float, activation: str,
) -> tuple[Any, ...]:  # fmt: skip
    kinds = map(pointer_kind, (x, mean, variance, weight, bias, residual))
    return (x.get_device(), x.shape, x.stride(), *kinds, eps, activation, *config.values())


def _launch(
    config: Config, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, eps: float, activation: str,
) -> Tensor:  # fmt: skip
    y = torch.empty_like(x)
    operands = (x, *map(dense, (mean, variance, weight, bias)), residual, y)
    if x.numel():
        _PLANS.fill(config, y, (*operands[:-1], eps, activation), operands)
    return y


def _first_launch(config: Config, y: Tensor, x: Tensor, *rest: Any) -> Plan:
    """Fill y."""
    (n, s, c), vector = x.shape, places_at_once(x)
    *others, eps, activation = rest
    operands = (x, *others, y)
    grid = (n * ceil_div(s, config["BLOCK_S"]) * ceil_div(c, config["BLOCK_C"]),)
    constants = {"C": c, "VECTOR": vector, "LAST": channels_last(x), "ACTIVATION": activation, **config}
    return Plan(first_launch(_normalize_kernel, grid, (*operands, s // vector, eps), constants, range(7), operands))


_PLANS = Planned(_key, _first_launch)


def launched(*args: Any) -> Plan | None:
    """The plan of a call with these arguments, on x, mean, variance, weight, bias, residual and y."""
    return _PLANS.plan(normalize_channels_op.chosen(*args).config, *args)


normalize_channels_op = Op(
    name="normalize_channels",
    reference=_reference,
    problem=channel_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=normalize_channels_arguments,
    impls=(Impl(name="triton", launch=_launch, space=CHANNEL_SPACE, batch_invariant=True),),
)
