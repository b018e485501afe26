"""Rotary position embedding of queries and keys in one launch (Su et al., "RoFormer", 2021), and the tables that it reads.

    pair i of a head, at position p:   (a, b) -> (a cos - b sin, b cos + a sin),   cos, sin = cos_sin[p, 0 | 1, i]

    The first R of D dimensions rotate; the rest is copied. A pair is (i, i + R/2), "rotate half", as Llama and Qwen store
    their weights, or (2i, 2i + 1) with `interleaved`, as in GPT-J and DeepSeek. The output keeps the layout of the input.
    q: [T, H, D] and k: [T, G, D] of bf16, fp16 or fp32; positions: [T] int64, below max_pos (not checked); cos_sin:
    [max_pos, 2, R/2] float32. Products and sums are float32, rounded once. `inverse` rotates in the other direction. The
    gradient of a rotation is the inverse rotation of the gradient (times the factor that a scaling put into cos_sin).

`rope_table` builds cos_sin for the scalings default, linear, dynamic, llama3, yarn and longrope. It uses the same float32
operations as modeling_rope_utils of transformers. dynamic and longrope depend on a length. transformers uses the length of the
current sequence, so the angle of a key changes while a text grows. Here it is the length of the table, so that a key in a cache
stays valid. Both agree if the table is no longer than the context that the model was first trained with; for longrope they also
agree on longer sequences.

Memory-bound: q and k in and out. A token's row of the table is read once per BLOCK_H heads.
Not supported: a gradient of cos_sin; tokens whose heads are not contiguous (the public function copies them first).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.rotary import rotated
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.elementwise.inputs import rope_arguments
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, token_stride, tokens_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["rope", "rope_frequencies", "rope_op", "rope_table"]

# ---- tables


def rope_frequencies(
    rotated: int, base: float, scaling: Mapping[str, Any] | None = None, positions: int | None = None
) -> tuple[Tensor, float]:
    """The angle per position of each pair, and the factor on cos and sin (of yarn and longrope; otherwise 1).

    Args:
        rotated: R, how many dimensions of a head rotate; even.
        base: rope_theta. A "rope_theta" inside `scaling` (transformers 5) takes precedence.
        scaling: a config's `rope_scaling` (transformers 4) or `rope_parameters` (5): "rope_type" or "type", and its numbers.
            None means "default". llama3, yarn, dynamic and longrope need "original_max_position_embeddings". If a config has
            none, transformers uses the config's max_position_embeddings; add that value to `scaling`.
        positions: the number of positions in the table. If it exceeds the original number, dynamic stretches the waves, and
            longrope uses its long factors. None: the original number.

    Returns:
        ([R/2] float32 on the CPU, factor).

    Raises:
        ValueError: an odd R, an unknown type, or a number that the type needs is missing.
    """
    if rotated < 2 or rotated % 2:
        raise ValueError(f"rope: the number of rotated dimensions must be even and positive, got {rotated}")
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _SCALINGS:
        raise ValueError(f"rope: scaling type {kind!r} is not one of {', '.join(_SCALINGS)}")
    builder, needed = _SCALINGS[kind]
    if missing := [name for name in needed if scaling.get(name) is None]:
        raise ValueError(f"rope: scaling {kind!r} needs {', '.join(missing)}; got {dict(scaling)}")
    if positions is not None:
        scaling = {**scaling, "positions": positions}
    return builder(rotated, float(scaling.get("rope_theta") or base), scaling)


def rope_table(
    rotated: int,
    max_pos: int,
    base: float,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """cos and sin for every position below max_pos: [max_pos, 2, R/2] float32. Arguments and errors of `rope_frequencies`.

    It is always computed on the CPU, so that the tables of two machines have the same bits.
    """
    frequencies, factor = rope_frequencies(rotated, base, scaling, max_pos)
    angles = torch.arange(max_pos, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1).to(device)


def _wavenumbers(rotated: int, base: float) -> Tensor:
    return base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


def _default_scaling(rotated: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _wavenumbers(rotated, base), 1.0


def _linear_scaling(rotated: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _wavenumbers(rotated, base) / scaling["factor"], 1.0


def _llama3_scaling(rotated: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Stretch long waves by `factor`, keep short ones, interpolate in between (source: code of the Llama 3.1 model card)."""
    frequencies = 1.0 / _wavenumbers(rotated, base)
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > context / low, frequencies / factor, frequencies)
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn_scaling(rotated: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Peng et al., "YaRN", 2023: keeps dimensions that rotate often, stretches those that rotate rarely, a ramp in between."""
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension_turning(turns: float) -> float:
        return rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_turning(scaling.get("beta_fast") or 32), dimension_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rotated // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    waves = _wavenumbers(rotated, base)
    return 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _dynamic_scaling(rotated: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """NTK-aware scaling: the base grows with the length. The longest wave is stretched most; the shortest is unchanged."""
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    longer = max(scaling.get("positions") or context, context) / context
    if longer > 1.0:
        if rotated < 4:
            raise ValueError(f"rope: scaling 'dynamic' of a longer table needs 4 rotated dimensions at least, got {rotated}")
        base = base * (factor * longer - (factor - 1)) ** (rotated / (rotated - 2))
    return 1.0 / _wavenumbers(rotated, base), 1.0


def _long_scaling(rotated: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Ding et al., "LongRoPE", 2024: one factor per pair, found by search; one set for short contexts, one for long ones."""
    context = scaling["original_max_position_embeddings"]
    name = "long_factor" if (scaling.get("positions") or context) > context else "short_factor"
    factors = torch.tensor(scaling[name], dtype=torch.float32)
    if factors.shape != (rotated // 2,):
        raise ValueError(f"rope: {name} must have {rotated // 2} numbers, one for each pair; got {list(factors.shape)}")
    attention, factor = scaling.get("attention_factor"), scaling["factor"]
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 and context > 1 else 1.0
    return 1.0 / (factors * _wavenumbers(rotated, base)), float(attention)


_SCALINGS = {
    "default": (_default_scaling, ()),
    "linear": (_linear_scaling, ("factor",)),
    "dynamic": (_dynamic_scaling, ("factor", "original_max_position_embeddings")),
    "llama3": (_llama3_scaling, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": (_yarn_scaling, ("factor", "original_max_position_embeddings")),
    "longrope": (_long_scaling, ("factor", "short_factor", "long_factor", "original_max_position_embeddings")),
}

# ---- reference


def _reference(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)
    sin = -sin if inverse else sin
    wide = torch.promote_types(q.dtype, torch.float32)
    q_turned, k_turned = (rotated(t.to(wide), cos, sin, interleaved).to(t.dtype) for t in (q, k))
    return q_turned, k_turned


def _cost(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool = False) -> Cost:
    table_bytes = positions.numel() * cos_sin.shape[-1] * 2 * cos_sin.element_size()
    return Cost(flops=3 * (q.numel() + k.numel()), bytes=2 * (q.nbytes + k.nbytes) + positions.nbytes + table_bytes)


# ---- space and examples


class Problem(NamedTuple):
    """The sizes that a model fixes. The number of tokens is not part of it."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int


def _default(device: Device, problem: Problem) -> Config:
    # A thread holds 16 bytes of each half of a head, for so many heads that 64 to 128 bytes of loads are in flight.
    lanes = 16 // problem.dtype.itemsize
    return {
        "BLOCK_T": max(1, 128 * lanes // next_pow2(problem.rotated // 2)),
        "BLOCK_H": min(4, next_pow2(problem.kv_heads)),
        "num_warps": 4,
    }


SPACE = Space(
    default=_default,
    axes={"BLOCK_T": (1, 2, 4, 8, 16, 32, 64), "BLOCK_H": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8)},
    refusal=lambda device, problem, c: (
        "tile over 4096 pairs"
        if c["BLOCK_T"] * next_pow2(problem.rotated // 2) > 4096
        else "more heads than q has"
        if c["BLOCK_H"] >= 2 * problem.heads
        else None
    ),
)


@Example.of
def _example(
    inputs: Inputs,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    merged: bool = False,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool, bool]:
    table = rope_table(rotated or head_dim, 97, 10000.0, None, inputs.device)
    positions = inputs.randint(0, 97, tokens)
    if merged:
        both = inputs.randn(tokens, (heads + 2 * kv_heads), head_dim, dtype=dtype)
        return both[:, :heads], both[:, heads : heads + kv_heads], positions, table, interleaved, inverse
    q, k = (inputs.randn(tokens, n, head_dim, dtype=dtype) for n in (heads, kv_heads))
    return q, k, positions, table, interleaved, inverse


EXAMPLES = (
    _example("merged", 5, 4, 2, 64, merged=True),
    _example("partial", 3, 3, 1, 80, rotated=32),
    _example("interleaved", 17, 2, 2, 64, interleaved=True, dtype=torch.float16),
    _example("interleaved partial", 2, 1, 1, 48, rotated=24, interleaved=True, dtype=torch.float32),
    _example("one", 1, 1, 1, 2, dtype=torch.float32),
    _example("uneven heads", 2, 7, 3, 24),
    _example("inverse", 5, 4, 2, 64, inverse=True),
    _example("inverse interleaved", 3, 3, 1, 80, rotated=32, interleaved=True, inverse=True, dtype=torch.float32),
)

# ---- kernel


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, x_rows, y_rows, first, live, cos, sin,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate the BLOCK_H heads from `first` on, for a block of tokens. The loads of different heads overlap."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    wide = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    for i in tl.static_range(BLOCK_H):
        head = first + i
        mask = live & (head < HEADS)
        x_head, y_head = x_rows + head * D, y_rows + head * D
        if INTERLEAVED:
            in_head = mask & (wide < 2 * HALF)
            x = tl.load(x_ptr + x_head + wide, mask=in_head, other=0.0)
            a, b = tl.split(x.to(tl.float32).reshape(x.shape[0], BLOCK_HALF, 2))
            y = tl.join(a * cos - b * sin, b * cos + a * sin).reshape(x.shape[0], 2 * BLOCK_HALF)
            tl.store(y_ptr + y_head + wide, y.to(y_ptr.dtype.element_ty), mask=in_head)
        else:
            in_head = mask & (pair < HALF)
            a = tl.load(x_ptr + x_head + pair, mask=in_head, other=0.0).to(tl.float32)
            b = tl.load(x_ptr + x_head + HALF + pair, mask=in_head, other=0.0).to(tl.float32)
            tl.store(y_ptr + y_head + pair, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=in_head)
            tl.store(y_ptr + y_head + HALF + pair, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=in_head)
        if 2 * HALF < D:
            in_head = mask & (rest < D)
            tl.store(y_ptr + y_head + rest, tl.load(x_ptr + x_head + rest, mask=in_head, other=0.0), mask=in_head)


@triton.jit(do_not_specialize=["n_tokens", "q_row_stride", "k_row_stride"], do_not_specialize_on_alignment=["positions_ptr"])
def _rope_kernel(
    q_ptr, k_ptr, positions_ptr, cos_sin_ptr, q_out_ptr, k_out_ptr,
    n_tokens, q_row_stride, k_row_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    Q_TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    TILES: tl.constexpr = Q_TILES + (G + BLOCK_H - 1) // BLOCK_H
    tile = tl.program_id(0) % TILES
    tokens = (tl.program_id(0) // TILES) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tokens < n_tokens
    position = tl.load(positions_ptr + tokens, mask=live, other=0).to(tl.int64)
    tokens, live = tokens.to(tl.int64)[:, None], live[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    angle_ptrs = cos_sin_ptr + position[:, None] * (2 * HALF) + pair
    in_table = live & (pair < HALF)
    cos = tl.load(angle_ptrs, mask=in_table, other=0.0)
    sin = tl.load(angle_ptrs + HALF, mask=in_table, other=0.0)
    if INVERSE:
        sin = -sin
    if tile < Q_TILES:
        _rotate_heads(
            q_ptr, q_out_ptr, row_start(tokens, q_row_stride, D), tokens * (H * D), tile * BLOCK_H, live, cos, sin,
            H, D, HALF, INTERLEAVED, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_ptr, k_out_ptr, row_start(tokens, k_row_stride, D), tokens * (G * D), (tile - Q_TILES) * BLOCK_H, live, cos, sin,
            G, D, HALF, INTERLEAVED, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def _launch(
    config: Config, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    tokens, heads, head_dim = q.shape
    kv_heads, half, block_h = k.shape[1], cos_sin.shape[2], config["BLOCK_H"]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tiles = ceil_div(heads, block_h) + ceil_div(kv_heads, block_h)
    if tokens:
        constants = {
            "H": heads, "G": kv_heads, "D": head_dim, "HALF": half, "INTERLEAVED": interleaved, "INVERSE": inverse,
            "BLOCK_HALF": next_pow2(half), "BLOCK_REST": next_pow2(head_dim - 2 * half), **config,
        }  # fmt: skip
        launch(
            _rope_kernel, (ceil_div(tokens, config["BLOCK_T"]) * tiles,), (q, k, positions, cos_sin, q_out, k_out),
            (tokens, token_stride(q), token_stride(k)), constants,
        )  # fmt: skip
    return q_out, k_out


rope_op = Op(
    name="rope",
    reference=_reference,
    problem=lambda q, k, positions, cos_sin, *_: Problem(q.dtype, q.shape[1], k.shape[1], q.shape[2], 2 * cos_sin.shape[2]),
    cost=_cost,
    examples=EXAMPLES,
    make=rope_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


# ---- public function


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, without gradients. `ops.rope` describes the arguments."""
    if q.dim() != 3 or k.dim() != 3 or k.shape[::2] != q.shape[::2] or k.dtype != q.dtype:
        raise ValueError(
            f"rope: q must be [T, H, D] and k [T, G, D] of one dtype; got {tuple(q.shape)} {q.dtype}, "
            f"{tuple(k.shape)} {k.dtype}"
        )
    if positions.shape != q.shape[:1]:
        raise ValueError(f"rope: positions must be [{q.shape[0]}], one per token of q; got {tuple(positions.shape)}")
    if cos_sin.dim() != 3 or cos_sin.shape[1] != 2 or 2 * cos_sin.shape[2] > q.shape[2] or not cos_sin.is_contiguous():
        raise ValueError(
            f"rope: cos_sin must be contiguous [max_pos, 2, R/2] with R <= {q.shape[2]}; got {tuple(cos_sin.shape)}"
        )
    return rope_op(_heads_ready(q), _heads_ready(k), positions, cos_sin, interleaved, inverse)


def _heads_ready(x: Tensor) -> Tensor:
    """x itself if the heads of a token are contiguous and tokens are aligned as kernels require; else a contiguous copy."""
    return tokens_ready(x) if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
