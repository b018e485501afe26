"""TMA descriptors, which are made on the host, and the card that a launch is for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import CARD_OF_ARCH, Device, device_of
from tilewright.op import scope

__all__ = ["SIXTEEN_BITS", "box_layout", "card_of", "descriptor"]

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int8: gl.int8,
    torch.int16: gl.int16,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


def box_layout(box: Sequence[int], dtype: torch.dtype) -> Any:
    """The layout of a box in shared memory. The swizzle is as wide as the box, at most 128 bytes."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def descriptor(
    t: Tensor, box: Sequence[int], shape: Sequence[int] | None = None, strides: Sequence[int] | None = None
) -> TensorDescriptor:
    """A descriptor of t, which must be dense along its last dimension, or of its memory with another shape and strides."""
    strides = t.stride() if strides is None else strides
    return TensorDescriptor(t, list(shape or t.shape), [*strides[:-1], 1], list(box), box_layout(box, t.dtype))


def card_of(x: Tensor) -> Device:
    """The card on which a launch on x runs; for a meta tensor, the card that the launch is compiled for."""
    return scope().card or CARD_OF_ARCH[90] if x.is_meta else device_of(x.get_device())
