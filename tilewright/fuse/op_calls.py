"""Further calls of an optimised graph: operators that replace one call of torch. torch's own kernel is the alternative.

Their last argument, `library`, selects torch's kernel. On a GPU both kernels are timed (op_race.py), and the faster one is
used. On a CPU Inductor compiles torch's call anyway. The layout of results is known: images are channels-last, everything else
is contiguous.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.fuse.calls import Choice, as_dense, run
from tilewright.kernels.attention.biased import biased_attention_op
from tilewright.kernels.device.activations import activated
from tilewright.kernels.norm.channel.append_affine import append_affine_op

__all__ = [
    "activation", "adaptive_avg_pool", "append", "append_affine", "avg_pool", "batch_norm", "biased_attention",
    "conv_transpose", "group_norm", "instance_norm", "rms_norm", "room", "softmax", "upsample",
]  # fmt: skip


def _by_torch(x: Tensor, library: bool) -> bool:
    """Whether to call torch's own kernel: because it was chosen, or because Inductor compiles the call for a CPU."""
    return library or (torch.compiler.is_compiling() and x.device.type == "cpu")


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, fill: float, empty_nan: bool, choice: Choice | None = None
) -> Tensor:
    """Attention of [B, S, H, D] with a mask or bias [N, H or 1, S or 1, T or 1] (kernels/attention/biased.py)."""
    args = (q, k, v, bias, scale, fill, empty_nan)
    if _by_torch(q, False):
        return biased_attention_op.reference(*args)
    return run(biased_attention_op, args, choice)


ACTIVATIONS = {
    "elu": F.elu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu, "mish": F.mish, "relu": F.relu, "sigmoid": torch.sigmoid, "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


def activation(x: Tensor, kind: str, alpha: float, last: bool, library: bool = False) -> Tensor:
    """ops.activation of a dense tensor, contiguous or channels-last."""
    if _by_torch(x, library):
        f = ACTIVATIONS[kind]
        return as_dense(f(x, alpha) if kind in ("elu", "leaky_relu") else f(x), last)
    return ops.activation(x, kind, alpha)


def softmax(x: Tensor, log: bool, library: bool = False) -> Tensor:
    """ops.softmax or log_softmax over the last dim of a contiguous tensor."""
    if _by_torch(x, library):
        return F.log_softmax(x, -1) if log else F.softmax(x, -1)
    return ops.log_softmax(x) if log else ops.softmax(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shape: Sequence[int], library: bool = False) -> Tensor:
    """ops.rms_norm for rows [R, D]; the result has the shape `shape`."""
    if _by_torch(x, library):
        return F.rms_norm(x, x.shape[-1:], weight, eps).view(shape)
    return ops.rms_norm(x, weight, eps).view(shape)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, added: Tensor | None, activation: str,
    library: bool = False,
) -> Tensor:  # fmt: skip
    """activation(ops.group_norm(x + added)) for channels-last x [N, C, *S]; `added` is [N, C, 1, ...] or None."""
    if _by_torch(x, library):
        y = F.group_norm(x if added is None else x + added, groups, weight, bias, eps)
        return as_dense(y if activation == "none" else ACTIVATIONS[activation](y), True)
    added = None if added is None else added.reshape(x.shape[:2])
    return as_dense(ops.group_norm(x, groups, weight, bias, eps, added=added, activation=activation), True)


def instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, library: bool = False
) -> Tensor:  # fmt: skip
    """ops.instance_norm of channels-last [N, C, *S], with the statistics of the input itself."""
    if _by_torch(x, library):
        return as_dense(F.instance_norm(x, weight=weight, bias=bias, eps=eps), True)
    return as_dense(ops.instance_norm(x, weight=weight, bias=bias, eps=eps), True)


def batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: str, last: bool,
    library: bool = False,
) -> Tensor:  # fmt: skip
    """activation(ops.batch_norm(x)) for x [N, C, *S], contiguous or channels-last. The vectors are float32 [C]."""
    if _by_torch(x, library):
        y = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        return as_dense(y if activation == "none" else ACTIVATIONS[activation](y), last)
    return as_dense(ops.batch_norm(x, mean, variance, weight, bias, eps=eps, activation=activation), last)


def room(like: Tensor, count: int, width: int) -> Tensor:
    """A buffer of rows [count, width], to which channels are appended. For Inductor it has no columns at first."""
    return like.new_empty(count, 0 if _by_torch(like, False) else width)


def append(rows: Tensor, new: Tensor, start: int) -> Tensor:
    """Write new [R, J] into the buffer's columns, starting at column `start`. Returns the buffer."""
    if _by_torch(rows, False):
        return torch.cat((rows, new), 1)
    rows[:, start : start + new.shape[1]] = new
    return rows


def append_affine(rows: Tensor, new: Tensor, scale: Tensor, shift: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Append new [R, J] to the buffer, in which C columns are then filled.

    Returns (activation(columns * scale [C] + shift [C]), the buffer).
    """
    if _by_torch(rows, False):
        rows = torch.cat((rows, new), 1)
        return activated(rows * scale + shift, activation).to(rows.dtype), rows
    return append_affine_op(rows, new, scale, shift, activation), rows


_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def avg_pool(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], ceil_mode: bool, count_include_pad: bool,
    divisor: int | None, library: bool = False,
) -> Tensor:  # fmt: skip
    """ops.avg_pool of channels-last [N, C, *S]."""
    dims = x.dim() - 2
    if _by_torch(x, library):
        rest = () if dims == 1 else (divisor,)
        y = _AVERAGES[dims](x, kernel_size, stride, padding, ceil_mode, count_include_pad, *rest)
        return as_dense(y, True)
    return ops.avg_pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor, spatial=dims)


def adaptive_avg_pool(x: Tensor, size: list[int], library: bool = False) -> Tensor:
    """ops.adaptive_avg_pool of channels-last [N, C, *S]."""
    dims = x.dim() - 2
    if _by_torch(x, library):
        return as_dense(_ADAPTIVE[dims](x, size), True)
    return as_dense(ops.adaptive_avg_pool(x, size, spatial=dims), True)


def upsample(
    x: Tensor, size: list[int], factors: list[float] | None, mode: str, corners: bool | None, library: bool = False
) -> Tensor:  # fmt: skip
    """ops.upsample of channels-last [N, C, *S]. `factors` are the scale factors; None: they follow from the sizes."""
    given = {"size": size} if factors is None else {"scale_factor": factors}
    if _by_torch(x, library):
        return as_dense(F.interpolate(x, **given, mode=mode, align_corners=corners), True)  # pyright: ignore[reportArgumentType]
    return ops.upsample(x, **given, mode=mode, align_corners=corners)  # pyright: ignore[reportArgumentType]


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_OURS = {1: ops.conv_transpose1d, 2: ops.conv_transpose2d, 3: ops.conv_transpose3d}


def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int], padding: list[int],
    output_padding: list[int], groups: int, dilation: list[int], library: bool = False,
) -> Tensor:  # fmt: skip
    """activation(ops.conv_transpose1d(x)), or 2d or 3d, for channels-last x [N, C, *S]."""
    dims, window = x.dim() - 2, (stride, padding, output_padding, groups, dilation)
    if _by_torch(x, library):
        y = _TRANSPOSED[dims](x, weight, bias, *window)
        return as_dense(y if activation == "none" else ACTIVATIONS[activation](y), True)
    return as_dense(_OURS[dims](x, weight, bias, *window, activation=activation), True)
