"""Group, instance and batch norms with torch.nn's names: subclasses whose forward pass runs on `tilewright.ops`.

Arguments, parameters, buffers, initialisation and state dicts are torch.nn's own. channels_last images stay channels_last.
`forward` of a batch norm also accepts an activation and a residual; in evaluation they run in the same launch.
Not supported: lazy classes, SyncBatchNorm.
"""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tilewright import ops

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
]


class GroupNorm(nn.GroupNorm):
    """Normalises the channels of each group of an image to mean 0 and variance 1; then applies each channel's weight and
    bias."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, ...] -> the same."""
        return ops.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


def _batch(layer: _BatchNorm, x: Tensor, activation: str, residual: Tensor | None) -> Tensor:
    layer._check_input_dim(x)
    moves = layer.training and layer.track_running_stats
    momentum = layer.momentum
    if moves and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:  # average over all batches so far
            momentum = 1.0 / float(layer.num_batches_tracked)
    # The dicts are read directly, because attribute access on a module takes as long as the checks of one tensor.
    held, own = layer._buffers, layer._parameters
    mean, var = (held[name] if name in held else getattr(layer, name) for name in ("running_mean", "running_var"))
    # Pruning and parametrizations replace a parameter with a plain attribute or a property.
    weight, bias = (own[name] if name in own else getattr(layer, name) for name in ("weight", "bias"))
    training = layer.training or mean is None
    if training and not moves:
        mean = var = None
    return ops.batch_norm(
        x, mean, var, weight, bias, training, momentum or 0.0, layer.eps, activation=activation, residual=residual
    )


class BatchNorm1d(nn.BatchNorm1d):
    """Normalises each channel over the batch to mean 0 and variance 1: [N, C] or [N, C, L]."""

    def forward(self, input: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """activation(norm(input) + residual): [N, C] or [N, C, L] -> the same."""
        return _batch(self, input, activation, residual)


class BatchNorm2d(nn.BatchNorm2d):
    """Normalises each channel over the batch to mean 0 and variance 1: [N, C, H, W]."""

    def forward(self, input: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """activation(norm(input) + residual): [N, C, H, W] -> the same."""
        return _batch(self, input, activation, residual)


class BatchNorm3d(nn.BatchNorm3d):
    """Normalises each channel over the batch to mean 0 and variance 1: [N, C, D, H, W]."""

    def forward(self, input: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """activation(norm(input) + residual): [N, C, D, H, W] -> the same."""
        return _batch(self, input, activation, residual)


def _instance(layer: _InstanceNorm, x: Tensor) -> Tensor:
    layer._check_input_dim(x)
    batched = x.dim() == layer._get_no_batch_dim() + 1
    images = x if batched else x[None]
    if images.shape[1] != layer.num_features and layer.affine:
        name = type(layer).__name__
        raise ValueError(f"{name}: x must have {layer.num_features} channels, got {list(x.shape)}")
    own = layer.training or not layer.track_running_stats
    momentum = 0.0 if layer.momentum is None else layer.momentum
    y = ops.instance_norm(images, layer.running_mean, layer.running_var, layer.weight, layer.bias, own, momentum, layer.eps)
    return y if batched else y[0]


class InstanceNorm1d(nn.InstanceNorm1d):
    """Normalises each channel of each image to mean 0 and variance 1: [N, C, L] or [C, L]."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, L] or [C, L] -> the same."""
        return _instance(self, input)


class InstanceNorm2d(nn.InstanceNorm2d):
    """Normalises each channel of each image to mean 0 and variance 1: [N, C, H, W] or [C, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, H, W] or [C, H, W] -> the same."""
        return _instance(self, input)


class InstanceNorm3d(nn.InstanceNorm3d):
    """Normalises each channel of each image to mean 0 and variance 1: [N, C, D, H, W] or [C, D, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, D, H, W] or [C, D, H, W] -> the same."""
        return _instance(self, input)
