"""Writing keys and values into a paged cache.

    # T tokens, G key/value heads, D head dim, P pages, S tokens per page
    cache[slot // S, :, slot % S, :] = k or v          for every token whose slot is not negative

    k, v [T, G, D]: bf16, fp16 or fp32, any token and head strides, so they may be views of one merged projection.
    Caches [P, G, S, D]: a (page, head) pair is one dense block. slots [T] int64, -1 marks padding.

Caches of int8 or float8 e4m3fn contain codes. k_scale and v_scale [P, G, S] float32 contain the factor of a token's codes in
one head: amax / 127 or amax / 448, bit for bit as `tilewright.formats.encode`. Codes of values are stored by columns, [P, G, D,
S], as attention reads them.

Limited by bytes, and at decode sizes by launch latency. This file also contains what it shares with rope_cache_write.py.
Not supported: backward, caches of a dtype that is neither k's nor one of codes, float8 before sm_89.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS, encode
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.paged.checks import check_slots
from tilewright.kernels.attention.paged.configs import CODES, misfit, value_shape
from tilewright.kernels.attention.paged.inputs import kv_write_arguments
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude, scales_of
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, token_stride, tokens_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = [
    "SPACE",
    "Problem",
    "caches_example",
    "check_write",
    "coding",
    "copy_heads",
    "kv_cache_write",
    "kv_cache_write_op",
    "merged_example",
    "refuse_cache",
    "room_of_cache",
    "slots_example",
    "write_reference",
    "written_bytes",
]

# ---- reference

FORMAT_OF = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""The format of a cache of codes, by its dtype."""


def write_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    page_size = k_cache.shape[2]
    places = slots.tolist()
    if k_scale is not None and v_scale is not None:
        for i, slot in enumerate(places):
            if slot >= 0:
                page, offset = divmod(slot, page_size)
                for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache.mT, v_scale)):
                    # In the float64 oracle, a cache of float8 codes is float64.
                    codes, scales, _ = encode(x[i], FORMAT_OF.get(cache.dtype, "fp8"))
                    cache[page, :, offset], scale[page, :, offset] = codes.to(cache.dtype), scales[:, 0].to(scale.dtype)
        return
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


# ---- cost


def written_bytes(k: Tensor, k_cache: Tensor, k_scale: Tensor | None) -> int:
    """Bytes written for keys and values together."""
    tokens, heads, dim = k.shape
    return 2 * tokens * heads * (dim * k_cache.element_size() + (0 if k_scale is None else k_scale.element_size()))


