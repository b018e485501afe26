"""The calls of an optimised graph: our public operators with the known arguments fixed, and a few memory operations.

The layout of each result is known: results of convolutions and pools are channels-last, all others are contiguous. The graph
relies on this (`views.View`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.kernels.attention.attention import attention_op
from tilewright.kernels.attention.checks import scale_of
from tilewright.kernels.conv.checks import window_of
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.device.activations import ACTIVATION_FORMS
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.norm.add_layer_norm import add_layer_norm_op
from tilewright.op import Op, launch
from tilewright.ops.linear import Weight
from tilewright.tune.space import Config

__all__ = [
    "Choice", "add_layer_norm", "added_in_place", "as_dense", "attention", "attention_operands", "conv", "conv_operands",
    "enter", "gathered", "global_mean", "layer_norm", "linear", "max_pool", "part", "run", "shifted_layer_norm", "strided",
]  # fmt: skip

Choice = tuple[str, Config]
"""The implementation and config that `choose` has measured to be the fastest."""


def run(op: Op, args: tuple[Any, ...], choice: Choice | None) -> Any:
    """Call an op. With a choice, launch this implementation with this config."""
    if choice is None:
        return op(*args)
    impl = next(impl for impl in op.impls if impl.name == choice[0])
    return launch(impl, choice[1], args)


_CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _for_inductor(x: Tensor) -> bool:
    """Whether torch.compile compiles for a CPU. Then torch's operators are called, because Inductor packs and fuses them."""
    return torch.compiler.is_compiling() and x.device.type == "cpu"


def _dense_strides(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return strides[::-1]


def enter(x: Tensor, dtype: torch.dtype | None, last: bool) -> Tensor:
    """An input in the graph's dtype (None: its own) and memory format; the input itself if it has these already."""
    return as_dense(x if dtype is None else x.to(dtype), last)


def as_dense(x: Tensor, last: bool) -> Tensor:
    """x in contiguous or channels-last layout; x itself if it already has this layout."""
    if not last:
        return x.contiguous()
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def strided(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """A view of a dense buffer."""
    if _for_inductor(base):
        flat = (base if base.is_contiguous() else base.movedim(1, -1)).reshape(-1)
        if offset == 0 and list(stride) == _dense_strides(size):
            return flat.narrow(0, 0, math.prod(size)).view(size)
        return flat.narrow(0, offset, flat.numel() - offset).as_strided(size, stride)
    return base.as_strided(size, stride, base.storage_offset() + offset)


def gathered(patches: Tensor, rows: Tensor, first: int) -> Tensor:
    """Write patches into rows [B, T, K], starting at row `first` of each image. Returns the rows as [B T, K].

    The last dims of `patches` [B, ..., *dims] together have K elements. A CUDA graph writes to the rows in place, because its
    callers take turns. Otherwise calls of several threads may overlap, so each call writes to a copy.
    """
    if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
        rows = rows.clone()
    rows[:, first:].view(patches.shape).copy_(patches)
    return rows.view(-1, rows.shape[-1])


def conv_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], groups: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `conv_op`, with channels as the last dim. For tensors of this graph this needs no copy."""
    window = window_of("conv", x, weight, stride, padding, dilation)
    x, weight, residual = x.movedim(1, -1), weight.movedim(1, -1), None if residual is None else residual.movedim(1, -1)
    return (
        x, weight, bias, residual, activation, window.stride, window.low, window.dilation, groups, window.size, None, None,
        x.dtype,
    )  # fmt: skip


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], groups: int, choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """ops.conv1d, conv2d or conv3d for channels-last tensors, depending on x's dims."""
    if _for_inductor(x):
        y = _CONVS[x.dim() - 2](x, weight, bias, stride, padding, dilation, groups)
        return ACTIVATION_FORMS[activation](y if residual is None else y + residual)
    args = conv_operands(x, weight, bias, residual, activation, stride, padding, dilation, groups)
    return run(conv_op, args, choice).movedim(-1, 1)


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, activation: str, shape: Sequence[int],
    choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """ops.linear for rows [R, K]; the result has the shape `shape`."""
    if _for_inductor(x) and isinstance(weight, Tensor):
        y = ACTIVATION_FORMS[activation](F.linear(x, weight, bias))
        return (y if residual is None else y + residual).view(shape)
    if choice is not None:
        return run(linear_op, (x, weight, bias, activation, residual), choice).view(shape)
    return ops.linear(x, weight, bias, activation, residual).view(shape)


def attention_operands(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Any, ...]:
    """The arguments of `attention_op`. Raises ValueError, as `ops.attention` does, if the scale is not above 0."""
    return q, k, v, None, None, q.shape[1], k.shape[1], scale_of(q, scale), causal, False


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, choice: Choice | None = None
) -> Tensor:  # fmt: skip
    """ops.attention for [B, S, H, D]."""
    if _for_inductor(q):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous()
    if choice is not None:
        return run(attention_op, attention_operands(q, k, v, causal, scale), choice)[0]
    out = ops.attention(q, k, v, causal=causal, scale=scale)
    assert isinstance(out, Tensor), "without return_lse the result must be one tensor"
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shape: Sequence[int]) -> Tensor:
    """ops.layer_norm for rows [R, D]; the result has the shape `shape`."""
    if _for_inductor(x):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps).view(shape)
    return ops.layer_norm(x, weight, bias, eps).view(shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shape: Sequence[int], total: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """ops.add_layer_norm over the last dim of x and residual. Returns (the norm of shape `shape`, the sum of shape `total`)."""
    width = x.shape[-1]
    y, summed = ops.add_layer_norm(x.reshape(-1, width), residual.reshape(-1, width), weight, bias, eps)
    return y.view(shape), summed.view(total)


def added_in_place(x: Tensor, weight: Tensor, residual: Tensor, shape: Sequence[int]) -> Tensor:
    """residual += x @ weight^T, by the library. Returns the residual with the shape `shape`."""
    return residual.view(-1, residual.shape[-1]).addmm_(x, weight.t()).view(shape)


def shifted_layer_norm(
    x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shape: Sequence[int]
) -> Tensor:  # fmt: skip
    """The layer norm of x + shift [D], for rows [R, D]; the result has the shape `shape`."""
    return add_layer_norm_op(x, shift.expand(x.shape), weight, bias, eps, False)[0].view(shape)


def part(values: Sequence[Tensor], index: int) -> Tensor:
    """One of several results of a call."""
    return values[index]


def max_pool(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> Tensor:  # fmt: skip
    """ops.max_pool for [N, C, H, W]."""
    if _for_inductor(x):
        return F.max_pool2d(x, kernel_size, stride or None, padding, dilation, ceil_mode)
    y = ops.max_pool(x, kernel_size, stride or None, padding, dilation, ceil_mode)
    assert isinstance(y, Tensor), "without indices the result must be one tensor"
    return y


def global_mean(x: Tensor) -> Tensor:
    """The mean over all pixels of channels-last [N, C, *S] -> [N, C]."""
    if _for_inductor(x):
        return x.mean(list(range(2, x.dim())))
    return ops.mean(x.movedim(1, -1).flatten(1, -2), 1)
