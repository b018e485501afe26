"""`sdpa`: torch's scaled_dot_product_attention with the kernels of this package. A model switches by changing one import."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.hw.here import autocasts, transforms
from tilewright.kernels.attention.checks import DTYPES, LARGEST_HEAD_DIM, side_by_side
from tilewright.ops.attention import attention

__all__ = ["sdpa"]


def _ours(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool) -> bool:
    """Whether the kernels of this package support the call. All other calls, also invalid ones, go to torch."""
    tensors = (query, key, value)
    if any(t.is_nested for t in tensors) or (not torch.compiler.is_compiling() and transforms()):
        return False
    if any(t.dim() != 4 or not t.numel() or t.dtype != query.dtype or t.device != query.device for t in tensors):
        return False
    (batch, heads, rows, dim), groups, keys = query.shape, key.shape[1], key.shape[2]
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or key.shape[3] != dim:
        return False
    if max(dim, value.shape[3]) > LARGEST_HEAD_DIM:
        return False
    if heads % groups or (heads != groups and not enable_gqa) or (is_causal and rows != keys):
        return False
    if query.dtype not in DTYPES or (scale is not None and not 0.0 < scale < float("inf")):
        return False
    return all(side_by_side(t.transpose(1, 2)) for t in tensors)


def _autocast(t: Tensor) -> Tensor:
    """Cast an operand as torch's function does under `torch.autocast`."""
    kind = t.device.type
    return t.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and t.dtype in DTYPES else t


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_dot_product_attention` with the same arguments and the same meaning.

    A call goes to `ops.attention` if all of this holds: tensors are [B, H, S, D] in bf16, fp16 or fp32 with head dims of at
    most 256; there is neither attn_mask nor dropout; the scale is above 0; and the tensors are transposed views of [B, S, H,
    D], as projections produce them. With is_causal there must also be as many queries as keys, because torch aligns the first
    query with the first key, and `ops.attention` the last query with the last key. Under torch.autocast, operands are cast as
    torch casts them. Every other call goes to torch's own function, including nested tensors, the transforms of torch.func,
    and invalid calls.

    Args:
        query: [B, H, S, D].
        key: [B, G, SK, D], G = H, or with enable_gqa a divisor of it.
        value: [B, G, SK, V].
        attn_mask: as in torch.
        dropout_p: as in torch.
        is_causal: query i sees keys 0 .. i.
        scale: factor on query . key; None for 1 / sqrt(D).
        enable_gqa: whether query heads may share key heads.

    Returns:
        [B, H, S, V]; if `ops.attention` computed it, a transposed view of contiguous [B, S, H, V].

    Raises:
        RuntimeError: from torch, for invalid calls.
    """
    cast = torch.compiler.is_compiling() or autocasts()
    q, k, v = (_autocast(t) for t in (query, key, value)) if cast else (query, key, value)
    if attn_mask is None and dropout_p == 0.0 and _ours(q, k, v, is_causal, scale, enable_gqa):
        heads_last = (t.transpose(1, 2) for t in (q, k, v))
        out = attention(*heads_last, causal=is_causal, scale=scale)
        assert isinstance(out, Tensor), "without return_lse there is one result"
        return out.transpose(1, 2)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
