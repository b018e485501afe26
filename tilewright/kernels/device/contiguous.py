"""Elementwise work over memory as it lies: which tensors it takes, and the loads and stores of a block of it. No launchers.

A tensor is *dense* when its elements fill one range of memory without gaps or overlaps, in whatever order of dimensions:
contiguous, channels-last, or any permutation of those. An elementwise kernel then walks that range, and its result keeps the
strides. What is not dense (a slice, an expanded scalar) is copied first.

A mask at the end of a range whose length is known only at run time costs the vector loads of the whole kernel: Triton may not
cut a vector in two. So a program asks once whether its block is whole, and takes loads without a mask if it is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["dense", "laid_out_like", "load_flat", "store_flat"]


def dense(x: Tensor) -> Tensor:
    """x itself when its elements fill one range of memory in any order of the dimensions, else a contiguous copy."""
    if x.is_contiguous():
        return x
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != expected:
            return x.contiguous()
        expected *= size
    return x


def laid_out_like(x: Tensor, model: Tensor) -> Tensor:
    """x with the strides of `model`, a dense tensor of its shape; a copy unless it has them."""
    if x.stride() == model.stride():
        return x
    return torch.empty_like(model, dtype=x.dtype).copy_(x)


@triton.jit
def load_flat(x_ptr, index, size, WHOLE: tl.constexpr):
    """Elements at `index`, in their own dtype; beyond `size` zeros unless the block is WHOLE."""
    if WHOLE:
        return tl.load(x_ptr + index)
    else:
        return tl.load(x_ptr + index, mask=index < size, other=0.0)


@triton.jit
def store_flat(y_ptr, index, values, size, WHOLE: tl.constexpr):
    """Write a block, rounded to the dtype of the memory."""
    values = values.to(y_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(y_ptr + index, values)
    else:
        tl.store(y_ptr + index, values, mask=index < size)
