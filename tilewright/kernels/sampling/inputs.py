"""Example arguments, made from dimensions, of the ops between logits and a token: the `Op.make` of each."""

import torch

from tilewright.op import Args, Inputs

__all__ = ["edit_logits_arguments", "logprob_arguments", "sample_arguments", "top_logprob_arguments"]

_BF16 = torch.bfloat16


def sample_arguments(
    inputs: Inputs,
    *,
    M: int,
    N: int = 151936,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    dtype: torch.dtype = _BF16,
) -> Args:
    """logits [M, N], M rows with the same parameters."""
    each = ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))
    parameters = [inputs.tensor([value] * M, dtype) for value, dtype in each]
    seeds, positions = inputs.randint(-(2**62), 2**62, M), inputs.randint(0, 2**20, M)
    return inputs.randn(M, N, dtype=dtype, scale=3.0), *parameters, seeds, positions


def edit_logits_arguments(inputs: Inputs, *, M: int, N: int = 151936, entries: int = 16, dtype: torch.dtype = _BF16) -> Args:
    """logits [M, N] and tables of M slots. Every other slot has penalties, with one token in eight seen; all have entries."""
    slots = inputs.permutation(M)
    counts = inputs.randint(-48, 8, M, N).clamp_min(0).to(torch.int16)
    penalties = inputs.tensor([[1.1, 0.5, 0.25] if slot % 2 else [1.0, 0.0, 0.0] for slot in range(M)], torch.float32)
    ids = (inputs.permutation(N)[:entries] if entries <= N else inputs.permutation(N)).to(torch.int32).repeat(M, 1)
    values = [inputs.randn(M, ids.shape[1], dtype=torch.float32) for _ in range(2)]
    until, positions = inputs.randint(0, 100, M), inputs.randint(0, 100, M)
    allowed = inputs.tensor([[-1]], torch.int32).repeat(M, -(-N // 32))
    return inputs.randn(M, N, dtype=dtype, scale=3.0), slots, positions, counts, penalties, ids, *values, until, allowed


def logprob_arguments(inputs: Inputs, *, M: int, N: int = 151936, dtype: torch.dtype = _BF16) -> Args:
    """logits [M, N], ids [M]."""
    return inputs.randn(M, N, dtype=dtype, scale=3.0), inputs.randint(0, N, M)


def top_logprob_arguments(inputs: Inputs, *, M: int, N: int = 151936, top: int = 5, dtype: torch.dtype = _BF16) -> Args:
    """logits [M, N], ids [M]; every row requests its `top` likeliest tokens."""
    return *logprob_arguments(inputs, M=M, N=N, dtype=dtype), inputs.tensor([top] * M, torch.int32), max(top, 1)
