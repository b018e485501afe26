"""Embeddings with gradients: single rows of a table, or rows reduced in bags. The gradient is bitwise reproducible.

A lookup of single rows is torch's own, which already moves each byte once. Bags use kernels/embedding/embedding_bag.py. The
gradient of the table is dense (kernels/embedding/embedding_backward.py). Not supported: sparse gradients, gradients of
per-sample weights, and `max_norm` (which would write to the table in a forward pass).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.kernels.embedding.embedding_backward import embedding_backward_op
from tilewright.kernels.embedding.embedding_bag import bags_of
from tilewright.kernels.embedding.embedding_bag import embedding_bag as _bag
from tilewright.kernels.launch.autograd import wants_gradient

__all__ = ["embedding", "embedding_bag"]


def _inverse_frequency(ids: Tensor, rows: int) -> Tensor:
    return 1.0 / torch.zeros(rows, dtype=torch.float32, device=ids.device).index_add(0, ids, torch.ones_like(ids).float())[ids]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, by_frequency: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.options = (weight.shape[0], padding, by_frequency)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids = ctx.saved_tensors[0].reshape(-1)
        rows, padding, by_frequency = ctx.options
        scales = _inverse_frequency(ids, rows) if by_frequency else None
        dy = grads[0].reshape(ids.shape[0], -1).contiguous()
        return embedding_backward_op(dy, ids, None, scales, None, rows, padding), None, None, None


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, scale_grad_by_freq: bool = False) -> Tensor:
    """y[...] = weight[ids[...]]; differentiable in the table.

    Args:
        ids: any shape, int64 or int32, each in [0, V).
        weight: [V, D], bf16, fp16 or fp32.
        padding_idx: the index of a row whose gradient is zero; negative numbers count from the end.
        scale_grad_by_freq: divide each row's gradient by the number of times that its id occurs.

    Returns:
        [..., D] of weight's dtype.

    Raises:
        ValueError: the table is not a matrix, or the padding row is not in it.
        IndexError: an id is not in the table (on a CPU only).
    """
    padding = _padding("embedding", weight, padding_idx)
    if not wants_gradient(weight):
        return F.embedding(ids, weight)
    return _Embedding.apply(weight, ids.long(), padding, scale_grad_by_freq)  # pyright: ignore[reportReturnType]


def _padding(op: str, weight: Tensor, padding_idx: int | None) -> int | None:
    """The padding row counted from the start."""
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must be [V, D], got {list(weight.shape)}")
    if padding_idx is None:
        return None
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise ValueError(f"{op}: padding_idx is {padding_idx}, wanted the index of one of the table's {rows} rows")
    return padding_idx % rows


class _EmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, offsets: Tensor, mode: str, scales: Tensor | None, padding: int | None
    ) -> Tensor:
        y, chosen = _bag(weight, ids, offsets, mode, scales, padding)
        ctx.save_for_backward(ids, offsets, scales, chosen if mode == "max" else None)
        ctx.options = (weight.shape[0], mode, padding)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, offsets, scales, chosen = ctx.saved_tensors
        rows, mode, padding = ctx.options
        bags = bags_of(offsets, ids.shape[0])
        if mode == "mean":
            counted = torch.ones_like(ids, dtype=torch.float32) if padding is None else (ids != padding).float()
            sizes = torch.zeros(offsets.shape[0], dtype=torch.float32, device=ids.device).index_add(0, bags, counted)
            scales = 1.0 / sizes.clamp_min(1.0)[bags]
        elif scales is not None:
            scales = scales.to(torch.promote_types(scales.dtype, torch.float32)).contiguous()
        dweight = embedding_backward_op(grads[0].contiguous(), ids, bags, scales, chosen, rows, padding)
        return dweight, None, None, None, None, None


def embedding_bag(
    ids: Tensor, weight: Tensor, offsets: Tensor | None = None, mode: str = "mean", per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """The sum, mean or maximum of the table's rows for each bag of ids; differentiable in the table.

    Args:
        ids: [T] with offsets, or [B, N]: B bags of N ids each; int64 or int32, each in [0, V).
        weight: [V, D], bf16, fp16 or fp32.
        offsets: [B], ascending from 0: where each bag starts in ids. Not checked on a GPU.
        mode: "sum", "mean" or "max".
        per_sample_weights: in the shape of ids: a factor for each row; only with mode "sum". It has no gradient.
        include_last_offset: offsets is [B + 1]; its last number is T and starts no bag.
        padding_idx: an id that is ignored, in sums and in counts; negative numbers count from the end.

    Returns:
        [B, D] of weight's dtype. An empty bag gives zeros.

    Raises:
        ValueError: shapes, dtypes or the mode do not fit, or per_sample_weights requires a gradient.
        IndexError: an id is not in the table (on a CPU only).
    """
    if (ids.dim() == 2) == (offsets is not None) or ids.dim() not in (1, 2):
        given = "no offsets" if offsets is None else "offsets"
        raise ValueError(
            f"embedding_bag: give either ids [T] with offsets, or ids [B, N] without; got {list(ids.shape)} and {given}"
        )
    if per_sample_weights is not None and wants_gradient(per_sample_weights):
        raise ValueError("embedding_bag: per_sample_weights has no gradient; pass per_sample_weights.detach()")
    if per_sample_weights is not None and per_sample_weights.shape != ids.shape:
        raise ValueError(
            f"embedding_bag: per_sample_weights must have the shape of ids, {list(ids.shape)}; got "
            f"{list(per_sample_weights.shape)}"
        )
    padding = _padding("embedding_bag", weight, padding_idx)
    if offsets is None:
        starts = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
    else:
        starts = offsets.long()[: offsets.shape[0] - include_last_offset]
    scales = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    flat = ids.reshape(-1).long()
    if not wants_gradient(weight):
        return _bag(weight, flat, starts, mode, scales, padding)[0]
    return _EmbeddingBag.apply(weight, flat, starts, mode, scales, padding)  # pyright: ignore[reportReturnType]
