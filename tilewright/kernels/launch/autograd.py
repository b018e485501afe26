"""What public functions ask before they take their `torch.autograd.Function`, and what such a Function gives back."""

from typing import Any

import torch
from torch import Tensor

from tilewright.hw.here import wrapped

__all__ = ["dense", "laid_like", "no_view", "restored", "wants_gradient"]


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


def restored(saved: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A saved tensor as it lay in the forward pass, or a copy: hooks may bring it back otherwise, as `save_on_cpu` does."""
    if saved.stride() == strides and (wrapped(saved) or saved.data_ptr() % 16 == 0):
        return saved
    return saved.new_empty_strided(saved.shape, strides).copy_(saved)


def dense(vector: Any) -> Any:
    """A weight or bias of one dimension without gaps, as kernels read it; itself if it is so already, or None."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()
