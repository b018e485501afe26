"""group_norm, instance_norm and batch_norm with gradients, from per-channel sums and affine maps
(norm/channel/sums_and_affine.py).

    # N images, C channels, S spatial positions of an image
    y[n, c, s] = (x[n, c, s] - mean) / sqrt(variance + eps) * weight[c] + bias[c]

The three differ in the values over which mean and variance are computed: the channels of a group in one image (Wu and He,
"Group Normalization", 2018), one channel of one image (Ulyanov et al., "Instance Normalization", 2016), or one channel of all
images (Ioffe and Szegedy, "Batch Normalization", 2015). Each norm therefore has three steps: sums over positions, averages of
these sums over groups or images ([N, C] numbers in float32), and an affine map for each channel. The averages are computed in
plain torch. Only batch norm, which networks use in many layers, has an op for them; if the statistics are given, it is a single
launch. With h = (x - mean) scale, the gradient

    dx = scale (weight dy - mean(weight dy) - h mean(weight dy h))

is again an affine map, of x and dy. All sums have a fixed order, so results are bitwise reproducible on one card.

Memory formats: channels-last images stay channels-last. All others are treated as channels-first, and copied if not dense.
Not supported: second derivatives, statistics over several processes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.kernels.conv.checks import ACTIVATIONS
from tilewright.kernels.launch.autograd import dense, laid_like, wants_gradient
from tilewright.kernels.launch.plan import Plan
from tilewright.kernels.launch.replay import Held, call_key, in_place
from tilewright.kernels.norm.channel import batch_statistics
from tilewright.kernels.norm.channel.batch_norm_apply import launched, normalize_channels_op
from tilewright.kernels.norm.channel.batch_norm_backward import batch_norm_backward_op
from tilewright.kernels.norm.channel.batch_statistics import batch_statistics_op
from tilewright.kernels.norm.channel.group_norm import group_norm_op
from tilewright.kernels.norm.channel.sums_and_affine import channel_affine_op, channel_sums_op
from tilewright.ops.batch_norm_again import BatchNormAgain, wanted
from tilewright.ops.channel_layout import channels_last, check_channels, followed, image_of, places_of
from tilewright.ops.pointwise import activation as activate

__all__ = ["batch_norm", "group_norm", "instance_norm"]

# ---- the norm


def _average(of_channels: Tensor, groups: int) -> Tensor:
    """[N, C] -> the mean over the channels of each group, again [N, C]."""
    n, c = of_channels.shape
    return of_channels.view(n, groups, -1).mean(2, keepdim=True).expand(-1, -1, c // groups).reshape(n, c).contiguous()


def _statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(mean, biased variance) of x [N, S, C]; each is [N, C] in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    shift = x[:, 0].to(wide).contiguous()
    first, second = channel_sums_op(x, shift, None)
    first, second = first / x.shape[1], second / x.shape[1]
    means = shift + first
    mean = _average(means, groups)
    return mean, _average(second - first.square() + (means - mean).square(), groups)


def _factors(mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(a, b) for which the norm is y = a x + b."""
    a = scale if weight is None else scale * weight.to(scale.dtype)
    b = -mean * a
    return a, b if bias is None else b + bias.to(b.dtype)


class _Normalised(torch.autograd.Function):
    """(y, mean, variance) of x [N, S, C], differentiable once in x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """torch disables autograd during this function."""
        mean, variance = _statistics(x, groups)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.groups, ctx.of_bias = groups, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance)
        return channel_affine_op(x, *_factors(mean, scale, weight, bias), None, None), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, weight, bias), and None for the rest."""
        x, weight, mean, scale = ctx.saved_tensors
        dy = laid_like(grads[0], x)
        given, crossed = channel_sums_op(x, mean, dy)
        crossed = crossed * scale
        dweight = None if weight is None else crossed.sum(0).to(weight.dtype)
        dbias = None if ctx.of_bias is None else given.sum(0).to(ctx.of_bias)
        d = scale if weight is None else scale * weight.to(scale.dtype)
        w, places = d / scale, x.shape[1]
        c1, c2 = _average(w * given, ctx.groups) / places, _average(w * crossed, ctx.groups) / places
        a = -scale.square() * c2
        dx = channel_affine_op(x, a, -scale * c1 - mean * a, dy, d)
        return dx, dweight, dbias, None, None


