"""Normalise and rotate queries and keys, and write keys and values into a paged cache.

    # T tokens, H query heads, G key/value heads, D head dim, R rotated dims (R <= D), P pages, S tokens per page
    q, k -> RMS norm over each head (optional) -> rotation by position; k and v -> cache; returns q

    q [T, H, D]; k, v [T, G, D]: bf16, fp16 or fp32, any token and head strides, so the three may be views of one merged
    projection. Caches, scales and slots as in cache_write.py. cos_sin [max_pos, 2, R/2] float32 (kernels/elementwise/rope.py).
    The arithmetic is float32, rounded once at the end: codes are those of the float32 numbers.

Limited by bytes, and at decode sizes by launch latency, which is why the four steps are one kernel.
Not supported: backward, caches of a dtype that is neither k's nor one of codes, float8 before sm_89.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.paged.cache_write import (
    SPACE,
    Problem,
    caches_example,
    check_write,
    coding,
    copy_heads,
    merged_example,
    refuse_cache,
    room_of_cache,
    slots_example,
    write_reference,
    written_bytes,
)
from tilewright.kernels.attention.paged.inputs import rope_write_arguments
from tilewright.kernels.device.quantize import encode_tile, magnitude, scales_of
from tilewright.kernels.device.rotary import rotated
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.hopper.early import early
from tilewright.kernels.launch.pdl import launch_options
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, token_stride, tokens_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["rope_kv_write", "rope_kv_write_op"]

# ---- reference


def _head_norm(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).unbind(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = (q.shape[1], k.shape[1])
    if q_norm is None or k_norm is None:
        both = torch.cat((q, k), 1).to(wide)
    else:
        both = torch.cat((_head_norm(q.to(wide), q_norm, eps), _head_norm(k.to(wide), k_norm, eps)), 1)
    q_turned, k_turned = rotated(both, cos, sin, interleaved).split(heads, 1)
    write_reference(k_turned if k_scale is not None else k_turned.to(k.dtype), v, k_cache, v_cache, slots, k_scale, v_scale)
    return q_turned.to(q.dtype).contiguous()


def _cost(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> Cost:  # fmt: skip
    table = positions.numel() * cos_sin[0].nbytes
    moved = 2 * q.nbytes + k.nbytes + v.nbytes + written_bytes(k, k_cache, k_scale)
    return Cost(flops=3 * (q.numel() + k.numel()), bytes=moved + table)


# ---- problem and examples


@Example.of
def _example(
    inputs: Inputs, tokens: int, heads: tuple[int, int], dim: int, rotated: int,
    dtype: torch.dtype = torch.bfloat16, norm: bool = False, interleaved: bool = False, padding: int = 0,
    cache: torch.dtype | None = None,
) -> tuple[object, ...]:  # fmt: skip
    q, k, v = merged_example(inputs, tokens, heads, dim, dtype)
    caches, scales = caches_example(inputs, heads[1], dim, cache or dtype)
    norms = (inputs.randn(dim, dtype=dtype), inputs.randn(dim, dtype=dtype)) if norm else (None, None)
    positions, table = inputs.randint(0, 40, tokens), inputs.randn(40, 2, rotated // 2)
    slots = slots_example(inputs, tokens, 3, 16, padding)
    return q, k, v, positions, table, *caches, slots, *norms, 1e-6, interleaved, *scales


EXAMPLES = (
    _example("decode", 1, (4, 2), 64, 64),
    _example("norm", 5, (4, 2), 32, 32, norm=True, padding=2),
    _example("ragged", 3, (3, 3), 24, 24, dtype=torch.float32),
    _example("partial", 3, (2, 1), 80, 32, dtype=torch.float16),
    _example("interleaved", 3, (2, 1), 16, 16, dtype=torch.float32, interleaved=True),
    _example("int8", 5, (4, 2), 64, 64, norm=True, padding=1, cache=torch.int8),
    _example("fp8", 3, (2, 1), 80, 32, dtype=torch.float16, cache=torch.float8_e4m3fn),
)


# ---- kernels


@triton.jit
def _turn(
    x_ptr, weight_ptr, y_ptr, scale_ptr, heads, live, x_head_stride, y_head_stride, cos, sin, eps,
    D: tl.constexpr, R: tl.constexpr, S: tl.constexpr, HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr, HEAD_SCALES: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some heads of one token. x_ptr, y_ptr and scale_ptr are those of the token's first head.

    LARGEST: the largest code; 0 if y has the dtype of the numbers themselves."""
    half = tl.arange(0, BLOCK_HALF)[None, :]
    if INTERLEAVED:
        first_cols, second_cols = 2 * half, 2 * half + 1
    else:
        first_cols, second_cols = half, half + R // 2
    mask = live & (half < R // 2)
    first = tl.load(x_ptr + heads * x_head_stride + first_cols, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + heads * x_head_stride + second_cols, mask=mask, other=0.0).to(tl.float32)
    # If no branch below uses these, the compiler removes them.
    squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
    rest_cols = R + tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = live & (rest_cols < D)
    rest = tl.load(x_ptr + heads * x_head_stride + rest_cols, mask=rest_mask, other=0.0).to(tl.float32)
    if R < D:
        squares += tl.sum(rest * rest, axis=1, keep_dims=True)
    if HAS_NORM:
        scale = tl.rsqrt(squares / D + eps)
        first *= scale * tl.load(weight_ptr + first_cols, mask=half < R // 2, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight_ptr + second_cols, mask=half < R // 2, other=0.0).to(tl.float32)
        if R < D:
            rest *= scale * tl.load(weight_ptr + rest_cols, mask=rest_cols < D, other=0.0).to(tl.float32)
    out = y_ptr.dtype.element_ty
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    if LARGEST:
        largest = tl.max(tl.maximum(magnitude(turned_first), magnitude(turned_second)), axis=1, keep_dims=True)
        if R < D:
            largest = tl.maximum(largest, tl.max(magnitude(rest), axis=1, keep_dims=True))
        scale, inverse = scales_of(largest, LARGEST)
        tl.store(scale_ptr + heads * HEAD_SCALES, scale, mask=live)
        turned_first = encode_tile(turned_first, inverse, out)
        turned_second = encode_tile(turned_second, inverse, out)
        rest = encode_tile(rest, inverse, out)
    tl.store(y_ptr + heads * y_head_stride + first_cols, turned_first.to(out), mask=mask)
    tl.store(y_ptr + heads * y_head_stride + second_cols, turned_second.to(out), mask=mask)
    if R < D:
        tl.store(y_ptr + heads * y_head_stride + rest_cols, rest.to(out), mask=rest_mask)


@triton.jit(do_not_specialize=["room", "max_pos", "q_row_stride", "k_row_stride", "v_row_stride"])
def _rope_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slots_ptr,
    q_norm_ptr, k_norm_ptr, q_out_ptr, room, max_pos, q_row_stride, k_row_stride, v_row_stride, eps,
    Q_HEAD_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr, HEAD_SCALES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    kv_blocks: tl.constexpr = (G + BLOCK_H - 1) // BLOCK_H
    lane = tl.arange(0, BLOCK_H)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    slot = tl.load(slots_ptr + token)
    slot = tl.where(slot < room, slot, -1)
    # A key/value head is one dense [S, D] block of its page, so consecutive heads of a token are S * D apart.
    place = (slot // S) * G * S + slot % S
    scale_ptr = k_scale_ptr + (slot // S) * G * HEAD_SCALES + slot % S
    if block < q_blocks + kv_blocks:
        table_ptr = cos_sin_ptr + tl.minimum(tl.maximum(tl.load(positions_ptr + token), 0), max_pos - 1) * R
        cos = tl.load(table_ptr + half, mask=half < R // 2, other=0.0)
        sin = tl.load(table_ptr + R // 2 + half, mask=half < R // 2, other=0.0)
        if block < q_blocks:
            heads = block * BLOCK_H + lane
            _turn(
                q_ptr + row_start(token, q_row_stride, D), q_norm_ptr, q_out_ptr + token * H * D, k_scale_ptr, heads, heads < H,
                Q_HEAD_STRIDE, D, cos, sin, eps, D, R, S, HAS_NORM, INTERLEAVED, 0, 0, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        elif slot >= 0:
            heads = (block - q_blocks) * BLOCK_H + lane
            _turn(
                k_ptr + row_start(token, k_row_stride, D), k_norm_ptr, k_cache_ptr + place * D, scale_ptr, heads, heads < G,
                K_HEAD_STRIDE, S * D, cos, sin, eps, D, R, S, HAS_NORM, INTERLEAVED, LARGEST, HEAD_SCALES,
                BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
    elif slot >= 0:
        heads = (block - q_blocks - kv_blocks) * BLOCK_H + lane
        copy_heads(
            v_ptr + row_start(token, v_row_stride, D), v_cache_ptr, v_scale_ptr, slot, heads, heads < G, V_HEAD_STRIDE,
            LARGEST > 0, G, D, S, LARGEST, HEAD_SCALES, BLOCK_D,
        )  # fmt: skip


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    tokens, q_heads, dim = q.shape
    kv_heads, rotated = k.shape[1], 2 * cos_sin.shape[2]
    q_out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    blocks = ceil_div(q_heads, config["BLOCK_H"]) + 2 * ceil_div(kv_heads, config["BLOCK_H"])
    if tokens:
        _rope_kv_write_kernel[(tokens, blocks)](
            q, k, v, positions, cos_sin, k_cache, v_cache,
            k if k_scale is None else k_scale, v if v_scale is None else v_scale, slots,
            q if q_norm is None else q_norm, k if k_norm is None else k_norm, q_out,
            room_of_cache(k_cache), cos_sin.shape[0], token_stride(q), token_stride(k), token_stride(v), eps,
            Q_HEAD_STRIDE=q.stride(1), K_HEAD_STRIDE=k.stride(1), V_HEAD_STRIDE=v.stride(1),
            H=q_heads, G=kv_heads, D=dim, R=rotated, S=k_cache.shape[2],
            HAS_NORM=q_norm is not None, INTERLEAVED=interleaved,
            BLOCK_D=next_pow2(dim), BLOCK_HALF=next_pow2(rotated // 2), BLOCK_REST=next_pow2(dim - rotated),
            **coding(k_cache, k_scale), **config, **launch_options(early(q, tokens)),
        )  # fmt: skip
    return q_out


rope_kv_write_op = Op(
    name="rope_kv_write",
    reference=_reference,
    fake=lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    problem=lambda q, k, v, positions, cos_sin, k_cache, *_: Problem(
        q.dtype, q.shape[1], k.shape[1], q.shape[2], k_cache.dtype
    ),
    cost=_cost,
    examples=EXAMPLES,
    make=rope_write_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, refuse=refuse_cache, batch_invariant=True),),
)


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Norm (optional) and rotate q and k, and write k and v into the paged cache: every step between projection and attention.

    Args:
        q: [T, H, D], dense last dim.
        k: [T, G, D], dense last dim.
        v: [T, G, D], dense last dim.
        positions: [T] int64, each below the table's length; on a GPU an invalid position is replaced by the nearest valid one.
        cos_sin: [max_pos, 2, R/2] float32, R <= D.
        k_cache: [P, G, S, D], written.
        v_cache: [P, G, S, D], written.
        slots: [T] int64, page * S + offset. A negative slot is skipped; on a GPU also a slot beyond the cache.
        q_norm: [D] weight of an RMS norm over each query head, before the rotation.
        k_norm: [D] likewise for keys; both or neither.
        eps: the epsilon of those norms.
        interleaved: rotate pairs (2i, 2i+1) instead of (i, i + R/2).
        k_scale: [P, G, S] float32, written if the caches contain codes; else None.
        v_scale: likewise.

    Returns:
        The rotated q, [T, H, D], contiguous.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    check_write("rope_kv_write", k, v, k_cache, v_cache, slots, k_scale, v_scale)
    if q.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        want = f"[{k.shape[0]}, H, {k.shape[2]}] {k.dtype}"
        raise ValueError(f"rope_kv_write: q must be {want} like k; got {tuple(q.shape)} {q.dtype}")
    if cos_sin.dim() != 3 or cos_sin.shape[1] != 2 or 2 * cos_sin.shape[2] > q.shape[2]:
        raise ValueError(f"rope_kv_write: cos_sin must be [max_pos, 2, R/2] with R <= {q.shape[2]}; got {tuple(cos_sin.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rope_kv_write: give both q_norm and k_norm, or neither")
    return rope_kv_write_op(
        tokens_ready(q), tokens_ready(k), tokens_ready(v), positions, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, eps,
        interleaved, k_scale, v_scale,
    )  # fmt: skip
