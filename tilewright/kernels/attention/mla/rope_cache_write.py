"""The steps before latent attention, in one launch: norm of the latent, rotation, write to the cache, assembly of the query.

    # T tokens, H query heads, L leading dims of a query, E rotated dims, R rank of the latent, P pages, S tokens per page
    cache[slot // S, slot % S, :] = RMS norm(kv[t, :R]) * weight, rotated(kv[t, R:])     for every slot that is not negative
    returns q [T, H, L + E] = lead, rotated(turned)

lead [T, H, L] and turned [T, H, E] are bf16, fp16 or fp32 with dense last dims and any other strides: a batched product writes
absorbed queries head by head, and the others are views of a projection. kv [T, R + E], any row stride. Cache [P, S, R + E].
slots [T] int64, -1 marks padding. cos_sin [max_pos, 2, E/2] float32 (kernels/elementwise/rope.py). Arithmetic is float32,
rounded once.

Limited by bytes, and at decode sizes by launch latency, which is why the five steps are one kernel.
Not supported: backward, caches of another dtype than kv.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.paged.checks import check_slots
from tilewright.kernels.device.rotary import rotated
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of, rows_ready, token_stride, tokens_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["mla_rope_write", "mla_rope_write_op"]

# ---- reference


def _reference(
    lead: Tensor, turned: Tensor, kv: Tensor, weight: Tensor, positions: Tensor, cos_sin: Tensor, cache: Tensor,
    slots: Tensor, eps: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    cos, sin = cos_sin.index_select(0, positions).unbind(1)
    wide = torch.promote_types(kv.dtype, torch.float32)
    latent, key = kv.to(wide).split((weight.shape[0], turned.shape[2]), -1)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    row = torch.cat((latent, rotated(key, cos, sin, interleaved)), -1).to(kv.dtype)
    live = slots >= 0
    cache.view(-1, cache.shape[2])[slots[live]] = row[live]
    return torch.cat((lead, rotated(turned.to(wide), cos[:, None], sin[:, None], interleaved).to(lead.dtype)), -1)


def _cost(lead: Tensor, turned: Tensor, kv: Tensor, *rest: object) -> Cost:
    return Cost(flops=3 * turned.numel() + 4 * kv.numel(), bytes=2 * (lead.nbytes + turned.nbytes + kv.nbytes))


# ---- space and examples


class Problem(NamedTuple):
    """Head counts and widths; not the number of tokens."""

    dtype: torch.dtype
    heads: int
    lead: int
    rotated: int
    rank: int


# 4096 numbers per program: 32 per thread, and the 128 heads of one token are still spread over several programs.
SPACE = Space(
    default=lambda device, p: {"BLOCK_H": max(1, min(next_pow2(p.heads), 4096 // next_pow2(p.lead))), "num_warps": 4},
    axes={"BLOCK_H": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
)


def _arguments(
    inputs: Inputs, *, T: int, H: int = 128, L: int = 512, E: int = 64, R: int = 512, S: int = 64,
    interleaved: bool = True, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """lead [T, H, L] as a batched product writes it, head by head; turned as a view of the projection of queries."""
    lead = inputs.randn(H, T, L, dtype=dtype).transpose(0, 1)
    turned = inputs.randn(T, H, 2 * E, dtype=dtype)[..., E:]
    pages = 1 + -(-T // S)
    slots = inputs.permutation(pages * S)[:T]
    table, places = inputs.randn(max(T, 1), 2, E // 2), inputs.randint(0, max(T, 1), T)
    kv, weight, cache = (inputs.randn(*shape, dtype=dtype) for shape in ((T, R + E), (R,), (pages, S, R + E)))
    return lead, turned, kv, weight, places, table, cache, slots, 1e-6, interleaved


@Example.of
def _example(inputs: Inputs, padding: int = 0, **sizes: Any) -> tuple[Any, ...]:
    args = _arguments(inputs, **sizes)
    args[7][sizes["T"] - padding :] = -1
    return args


EXAMPLES = (
    _example("decode", T=1, H=4, L=64, E=16, R=64),
    _example("padded", padding=2, T=5, H=3, L=24, E=8, R=40, S=16),
    _example("halves", T=3, H=2, L=16, E=8, R=16, S=4, interleaved=False, dtype=torch.float32),
    _example("deepseek", T=2, H=16, dtype=torch.float16),
)

# ---- kernel


@triton.jit
def _turn(
    x_ptr, y_ptr, cos_sin_ptr, rows, x_stride, y_stride, live, E: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotate the E numbers at x_ptr + rows * x_stride of each row, by the angles of one position."""
    half = tl.arange(0, BLOCK_HALF)[None, :]
    if INTERLEAVED:
        first, second = 2 * half, 2 * half + 1
    else:
        first, second = half, half + E // 2
    inside = half < E // 2
    mask = live & inside
    cos = tl.load(cos_sin_ptr + half, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + E // 2 + half, mask=inside, other=0.0)
    a = tl.load(x_ptr + rows * x_stride + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + rows * x_stride + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * y_stride + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + rows * y_stride + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["room", "max_pos", "lead_row_stride", "turned_row_stride", "kv_row_stride"])
def _mla_rope_write_kernel(
    lead_ptr, turned_ptr, kv_ptr, weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, q_ptr, room, max_pos,
    lead_row_stride, lead_head_stride, turned_row_stride, turned_head_stride, kv_row_stride, eps,
    H: tl.constexpr, L: tl.constexpr, E: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    W: tl.constexpr = R + E
    cos_sin_ptr += tl.minimum(tl.maximum(tl.load(positions_ptr + token), 0), max_pos - 1) * E
    if block > 0:
        heads = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        live = heads < H
        cols = tl.arange(0, BLOCK_L)[None, :]
        q_ptr += token * H * (L + E)
        lead_ptr += row_start(token, lead_row_stride, L)
        lead = tl.load(lead_ptr + heads * lead_head_stride + cols, mask=live & (cols < L), other=0.0)
        tl.store(q_ptr + heads * (L + E) + cols, lead, mask=live & (cols < L))
        _turn(
            turned_ptr + row_start(token, turned_row_stride, E), q_ptr + L, cos_sin_ptr, heads, turned_head_stride, L + E, live,
            E, INTERLEAVED, BLOCK_HALF,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        if (slot >= 0) & (slot < room):
            cols = tl.arange(0, BLOCK_R)
            kv_ptr += row_start(token, kv_row_stride, W)
            latent = tl.load(kv_ptr + cols, mask=cols < R, other=0.0).to(tl.float32)
            latent *= tl.rsqrt(tl.sum(latent * latent, 0) / R + eps)
            latent *= tl.load(weight_ptr + cols, mask=cols < R, other=0.0).to(tl.float32)
            cache_ptr += slot * W
            tl.store(cache_ptr + cols, latent.to(cache_ptr.dtype.element_ty), mask=cols < R)
            one = tl.zeros([1, 1], tl.int32)
            _turn(kv_ptr + R, cache_ptr + R, cos_sin_ptr, one, 0, 0, one == 0, E, INTERLEAVED, BLOCK_HALF)


def _launch(
    config: Config, lead: Tensor, turned: Tensor, kv: Tensor, weight: Tensor, positions: Tensor, cos_sin: Tensor,
    cache: Tensor, slots: Tensor, eps: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    (tokens, heads, width), rotated, rank = lead.shape, turned.shape[2], weight.shape[0]
    q = torch.empty((tokens, heads, width + rotated), dtype=lead.dtype, device=lead.device)
    if tokens:
        _mla_rope_write_kernel[(tokens, 1 + ceil_div(heads, config["BLOCK_H"]))](
            lead, turned, kv, weight, positions, cos_sin, cache, slots, q,
            cache.shape[0] * cache.shape[1], cos_sin.shape[0],
            token_stride(lead), lead.stride(1), token_stride(turned), turned.stride(1), rows_of(kv)[1], eps,
            H=heads, L=width, E=rotated, R=rank, INTERLEAVED=interleaved,
            BLOCK_L=next_pow2(width), BLOCK_HALF=next_pow2(rotated // 2), BLOCK_R=next_pow2(rank), **config,
        )  # fmt: skip
    return q


mla_rope_write_op = Op(
    name="mla_rope_write",
    reference=_reference,
    fake=lambda lead, turned, *rest: lead.new_empty(*lead.shape[:2], lead.shape[2] + turned.shape[2]),
    mutates=("cache",),
    problem=lambda lead, turned, kv, weight, *_: Problem(
        lead.dtype, lead.shape[1], lead.shape[2], turned.shape[2], weight.shape[0]
    ),
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def mla_rope_write(
    lead: Tensor, turned: Tensor, kv: Tensor, weight: Tensor, positions: Tensor, cos_sin: Tensor, cache: Tensor,
    slots: Tensor, *, eps: float = 1e-6, interleaved: bool = True,
) -> Tensor:  # fmt: skip
    """Norm, rotate and write a token's latent; rotate its queries and append them to their leading part.

    Args:
        lead: [T, H, L], bf16, fp16 or fp32, dense last dim: the part of a query that is not rotated, absorbed or not.
        turned: [T, H, E] of the same dtype, dense last dim.
        kv: [T, R + E], rows dense: the latent before its norm, and the key that all heads share before its rotation.
        weight: [R], the weight of the norm.
        positions: [T] int64, each in [0, max_pos); on a GPU an invalid position is replaced by the nearest valid one.
        cos_sin: [max_pos, 2, E/2] float32, contiguous.
        cache: [P, S, R + E] of kv's dtype, contiguous; written.
        slots: [T] int64, page * S + offset of each token, negative for none; on a GPU one beyond the cache is skipped.
        eps: the epsilon of the norm.
        interleaved: rotate pairs (2i, 2i + 1) instead of (i, i + E/2).

    Returns:
        [T, H, L + E], contiguous.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit; on a CPU, a slot beyond the cache.
    """
    shapes = f"{tuple(lead.shape)}, {tuple(turned.shape)}, {tuple(kv.shape)}, {tuple(weight.shape)}, {tuple(cache.shape)}"
    if lead.dim() != 3 or turned.dim() != 3 or lead.shape[:2] != turned.shape[:2]:
        raise ValueError(f"mla_rope_write: needs lead [T, H, L] and turned [T, H, E]; got {shapes}")
    width = weight.shape[0] + turned.shape[2]
    if kv.shape != (lead.shape[0], width) or cache.dim() != 3 or cache.shape[2] != width:
        raise ValueError(
            f"mla_rope_write: needs kv [T, R + E] and cache [P, S, R + E] for weight [R]; got lead, turned, kv, weight, cache "
            f"{shapes}"
        )
    if cos_sin.dim() != 3 or cos_sin.shape[1:] != (2, turned.shape[2] // 2) or not cos_sin.is_contiguous():
        raise ValueError(
            f"mla_rope_write: cos_sin must be contiguous [max_pos, 2, {turned.shape[2] // 2}]; got {tuple(cos_sin.shape)}"
        )
    if len({t.dtype for t in (lead, turned, kv, cache)}) > 1:
        raise ValueError(
            f"mla_rope_write: lead, turned, kv and cache must have one dtype; "
            f"got {lead.dtype}, {turned.dtype}, {kv.dtype}, {cache.dtype}"
        )
    if positions.shape != lead.shape[:1] or slots.shape != lead.shape[:1]:
        raise ValueError(
            f"mla_rope_write: needs a position and a slot for each of {lead.shape[0]} tokens; "
            f"got {tuple(positions.shape)} and {tuple(slots.shape)}"
        )
    check_slots("mla_rope_write", slots, cache.shape[0] * cache.shape[1])
    if not cache.is_contiguous() or any(t.stride(-1) != 1 for t in (lead, turned, kv)):
        raise ValueError("mla_rope_write: needs a contiguous cache, and lead, turned and kv with dense last dims")
    return mla_rope_write_op(
        tokens_ready(lead), tokens_ready(turned), rows_ready(kv), weight, positions, cos_sin, cache, slots, eps, interleaved
    )
