"""Whether a call needs gradients: the one question a public function asks before it takes its `torch.autograd.Function`."""

import torch
from torch import Tensor

__all__ = ["wants_gradient"]


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether gradients are being recorded and one of the tensors asks for its own; None, an operand left out, does not."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
