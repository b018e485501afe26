"""Helpers for `torch.autograd.Function`s: whether a public function needs its Function, and the layout of its results."""

from typing import Any

import torch
from torch import Tensor

from tilewright.hw.here import wrapped

__all__ = ["dense", "laid_like", "no_view", "restored", "wants_gradient"]


def laid_like(dy: Tensor, x: Tensor) -> Tensor:
    """dy if it has the strides of x, else a copy with these strides. dy may also be a batched gradient."""
    return dy if dy.stride() == x.stride() else dy.new_empty_strided(x.shape, x.stride()).copy_(dy)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether gradients are being recorded and one of the tensors requires one. None stands for an operand that is absent."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def no_view(y: Tensor) -> Tensor:
    """y without torch's mark that it is a view; the memory is the same.

    Torch forbids in-place writes to a view that a Function returned. Use this only for a tensor that the Function's forward
    pass has made and to which there is no other reference. A trace contains no views made by launchers, so there y is returned
    unchanged.
    """
    return y if torch.compiler.is_compiling() else y.data


def restored(saved: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A saved tensor with the strides (and 16-byte alignment) that it had in the forward pass.

    If `saved` does not have them, the result is a copy: hooks such as `save_on_cpu` may return another layout.
    """
    if saved.stride() == strides and (wrapped(saved) or saved.data_ptr() % 16 == 0):
        return saved
    return saved.new_empty_strided(saved.shape, strides).copy_(saved)


def dense(vector: Any) -> Any:
    """A contiguous form of a one-dimensional weight or bias, as kernels read it: itself, if it is contiguous or None."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()