class _Batch(torch.autograd.Function):
    """relu(batch norm + residual) of x [N, S, C]; residual and relu are optional. mean and variance are those of x itself.

    Differentiable once in x, weight, bias and residual, also through the statistics.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, mean: Tensor,
        variance: Tensor, eps: float, activation: str,
    ) -> Tensor:  # fmt: skip
        """torch disables autograd during this function."""
        y = normalize_channels_op(x, mean, variance, weight, bias, residual, eps, activation)
        ctx.save_for_backward(x, weight, mean, variance, None if activation == "none" else y)
        ctx.options = (eps, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, weight, bias, residual), and None for the rest."""
        x, weight, mean, variance, y = ctx.saved_tensors
        eps, of_bias = ctx.options
        dy = laid_like(grads[0], x)
        dx, g, dweight, dbias = batch_norm_backward_op(dy, x, y, mean, variance, weight, eps)
        return dx, *wanted(ctx, dweight, dbias, of_bias, dy if y is None else g), None, None, None, None


def _by_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, residual: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """Batch norm of x [N, S, C] with its own statistics, then residual and activation. Updates running statistics if given."""
    with torch.no_grad():
        mean, variance = batch_statistics_op(x, running_mean, running_var, momentum)
    if not wants_gradient(x, weight, bias, residual):
        return normalize_channels_op(x, mean, variance, weight, bias, residual, eps, activation)
    if activation in _FUSED:
        return _Batch.apply(x, weight, bias, residual, mean, variance, eps, activation)  # pyright: ignore[reportReturnType]
    y: Any = _Batch.apply(x, weight, bias, residual, mean, variance, eps, "none")
    return activate(y, activation)


_FUSED = ("none", "relu")
"""Activations whose derivative the backward pass can compute from the result."""


class _Fixed(torch.autograd.Function):
    """y of x [N, S, C] with given statistics; differentiable once in x, weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
        """torch disables autograd during this function."""
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.of_bias = None if bias is None else bias.dtype
        return channel_affine_op(x, *_factors(mean, scale, weight, bias), None, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, weight, bias), and None for the rest."""
        x, weight, mean, scale = ctx.saved_tensors
        dy = laid_like(grads[0], x)
        a, _ = _factors(mean, scale, weight, None)
        dx = channel_affine_op(dy, a, torch.zeros_like(a), None, None)
        given, crossed = channel_sums_op(x, mean, dy) if any(ctx.needs_input_grad[1:3]) else (a, a)
        dweight = None if weight is None else (crossed * scale).sum(0).to(weight.dtype)
        return dx, dweight, None if ctx.of_bias is None else given.sum(0).to(ctx.of_bias), None, None


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if wants_gradient(x, weight, bias):
        return _Normalised.apply(x, weight, bias, groups, eps)  # pyright: ignore[reportReturnType]
    mean, variance = _statistics(x, groups)
    return channel_affine_op(x, *_factors(mean, (variance + eps).rsqrt(), weight, bias), None, None), mean, variance


def _fixed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float,
    residual: Tensor | None = None, activation: str = "none",
) -> Tensor:  # fmt: skip
    """The norm with given statistics; x and residual are [N, S, C] in the same layout."""
    if not wants_gradient(x, weight, bias, residual):
        return normalize_channels_op(x, mean, variance, weight, bias, residual, eps, activation)
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, scale = dense(mean).to(wide)[None], (variance.to(wide) + eps).rsqrt()[None]
    y: Any = _Fixed.apply(x, weight, bias, mean, scale)
    return followed(y, residual, activation)


# ---- public functions


