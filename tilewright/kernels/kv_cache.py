"""Writing keys and values into a paged cache, alone and behind the query/key norm and the rotation.

    # T tokens, H query heads, G key/value heads, D head dim, R rotated dims (R <= D), P pages, S tokens a page
    kv_cache_write:  cache[slot // S, :, slot % S, :] = k or v          for every token whose slot is not negative
    rope_kv_write:   q, k -> RMS norm over each head (optional) -> rotation by position; k and v -> cache; returns q

    q [T, H, D]; k, v [T, G, D]: bf16, fp16 or fp32, any token and head strides, so the three may be views of one merged
    projection. Caches [P, G, S, D]: a (page, head) pair is one dense block. slots [T] int64, -1 marks padding.
    cos_sin [max_pos, 2, R/2] float32 (kernels/rope.py). The arithmetic is float32, rounded once at the end.

Limited by bytes, and at decode sizes by launch latency: that is why four steps are one kernel.
Not supported: backward, caches of another dtype than k and v.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.arguments import kv_write_arguments, rope_write_arguments
from tilewright.kernels.shapes import next_pow2
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["kv_cache_write", "kv_cache_write_op", "rope_kv_write", "rope_kv_write_op"]

# ---- reference


def _write_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    page_size = k_cache.shape[2]
    places = slots.tolist()
    if len(places) <= 4:  # a few copies cost a CPU less than an indexed write
        for i, slot in enumerate(places):
            if slot >= 0:
                page, offset = divmod(slot, page_size)
                k_cache[page, :, offset] = k[i]
                v_cache[page, :, offset] = v[i]
        return
    if min(places) < 0:
        live = slots >= 0
        k, v, slots = k[live], v[live], slots[live]
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, :, offsets] = k
    v_cache[pages, :, offsets] = v


def _rotate(wide: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R dims of each head of wide [T, heads, D] by cos, sin [T, 1, R/2]."""
    half = cos.shape[-1]
    rest = wide.shape[-1] - 2 * half
    if interleaved:
        first, second = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        return torch.cat((turned, wide[..., 2 * half :]), -1)
    first, second, *unturned = wide.split((half, half, rest) if rest else half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *unturned), -1)


def _head_norm(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)


