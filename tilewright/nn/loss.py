"""Softmax and cross-entropy with torch.nn's names and arguments; differentiable, without parameters.

Targets of `CrossEntropyLoss` are classes. In addition to torch's arguments it has `z_loss`, and `gradient`, which determines
when the gradient is computed (`tilewright.ops.cross_entropy` explains the costs). The result is float32 for all logits of at
most 32 bits. An error is raised for class weights together with label smoothing, for probabilities as targets, and for the
arguments that torch deprecates.
"""

from torch import Tensor, nn

from tilewright import ops

__all__ = ["CrossEntropyLoss", "LogSoftmax", "Softmax"]


class Softmax(nn.Module):
    """exp(x) / sum(exp(x)) over `dim`, which must be given."""

    def __init__(self, dim: int | None = None):
        super().__init__()
        if dim is None:
            raise ValueError(f"{type(self).__name__}: dim=None is not supported; give the dimension")
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same."""
        return ops.softmax(input, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LogSoftmax(Softmax):
    """x - log(sum(exp(x))) over `dim`."""

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same."""
        return ops.log_softmax(input, self.dim)


class CrossEntropyLoss(nn.Module):
    """Cross-entropy of logits [N, C, ...] or [C] and target classes [N, ...] or []; C is the dimension of the classes."""

    def __init__(
        self, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
        gradient: str = "forward",
    ):  # fmt: skip
        super().__init__()
        for name, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                raise ValueError(f"CrossEntropyLoss: {name} is not supported; leave it out")
        if weight is not None and label_smoothing:
            raise ValueError(
                f"CrossEntropyLoss: weight cannot be combined with label_smoothing; got label_smoothing={label_smoothing}"
            )
        self.weight: Tensor | None
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.gradient = z_loss, gradient

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Logits and int64 targets -> the loss, float32: a scalar, or target's shape with reduction "none"."""
        if target.is_floating_point():
            raise ValueError(
                "CrossEntropyLoss: targets must be class indices of dtype int64, because targets of probabilities are "
                f"not supported; got {target.dtype}"
            )
        # With further dimensions this is a copy, because the classes must be the last dimension.
        logits = ops.permute(input, (0, *range(2, input.dim()), 1)) if input.dim() > 2 else input
        return ops.cross_entropy(
            logits, target, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, gradient=self.gradient, class_weights=self.weight,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"