def _cost(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> Cost:
    return Cost(flops=0, bytes=k.nbytes + v.nbytes + written_bytes(k, k_cache, k_scale) + slots.nbytes)


# ---- space and examples


class Problem(NamedTuple):
    """Head counts, widths and dtypes; not the number of tokens."""

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    cache: torch.dtype


def refuse_cache(device: Device, problem: Problem) -> str | None:
    if problem.cache == torch.float8_e4m3fn and device.arch < 89:
        return f"float8 caches need sm_89, this is sm_{device.arch}; use int8 caches here"
    return None


# 2048 elements per program: 16 per thread with 4 warps, and one token is still spread over several programs.
SPACE = Space(
    default=lambda device, p: {"BLOCK_H": max(1, min(next_pow2(p.kv_heads), 1024 // next_pow2(p.head_dim))), "num_warps": 4},
    axes={"BLOCK_H": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8)},
)


def merged_example(
    inputs: Inputs, tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one merged projection, as in a model."""
    q_heads, kv_heads = heads
    qkv = inputs.randn(tokens, q_heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split((q_heads, kv_heads, kv_heads), 1)
    return q, k, v


def caches_example(
    inputs: Inputs, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
    """(keys, values) of three pages of 16 tokens, and their scales if dtype is one of codes."""
    k_cache = inputs.randn(3, kv_heads, 16, dim).to(dtype)
    v_cache = inputs.randn(*value_shape(k_cache)).to(dtype)
    if dtype not in CODES:
        return (k_cache, v_cache), (None, None)
    return (k_cache, v_cache), (inputs.randn(3, kv_heads, 16), inputs.randn(3, kv_heads, 16))


def slots_example(inputs: Inputs, tokens: int, pages: int, page_size: int, padding: int) -> Tensor:
    slots = inputs.permutation(pages * page_size)[:tokens]
    slots[tokens - padding :] = -1
    return slots


@Example.of
def _example(
    inputs: Inputs, tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, padding: int = 0, cache: torch.dtype | None = None
) -> tuple[object, ...]:
    _, k, v = merged_example(inputs, tokens, (2, kv_heads), dim, dtype)
    caches, scales = caches_example(inputs, kv_heads, dim, cache or dtype)
    return k, v, *caches, slots_example(inputs, tokens, 3, 16, padding), *scales


EXAMPLES = (
    _example("strided", 6, 2, 64, torch.bfloat16, padding=1),
    _example("ragged", 3, 3, 24, torch.float16),
    _example("one", 1, 1, 1, torch.float32),
    _example("int8", 3, 2, 24, torch.bfloat16, padding=1, cache=torch.int8),
    _example("fp8", 3, 2, 64, torch.float32, cache=torch.float8_e4m3fn),
)

# ---- kernels


@triton.jit
def copy_heads(
    x_ptr, cache_ptr, scale_ptr, slot, heads, live, x_head_stride, BY_COLUMNS: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, LARGEST: tl.constexpr, HEAD_SCALES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write some heads of one token, at x_ptr, to its slot of the cache. LARGEST: the largest code; 0 for a cache without
    codes."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = live & (cols < D)
    x = tl.load(x_ptr + heads * x_head_stride + cols, mask=mask, other=0.0)
    if LARGEST:
        largest = tl.max(magnitude(x), axis=1, keep_dims=True)
        scale, inverse = scales_of(largest, LARGEST)
        tl.store(scale_ptr + (slot // S * G + heads) * HEAD_SCALES + slot % S, scale, mask=live)
        x = encode_tile(x, inverse, cache_ptr.dtype.element_ty)
    head_ptr = cache_ptr + (slot // S * G + heads) * (S * D)
    if BY_COLUMNS:
        tl.store(head_ptr + cols * S + slot % S, x.to(cache_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(head_ptr + slot % S * D + cols, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["room", "k_row_stride", "v_row_stride"])
def _kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slots_ptr, room, k_row_stride, v_row_stride,
    K_HEAD_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, LARGEST: tl.constexpr, HEAD_SCALES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if (slot >= 0) & (slot < room):
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        copy_heads(
            k_ptr + row_start(token, k_row_stride, D), k_cache_ptr, k_scale_ptr, slot, heads, heads < G, K_HEAD_STRIDE, False,
            G, D, S, LARGEST, HEAD_SCALES, BLOCK_D,
        )  # fmt: skip
        copy_heads(
            v_ptr + row_start(token, v_row_stride, D), v_cache_ptr, v_scale_ptr, slot, heads, heads < G, V_HEAD_STRIDE,
            LARGEST > 0, G, D, S, LARGEST, HEAD_SCALES, BLOCK_D,
        )  # fmt: skip


# ---- launcher and op


def room_of_cache(k_cache: Tensor) -> int:
    """The number of slots of a cache [P, G, S, D]: the kernels write to no other slot, whatever their inputs."""
    return k_cache.shape[0] * k_cache.shape[2]


def coding(k_cache: Tensor, k_scale: Tensor | None) -> dict[str, object]:
    """The kernel's options for a cache of codes, or for one without."""
    if k_scale is None:
        return {"LARGEST": 0, "HEAD_SCALES": 0}
    # An int, because the condition of a kernel's `if` must not be a float.
    return {"LARGEST": int(FORMATS[FORMAT_OF[k_cache.dtype]].largest), "HEAD_SCALES": k_scale.stride(1), **UNFUSED}


def _launch(
    config: Config, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    tokens, kv_heads, dim = k.shape
    if tokens:
        _kernel[(tokens, ceil_div(kv_heads, config["BLOCK_H"]))](
            k, v, k_cache, v_cache, k if k_scale is None else k_scale, v if v_scale is None else v_scale, slots,
            room_of_cache(k_cache), token_stride(k), token_stride(v),
            K_HEAD_STRIDE=k.stride(1), V_HEAD_STRIDE=v.stride(1), G=kv_heads, D=dim, S=k_cache.shape[2],
            BLOCK_D=next_pow2(dim), **coding(k_cache, k_scale), **config,
        )  # fmt: skip


kv_cache_write_op = Op(
    name="kv_cache_write",
    reference=write_reference,
    fake=lambda *args: None,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    problem=lambda k, v, k_cache, *_: Problem(k.dtype, 0, k.shape[1], k.shape[2], k_cache.dtype),
    cost=_cost,
    examples=EXAMPLES,
    make=kv_write_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, refuse=refuse_cache, batch_invariant=True),),
)

# ---- public function


def check_write(
    op: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    heads, dim = k.shape[1:] if k.dim() == 3 else (0, 0)
    if k.dim() != 3 or v.shape != k.shape:
        raise ValueError(f"{op}: k and v must both be [T, G, D]; got {tuple(k.shape)} and {tuple(v.shape)}")
    if k_cache.dim() != 4 or v_cache.shape != value_shape(k_cache) or k_cache.shape[1] != heads or k_cache.shape[3] != dim:
        raise ValueError(
            f"{op}: caches must both be [P, {heads}, S, {dim}] for k {tuple(k.shape)}; "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.dtype in CODES and k_cache.dtype == v_cache.dtype and k.dtype == v.dtype:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is None:
                raise ValueError(f"{op}: caches of {k_cache.dtype} need {name} {tuple(k_cache.shape[:3])} float32; got None")
            if why := misfit(scale, k_cache, k_scale):
                raise ValueError(f"{op}: {name} {why}")
    elif k.dtype != k_cache.dtype or v.dtype != v_cache.dtype or k_scale is not None or v_scale is not None:
        raise ValueError(
            f"{op}: k {k.dtype} and v {v.dtype} must have the caches' dtypes {k_cache.dtype}, {v_cache.dtype}, without scales; "
            "or both caches be of int8 or float8_e4m3fn, with scales"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"{op}: caches must be contiguous [P, G, S, D]")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"{op}: slots must be [{k.shape[0]}], one per token; got {tuple(slots.shape)}")
    check_slots(op, slots, room_of_cache(k_cache))


def kv_cache_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the keys and values of T tokens to their places in a paged cache, in place.

    Args:
        k: [T, G, D], dense last dim.
        v: [T, G, D], dense last dim.
        k_cache: [P, G, S, D], written.
        v_cache: [P, G, S, D], written.
        slots: [T] int64, page * S + offset. A negative slot is skipped; on a GPU also a slot beyond the cache.
        k_scale: [P, G, S] float32, written if the caches contain codes; else None.
        v_scale: likewise.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit; on a CPU, a slot beyond the cache.
    """
    check_write("kv_cache_write", k, v, k_cache, v_cache, slots, k_scale, v_scale)
    kv_cache_write_op(tokens_ready(k), tokens_ready(v), k_cache, v_cache, slots, k_scale, v_scale)
