"""Elementwise work in storage order: which tensors allow it, and the loads and stores of a block. No launchers.

A tensor is *dense* if its elements fill one range of memory without gaps or overlaps, in any order of its dimensions:
contiguous, channels-last, or any permutation of those. An elementwise kernel then reads that range in order, and its result
keeps the strides. A tensor that is not dense (a slice, an expanded scalar) is copied first.

If the length of a range is known only at run time, a mask at its end would prevent vector loads in the whole kernel, because
Triton may not split a vector. So each program checks once whether its block is complete, and then loads without a mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["dense", "laid_out_like", "load_flat", "store_flat"]


def dense(x: Tensor) -> Tensor:
    """x itself if its elements fill one range of memory, in any order of the dimensions; else a contiguous copy."""
    if x.is_contiguous():
        return x
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != expected:
            return x.contiguous()
        expected *= size
    return x


def laid_out_like(x: Tensor, model: Tensor) -> Tensor:
    """x itself if it has the strides of `model`, a dense tensor of the same shape; else a copy with these strides."""
    if x.stride() == model.stride():
        return x
    return torch.empty_like(model, dtype=x.dtype).copy_(x)


@triton.jit
def load_flat(x_ptr, index, size, WHOLE: tl.constexpr):
    """Load the elements at `index`, in their own dtype. WHOLE: all are below `size`; otherwise those beyond it are zeros."""
    if WHOLE:
        return tl.load(x_ptr + index)
    else:
        return tl.load(x_ptr + index, mask=index < size, other=0.0)


@triton.jit
def store_flat(y_ptr, index, values, size, WHOLE: tl.constexpr):
    """Store a block, rounded to the dtype of the memory. WHOLE: as in `load_flat`."""
    values = values.to(y_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(y_ptr + index, values)
    else:
        tl.store(y_ptr + index, values, mask=index < size)
