"""What public functions ask before they take their `torch.autograd.Function`, and what such a Function gives back."""

import torch
from torch import Tensor

__all__ = ["laid_like", "no_view", "wants_gradient"]


def laid_like(dy: Tensor, x: Tensor) -> Tensor:
    """A gradient with the strides of x, or a copy that has them; also of gradients that stand for many."""
    return dy if dy.stride() == x.stride() else dy.new_empty_strided(x.shape, x.stride()).copy_(dy)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether gradients are being recorded and one of the tensors asks for its own; None, an operand left out, does not."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def no_view(y: Tensor) -> Tensor:
    """The same memory without torch's note that it is a view: torch forbids writing in place to views that a Function made.

    Of what the forward pass of a Function has made and nobody else holds. A trace has no launchers' views, and keeps y.
    """
    return y if torch.compiler.is_compiling() else y.data