def _move(running: Tensor | None, now: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(now.detach().to(running.dtype), alpha=momentum)


_ONE_PROGRAM = 1 << 17
"""The largest number of elements of a group that one GPU program normalises. For larger groups, separate launches compute the
channel sums and the affine map, with several programs per group."""


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    added: Tensor | None = None, activation: str = "none",
) -> Tensor:  # fmt: skip
    """Group norm, optionally with an addition before it and an activation after it.

    Without gradients and with groups of at most 131072 elements this is one launch.

    Args:
        x: [N, C, ...], bf16, fp16 or fp32, any memory format.
        num_groups: a divisor of C.
        weight: [C] or None.
        bias: [C] or None.
        eps: added to the variance.
        added: [N, C] or None: one number for each channel of each image, added to x before the norm.
        activation: none, relu, gelu, gelu_tanh or silu; applied after the norm.

    Returns:
        x's shape, dtype and memory format.

    Raises:
        ValueError: C is not a multiple of num_groups, weight or bias is not [C], `added` is not [N, C], or the activation is
            unknown.
    """
    check_channels("group_norm", x, 2, weight=weight, bias=bias)
    if added is not None and added.shape != x.shape[:2]:
        raise ValueError(
            f"group_norm: added must be {list(x.shape[:2])}, like the first two dimensions of x; got {list(added.shape)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"group_norm: activation is {activation!r}, wanted one of {', '.join(ACTIVATIONS)}")
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(
            f"group_norm: the number of channels of x, {x.shape[1]}, must be a multiple of num_groups, got {num_groups}"
        )
    if not x.numel():
        return x.clone()
    last = channels_last(x)
    flat = places_of(x, last)
    if not wants_gradient(x, weight, bias, added) and flat.shape[1] * flat.shape[2] // num_groups <= _ONE_PROGRAM:
        return image_of(group_norm_op(flat, added, weight, bias, num_groups, eps, activation), x.shape, last)
    flat = flat if added is None else flat + added[:, None]
    return image_of(followed(_normalised(flat, weight, bias, num_groups, eps)[0], None, activation), x.shape, last)


def instance_norm(
    x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Instance norm, with the arguments of torch.nn.functional.instance_norm.

    Args:
        x: [N, C, ...] with at least one further dimension, bf16, fp16 or fp32, any memory format.
        running_mean: [C] or None. With `use_input_stats` it is updated in place, otherwise it is used as the mean.
        running_var: [C] or None, the same for unbiased variances.
        weight: [C] or None.
        bias: [C] or None.
        use_input_stats: whether x's own statistics are used.
        momentum: weight of the new statistics in the update of the running ones.
        eps: added to the variance.

    Returns:
        x's shape, dtype and memory format.

    Raises:
        ValueError: a vector is not [C]; `use_input_stats` is set, but an image has one position and so no variance; or it is
            not set, and running_mean or running_var is missing.
    """
    check_channels("instance_norm", x, 3, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if not use_input_stats and (running_mean is None or running_var is None):
        raise ValueError("instance_norm: without input statistics, running_mean and running_var are needed")
    if not x.numel():
        return x.clone()
    places, last = x.shape[2:].numel(), channels_last(x)
    if use_input_stats and places == 1:
        raise ValueError(f"instance_norm: each image needs more than one position, got {list(x.shape)}")
    flat = places_of(x, last)
    if running_mean is not None and running_var is not None and not use_input_stats:
        return image_of(_fixed(flat, weight, bias, running_mean, running_var, eps), x.shape, last)
    y, mean, variance = _normalised(flat, weight, bias, x.shape[1], eps)
    _move(running_mean, mean.mean(0), momentum)
    _move(running_var, variance.mean(0) * (places / (places - 1)), momentum)
    return image_of(y, x.shape, last)


def _check_batch(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, activation: str, residual: Tensor | None,
) -> None:  # fmt: skip
    check_channels("batch_norm", x, 2, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if not training and (running_mean is None or running_var is None):
        raise ValueError("batch_norm: outside training, running_mean and running_var are needed")
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm: only one of running_mean and running_var is given; give both or neither")
    count = x.numel() // x.shape[1] if x.shape[1] else 0
    if training and count < 2:
        raise ValueError(f"batch_norm: training needs more than one value per channel, got {list(x.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"batch_norm: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"batch_norm: residual must be {list(x.shape)} {x.dtype}; got {list(residual.shape)} {residual.dtype}")


_AGAIN = Held()


def batch_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """activation(batch norm + residual). The arguments are those of torch.nn.functional.batch_norm, activation and residual.

    In evaluation (`training` False) and without gradients this is one launch.

    Args:
        x: [N, C, ...], bf16, fp16 or fp32, any memory format.
        running_mean: [C] or None. In training it is updated in place, otherwise it is used as the mean.
        running_var: [C] or None, the same for unbiased variances.
        weight: [C] or None.
        bias: [C] or None.
        training: whether the batch's statistics are used.
        momentum: weight of the batch's statistics in the update of the running ones.
        eps: added to the variance.
        activation: none, relu, gelu, gelu_tanh or silu.
        residual: of x's shape and dtype, added before the activation.

    Returns:
        x's shape, dtype and memory format.

    Raises:
        ValueError: a vector is not [C]; the residual differs from x in shape or dtype; the activation is unknown; in training
            a channel has only one value and so no variance; running statistics are missing in evaluation, or only one of the
            two is given.
    """
    key = None
    if training or not wants_gradient(x, weight, bias, residual):
        chosen = (normalize_channels_op.generation, batch_statistics_op.generation)
        options = ("batch_norm", chosen, training, eps, activation)
        key = call_key(options, x, running_mean, running_var, weight, bias, residual)
        again: BatchNormAgain | Plan | None = None if key is None else _AGAIN.get(key)
        if isinstance(again, BatchNormAgain):
            return again(x, weight, bias, residual, running_mean, running_var, momentum)
        if again is not None:
            y = torch.empty_like(x)
            again.run(x, running_mean, running_var, weight, bias, residual, y)
            return y
    _check_batch(x, running_mean, running_var, weight, bias, training, activation, residual)
    if not x.numel():
        return x.clone()
    last = channels_last(x)
    flat, rest = (None if t is None else _batch_places(t, last) for t in (x, residual))
    assert flat is not None, "x is a tensor"
    vectors = (running_mean, running_var, weight, bias)
    keep = key is not None and in_place((x, flat), (residual, rest)) and all(v is dense(v) for v in vectors)
    if running_mean is not None and running_var is not None and not training:
        y = _fixed(flat, weight, bias, running_mean, running_var, eps, rest, activation)
        if keep:
            _AGAIN.keep(key, launched(flat, running_mean, running_var, weight, bias, rest, eps, activation))
        return image_of(y, x.shape, last)
    y = _by_batch(flat, weight, bias, running_mean, running_var, momentum, eps, rest, activation)
    if keep and activation in _FUSED:
        _AGAIN.keep(key, _trained(flat, weight, bias, running_mean, running_var, momentum, eps, rest, activation, last))
    return image_of(y, x.shape, last)


def _trained(
    flat: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, residual: Tensor | None, activation: str, last: bool,
) -> BatchNormAgain | None:  # fmt: skip
    """An object that repeats `_by_batch` for operands like these; None if the chosen kernels cannot be repeated."""
    statistics = batch_statistics.launched(flat, running_mean, running_var, momentum)
    # The launch depends on shapes and dtypes only, so the values of these statistics do not matter.
    mean = torch.empty(flat.shape[2], dtype=torch.float32, device=flat.device)
    normalised = launched(flat, mean, mean, weight, bias, residual, eps, activation)
    if statistics is None or normalised is None:
        return None
    return BatchNormAgain(statistics, normalised, lambda t: _batch_places(t, last), eps, activation == "relu")


def _batch_places(x: Tensor, last: bool) -> Tensor:
    """`places_of`; if channels are last, all positions of the batch are treated as positions of one image."""
    flat = places_of(x, last)
    return flat.view(1, -1, x.shape[1]) if last else flat
