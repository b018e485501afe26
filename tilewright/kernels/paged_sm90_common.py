"""What the host sides of paged attention's kernels for Hopper share: what they refuse, and boxes of the copy engine."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import Device
from tilewright.kernels.paged_space import Problem, stream_refusal

__all__ = ["boxes", "few_queries_refusal", "sm90_refusal"]

_ROWS = 64  # of a tile: keys; and queries times heads that share them, at most
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_BOXED = {**_DTYPES, torch.int32: gl.int32}


def sm90_refusal(device: Device, problem: Problem, block: int) -> str | None:
    """Why neither kernel takes a problem, or None. `block`: keys of a tile, whose pages are no part of one."""
    if device.arch != 90:
        return f"is written for sm_90, this is sm_{device.arch}"
    if problem.dtype not in _DTYPES or problem.cache != problem.dtype:
        return f"takes queries and caches of bf16 or fp16, not {problem.dtype} with {problem.cache}"
    if problem.head_dim not in (64, 128):
        return f"takes head dims of 64 and 128, not {problem.head_dim}"
    if problem.page_size not in (16, 32, 64) and problem.page_size % block:
        return f"takes pages of 16, 32, 64 or a multiple of {block} tokens, not {problem.page_size}"
    return None


def few_queries_refusal(device: Device, problem: Problem) -> str | None:
    """Why the kernels of few queries, with tiles of 64 keys, do not take a problem, or None."""
    if reason := sm90_refusal(device, problem, _ROWS) or stream_refusal(device, problem):
        return reason
    rows = problem.queries * problem.group
    return f"{rows} rows, queries times heads that share keys, are more than {_ROWS}" if rows > _ROWS else None


def boxes(t: Tensor, box: list[int]) -> TensorDescriptor:
    """A dense tensor of bf16, fp16 or words of codes in boxes, swizzled by as many bytes as a box is wide, 128 at most."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _BOXED[t.dtype])
    return TensorDescriptor(t, list(t.shape), list(t.stride()), box, layout)