def _rope_reference(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).unbind(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = (q.shape[1], k.shape[1])
    if q_norm is None or k_norm is None:
        both = torch.cat((q, k), 1).to(wide)
    else:
        both = torch.cat((_head_norm(q.to(wide), q_norm, eps), _head_norm(k.to(wide), k_norm, eps)), 1)
    q_turned, k_turned = _rotate(both, cos, sin, interleaved).to(q.dtype).split(heads, 1)
    _write_reference(k_turned, v, k_cache, v_cache, slots)
    return q_turned.contiguous()


# ---- cost


def _write_cost(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Cost:
    return Cost(flops=0, bytes=2 * (k.nbytes + v.nbytes) + slots.nbytes)


def _rope_cost(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, *rest: object) -> Cost:
    table = positions.numel() * cos_sin[0].nbytes
    return Cost(flops=3 * (q.numel() + k.numel()), bytes=2 * (q.nbytes + k.nbytes + v.nbytes) + table)


# ---- space and examples


class Problem(NamedTuple):
    """Head counts and widths; not the number of tokens."""

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int


def _write_problem(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Problem:
    return Problem(k.dtype, 0, k.shape[1], k.shape[2])


def _rope_problem(q: Tensor, k: Tensor, *rest: object) -> Problem:
    return Problem(q.dtype, q.shape[1], k.shape[1], q.shape[2])


# 2048 elements a program: at 4 warps 16 a thread, and one token still spreads over several programs.
SPACE = Space(
    default=lambda device, p: {"BLOCK_H": max(1, min(next_pow2(p.kv_heads), 1024 // next_pow2(p.head_dim))), "num_warps": 4},
    axes={"BLOCK_H": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8)},
)


def _merged(inputs: Inputs, tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one merged projection, as a model has them."""
    q_heads, kv_heads = heads
    qkv = inputs.randn(tokens, q_heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split((q_heads, kv_heads, kv_heads), 1)
    return q, k, v


def _slots(inputs: Inputs, tokens: int, pages: int, page_size: int, padding: int) -> Tensor:
    slots = inputs.permutation(pages * page_size)[:tokens]
    slots[tokens - padding :] = -1
    return slots


def _example(
    label: str, tokens: int, heads: tuple[int, int], dim: int, rotated: int,
    dtype: torch.dtype = torch.bfloat16, norm: bool = False, interleaved: bool = False, padding: int = 0,
) -> Example:  # fmt: skip
    def make(inputs: Inputs) -> tuple[object, ...]:
        q, k, v = _merged(inputs, tokens, heads, dim, dtype)
        k_cache = inputs.randn(3, heads[1], 16, dim, dtype=dtype)
        v_cache = inputs.randn(3, heads[1], 16, dim, dtype=dtype)
        norms = (inputs.randn(dim, dtype=dtype), inputs.randn(dim, dtype=dtype)) if norm else (None, None)
        positions, table = inputs.randint(0, 40, tokens), inputs.randn(40, 2, rotated // 2)
        slots = _slots(inputs, tokens, 3, 16, padding)
        return q, k, v, positions, table, k_cache, v_cache, slots, *norms, 1e-6, interleaved

    return Example(label, make)


ROPE_EXAMPLES = (
    _example("decode", 1, (4, 2), 64, 64),
    _example("norm", 5, (4, 2), 32, 32, norm=True, padding=2),
    _example("ragged", 3, (3, 3), 24, 24, dtype=torch.float32),
    _example("partial", 3, (2, 1), 80, 32, dtype=torch.float16),
    _example("interleaved", 3, (2, 1), 16, 16, dtype=torch.float32, interleaved=True),
)


def _write_example(label: str, tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, padding: int = 0) -> Example:
    def make(inputs: Inputs) -> tuple[Tensor, ...]:
        _, k, v = _merged(inputs, tokens, (2, kv_heads), dim, dtype)
        caches = [inputs.randn(3, kv_heads, 16, dim, dtype=dtype) for _ in range(2)]
        return k, v, *caches, _slots(inputs, tokens, 3, 16, padding)

    return Example(label, make)


WRITE_EXAMPLES = (
    _write_example("strided", 6, 2, 64, torch.bfloat16, padding=1),
    _write_example("ragged", 3, 3, 24, torch.float16),
    _write_example("one", 1, 1, 1, torch.float32),
)

# ---- kernels


@triton.jit
def _turn(
    x_ptr, weight_ptr, y_ptr, heads, live, x_head_stride, y_head_stride, cos, sin, eps,
    D: tl.constexpr, R: tl.constexpr, HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some heads of one token: x_ptr points at the token's first head, y_ptr likewise."""
    half = tl.arange(0, BLOCK_HALF)[None, :]
    if INTERLEAVED:
        first_cols, second_cols = 2 * half, 2 * half + 1
    else:
        first_cols, second_cols = half, half + R // 2
    mask = live & (half < R // 2)
    first = tl.load(x_ptr + heads * x_head_stride + first_cols, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + heads * x_head_stride + second_cols, mask=mask, other=0.0).to(tl.float32)
    # What no branch below uses, the compiler drops.
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
    tl.store(y_ptr + heads * y_head_stride + first_cols, (first * cos - second * sin).to(out), mask=mask)
    tl.store(y_ptr + heads * y_head_stride + second_cols, (second * cos + first * sin).to(out), mask=mask)
    if R < D:
        tl.store(y_ptr + heads * y_head_stride + rest_cols, rest.to(out), mask=rest_mask)


@triton.jit
def _copy_heads(x_ptr, y_ptr, heads, live, x_head_stride, y_head_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = live & (cols < D)
    x = tl.load(x_ptr + heads * x_head_stride + cols, mask=mask, other=0.0)
    tl.store(y_ptr + heads * y_head_stride + cols, x.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, q_out_ptr,
    q_row_stride, k_row_stride, v_row_stride, eps,
    Q_HEAD_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    kv_blocks: tl.constexpr = (G + BLOCK_H - 1) // BLOCK_H
    lane = tl.arange(0, BLOCK_H)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    slot = tl.load(slots_ptr + token)
    # A key/value head is one dense [S, D] block of its page, so consecutive heads of a token stand S * D apart.
    kv_offset = (slot // S) * G * S * D + (slot % S) * D
    if block < q_blocks + kv_blocks:
        table_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * R
        cos = tl.load(table_ptr + half, mask=half < R // 2, other=0.0)
        sin = tl.load(table_ptr + R // 2 + half, mask=half < R // 2, other=0.0)
        if block < q_blocks:
            heads = block * BLOCK_H + lane
            _turn(
                q_ptr + token * q_row_stride, q_norm_ptr, q_out_ptr + token * H * D, heads, heads < H, Q_HEAD_STRIDE, D,
                cos, sin, eps, D, R, HAS_NORM, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        elif slot >= 0:
            heads = (block - q_blocks) * BLOCK_H + lane
            _turn(
                k_ptr + token * k_row_stride, k_norm_ptr, k_cache_ptr + kv_offset, heads, heads < G, K_HEAD_STRIDE, S * D,
                cos, sin, eps, D, R, HAS_NORM, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
    elif slot >= 0:
        heads = (block - q_blocks - kv_blocks) * BLOCK_H + lane
        _copy_heads(v_ptr + token * v_row_stride, v_cache_ptr + kv_offset, heads, heads < G, V_HEAD_STRIDE, S * D, D, BLOCK_D)


@triton.jit
def _kv_cache_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_row_stride, v_row_stride,
    K_HEAD_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        offset = (slot // S) * G * S * D + (slot % S) * D
        _copy_heads(k_ptr + token * k_row_stride, k_cache_ptr + offset, heads, heads < G, K_HEAD_STRIDE, S * D, D, BLOCK_D)
        _copy_heads(v_ptr + token * v_row_stride, v_cache_ptr + offset, heads, heads < G, V_HEAD_STRIDE, S * D, D, BLOCK_D)


# ---- launchers and ops


def _write_launch(config: Config, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    tokens, kv_heads, dim = k.shape
    if tokens:
        _kv_cache_write_kernel[(tokens, triton.cdiv(kv_heads, config["BLOCK_H"]))](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0),
            K_HEAD_STRIDE=k.stride(1), V_HEAD_STRIDE=v.stride(1), G=kv_heads, D=dim, S=k_cache.shape[2],
            BLOCK_D=next_pow2(dim), **config,
        )  # fmt: skip


def _rope_launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    tokens, q_heads, dim = q.shape
    kv_heads, rotated = k.shape[1], 2 * cos_sin.shape[2]
    q_out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    blocks = triton.cdiv(q_heads, config["BLOCK_H"]) + 2 * triton.cdiv(kv_heads, config["BLOCK_H"])
    if tokens:
        _rope_kv_write_kernel[(tokens, blocks)](
            q, k, v, positions, cos_sin, k_cache, v_cache, slots,
            q if q_norm is None else q_norm, k if k_norm is None else k_norm, q_out,
            q.stride(0), k.stride(0), v.stride(0), eps,
            Q_HEAD_STRIDE=q.stride(1), K_HEAD_STRIDE=k.stride(1), V_HEAD_STRIDE=v.stride(1),
            H=q_heads, G=kv_heads, D=dim, R=rotated, S=k_cache.shape[2],
            HAS_NORM=q_norm is not None, INTERLEAVED=interleaved,
            BLOCK_D=next_pow2(dim), BLOCK_HALF=next_pow2(rotated // 2), BLOCK_REST=next_pow2(dim - rotated), **config,
        )  # fmt: skip
    return q_out


kv_cache_write_op = Op(
    name="kv_cache_write",
    reference=_write_reference,
    fake=lambda *args: None,
    mutates=("k_cache", "v_cache"),
    problem=_write_problem,
    cost=_write_cost,
    examples=WRITE_EXAMPLES,
    make=kv_write_arguments,
    impls=(Impl(name="triton", launch=_write_launch, space=SPACE, batch_invariant=True),),
)

rope_kv_write_op = Op(
    name="rope_kv_write",
    reference=_rope_reference,
    fake=lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    mutates=("k_cache", "v_cache"),
    problem=_rope_problem,
    cost=_rope_cost,
    examples=ROPE_EXAMPLES,
    make=rope_write_arguments,
    impls=(Impl(name="triton", launch=_rope_launch, space=SPACE, batch_invariant=True),),
)

# ---- public functions


def _check(op: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    heads, dim = k.shape[1:] if k.dim() == 3 else (0, 0)
    if k.dim() != 3 or v.shape != k.shape:
        raise ValueError(f"{op}: k and v must both be [T, G, D]; got {tuple(k.shape)} and {tuple(v.shape)}")
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or k_cache.shape[1] != heads or k_cache.shape[3] != dim:
        raise ValueError(
            f"{op}: caches must both be [P, {heads}, S, {dim}] for k {tuple(k.shape)}; "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
        raise ValueError(f"{op}: k {k.dtype} and v {v.dtype} must have the caches' dtypes {k_cache.dtype}, {v_cache.dtype}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"{op}: caches must be contiguous [P, G, S, D]")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"{op}: slots must be [{k.shape[0]}], one a token; got {tuple(slots.shape)}")


def kv_cache_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write the keys and values of T tokens to their places in a paged cache, in place.

    Args:
        k: [T, G, D], dense last dim.
        v: [T, G, D], dense last dim.
        k_cache: [P, G, S, D], written.
        v_cache: [P, G, S, D], written.
        slots: [T] int64, page * S + offset; a negative slot is skipped. Not checked against P on a GPU.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    _check("kv_cache_write", k, v, k_cache, v_cache, slots)
    kv_cache_write_op(k, v, k_cache, v_cache, slots)


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Norm (optional) and rotate q and k, and write k and v into the paged cache: all between projection and attention.

    Args:
        q: [T, H, D], dense last dim.
        k: [T, G, D], dense last dim.
        v: [T, G, D], dense last dim.
        positions: [T] int64, each below the table's length.
        cos_sin: [max_pos, 2, R/2] float32, R <= D.
        k_cache: [P, G, S, D], written.
        v_cache: [P, G, S, D], written.
        slots: [T] int64, page * S + offset; a negative slot is skipped.
        q_norm: [D] weight of an RMS norm over each query head, before the rotation.
        k_norm: [D] likewise for keys; both or neither.
        eps: of those norms.
        interleaved: rotate pairs (2i, 2i+1) instead of (i, i + R/2).

    Returns:
        The rotated q, [T, H, D], contiguous.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    _check("rope_kv_write", k, v, k_cache, v_cache, slots)
    if q.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        want = f"[{k.shape[0]}, H, {k.shape[2]}] {k.dtype}"
        raise ValueError(f"rope_kv_write: q must be {want} like k; got {tuple(q.shape)} {q.dtype}")
    if cos_sin.dim() != 3 or cos_sin.shape[1] != 2 or 2 * cos_sin.shape[2] > q.shape[2]:
        raise ValueError(f"rope_kv_write: cos_sin must be [max_pos, 2, R/2] with R <= {q.shape[2]}; got {tuple(cos_sin.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rope_kv_write: give both q_norm and k_norm, or neither")
    return rope_kv_write_op(q, k, v, positions, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, eps, interleaved)
