"""`mla_attention` in portable Triton: the implementations `triton` and `invariant`, and the combination of split keys.

The rows of a program's tile are a block of heads of one or more queries of a sequence. It processes one of SPLITS equal ranges
of the keys that these queries see, measured in tiles. A tile of latents is loaded once, and is both the keys and the values.
The lengths are read on the device, so that one grid serves all lengths. With SPLITS > 1 each range stores its normalised
average and the logarithm of its sum, and a second kernel combines them in the order of the ranges: the bits are the same in
every run.

Limited by the bytes of the cache if queries x heads are few, else by the tensor cores. Refuses tiles that do not fit shared
memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention.mla.problem import Problem
from tilewright.kernels.attention.paged.configs import room_of
from tilewright.kernels.attention.paged.tile_mainloop import length_of, pages_of, sequence_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["INVARIANT", "TRITON", "combine_splits", "split_count"]

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 64
_NUMBERS = 2048  # per tile of parts: 64 per thread, or 128 with 64 ranges

# ---- kernels


@triton.jit
def _latents(cache_ptr, pages, start, stop, dims, S: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    """Columns `dims` (below WIDTH) of the cached rows start .. stop, zeros after them: [BLOCK_N, columns]."""
    keys = start + tl.arange(0, pages.shape[0])
    rows = (pages.to(tl.int64) * S + keys % S) * W
    mask = (keys < stop)[:, None] & (dims < WIDTH)[None, :]
    return tl.load(cache_ptr + rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["batch", "tokens", "pages", "room", "table_row_stride"])
def _mla_kernel(
    q_ptr, cache_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, o_ptr, part_ptr, lse_ptr,
    batch, tokens, pages, room, table_row_stride, scale_log2,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = R + E
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    # Late tiles see the most keys. They start first, so that no long tile is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, q_begin, q_len = sequence_of(tile, batch, cu_q_ptr, BLOCK_Q)
    q_first = (tile - (q_begin // BLOCK_Q + b)) * BLOCK_Q
    kv_len = length_of(kv_lens_ptr, b, True, room)
    if q_first >= q_len:
        return
    rows = tl.arange(0, BLOCK_M)
    queries = q_first + rows // HEADS
    heads = tl.program_id(1) * HEADS + rows % HEADS
    token = (q_begin + queries).to(tl.int64)
    live = (queries < q_len) & (heads < H) & (rows < BLOCK_Q * HEADS) & (token >= 0) & (token < tokens)
    places = token * H + heads
    latent_dims, turned_dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    in_rank = live[:, None] & (latent_dims < R)[None, :]
    q = tl.load(q_ptr + places[:, None] * W + latent_dims[None, :], mask=in_rank, other=0.0)
    in_turned = live[:, None] & (turned_dims < E)[None, :]
    q_turned = tl.load(q_ptr + R + places[:, None] * W + turned_dims[None, :], mask=in_turned, other=0.0)
    at = kv_len - q_len + queries
    last = tl.minimum(kv_len, kv_len - q_len + q_first + BLOCK_Q)
    span = tl.cdiv(tl.cdiv(last, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    first = tl.program_id(2) * span
    stop = tl.minimum(last, first + span)
    table_ptr += b.to(tl.int64) * table_row_stride
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(first, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        page = pages_of(table_ptr, start, stop, pages, S, BLOCK_N)
        latent = _latents(cache_ptr, page, start, stop, latent_dims, S, W, R)
        turned = _latents(cache_ptr + R, page, start, stop, turned_dims, S, W, E)
        s = dot(q, tl.trans(latent), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        s = dot(q_turned, tl.trans(turned), s) * scale_log2
        s = tl.where((keys < stop)[None, :] & (keys[None, :] <= at[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its weights exp2(-inf) = 0, not NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        acc = dot(p.to(q.dtype), latent, acc * alpha[:, None])
        m = m_new
    o = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    if not SPLIT:
        tl.store(o_ptr + places[:, None] * R + latent_dims[None, :], o.to(o_ptr.dtype.element_ty), mask=in_rank)
    else:
        parts = places * tl.num_programs(2) + tl.program_id(2)
        tl.store(part_ptr + parts[:, None] * R + latent_dims[None, :], o, mask=in_rank)
        tl.store(lse_ptr + parts, m + tl.log2(tl.where(l == 0.0, 1.0, l)), mask=live)


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine_kernel(
    part_ptr, scale_ptr, lse_ptr, o_ptr, rows, splits,
    R: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R columns of ROWS rows of the result, [R], from the parts of `splits` ranges of keys, at most MOST.

    With scales, the two halves of a part must be multiplied by them, and the columns are in the order that sm90_kernel.py
    writes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    dims = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.arange(0, MOST)
    at = row[:, None] * splits + i[None, :]
    mask = live[:, None] & (i < splits)[None, :]
    lse = tl.load(lse_ptr + at, mask=mask, other=float("-inf"))
    # Loaded before it is known whether a range has keys. The part of a range without keys may contain any bits, and is ignored.
    part = tl.load(part_ptr + at[:, :, None] * R + dims[None, None, :], mask=mask[:, :, None] & (dims < R)[None, None, :])
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + at * 2 + tl.program_id(1) * BLOCK_R // (R // 2), mask=mask, other=0.0)
    top = tl.max(lse, 1)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weight, 1)
    parts = tl.where((lse > float("-inf"))[:, :, None], part.to(tl.float32) * (weight * scale)[:, :, None], 0.0)
    out = tl.sum(parts, 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    if scale_ptr is not None:
        woven = tl.reshape(out, [ROWS, BLOCK_R // 16, 4, 2, 2])
        out = tl.reshape(tl.permute(woven, [0, 1, 3, 2, 4]), [ROWS, BLOCK_R])
    to = row[:, None] * R + dims[None, :]
    tl.store(o_ptr + to, out.to(o_ptr.dtype.element_ty), mask=live[:, None] & (dims < R)[None, :])


# ---- launchers


def combine_splits(part: Tensor, lse: Tensor, o: Tensor, scales: Tensor | None = None) -> None:
    """o [T, H, R] from part [T, H, SPLITS, R], normalised averages in float32, and lse [T, H, SPLITS] float32, base 2.

    With scales, float32 [T, H, SPLITS, 2], parts are float16, and each half of R must be multiplied by its scale. Of every 16
    columns, the column 8 i + 2 j + l of o (i, j, l below 2, 4, 2) is stored at 4 j + 2 i + l. A range whose lse is -inf had no
    keys; its part is ignored.
    """
    tokens, heads, splits = lse.shape
    rank = o.shape[2]
    # A program is one warp with one tile, all loaded at once: a warp waits only for its own numbers (docs/log.md).
    most, columns = next_pow2(splits), min(64, next_pow2(rank))
    rows = max(1, _NUMBERS // (most * columns))
    _combine_kernel[(ceil_div(tokens * heads, rows), ceil_div(rank, columns))](
        part, scales, lse, o, tokens * heads, splits, R=rank, MOST=most, ROWS=rows, BLOCK_R=columns, num_warps=1,
    )  # fmt: skip


def _launch(
    config: Config, q: Tensor, cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q_len: int, rank: int,
    scale: float,
) -> Tensor:  # fmt: skip
    (tokens, heads, width), page_size, batch = q.shape, cache.shape[1], kv_lens.shape[0]
    o = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
    if not tokens:
        return o
    splits, block_m = config["SPLITS"], config["BLOCK_M"]
    block_heads = min(block_m, next_pow2(heads))
    part, lse = o, o
    if splits > 1:
        part = torch.empty((tokens, heads, splits, rank), dtype=torch.float32, device=q.device)
        lse = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
    grid = (tokens // (block_m // block_heads) + batch, ceil_div(heads, block_heads), splits)
    _mla_kernel[grid](
        q, cache, block_table, kv_lens, cu_q, o, part, lse, batch, tokens, cache.shape[0], room_of(cache, block_table),
        block_table.stride(0), scale * _LOG2_E,
        H=heads, R=rank, E=width - rank, S=page_size, HEADS=block_heads, SPLIT=splits > 1,
        BLOCK_R=max(16, next_pow2(rank)), BLOCK_E=max(16, next_pow2(width - rank)),
        **{name: value for name, value in config.items() if name != "SPLITS"},
    )  # fmt: skip
    if splits > 1:
        combine_splits(part, lse, o)
    return o


# ---- spaces


def split_count(programs: int, wanted: int, keys: int, least: int) -> int:
    """The number of ranges, a power of two, into which the keys are split so that `programs` become about `wanted`.

    A range has at least `least` of the `keys`, because every range adds to the cost of combining.
    """
    splits = 1
    while splits < _MOST_SPLITS and programs * splits * 2 <= wanted and keys >= 2 * splits * least:
        splits *= 2
    return splits


def _smem_bytes(problem: Problem, config: Config) -> int:
    # Queries, latents of every stage, and the weights for the second product.
    width = max(16, next_pow2(problem.rank)) + max(16, next_pow2(problem.rotated))
    rows = config["BLOCK_M"] + config["num_stages"] * config["BLOCK_N"]
    return (rows * width + config["BLOCK_M"] * config["BLOCK_N"]) * problem.dtype.itemsize


def _tile(device: Device, problem: Problem) -> Config:
    """The largest tile that fits shared memory and the registers of 8 warps; 64 rows of 512 numbers spill."""
    for block_m, block_n, stages in ((32, 32, 2), (32, 16, 2), (16, 16, 2), (16, 16, 1)):
        config = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8 if block_m > 16 else 4, "num_stages": stages}
        if _smem_bytes(problem, config) <= device.smem_bytes:
            break
    return config


def _default(device: Device, problem: Problem) -> Config:
    config = _tile(device, problem)
    splits = 1
    if problem.queries:
        programs = problem.batch * -(-problem.heads // config["BLOCK_M"])
        splits = split_count(programs, 2 * max(device.sms, 1), problem.keys, 4 * config["BLOCK_N"])
    return {**config, "SPLITS": splits}


def _config_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    used = _smem_bytes(problem, config)
    # 64 accumulators per thread, besides the scores and the addresses of a tile of latents.
    if config["BLOCK_M"] * max(16, next_pow2(problem.rank)) > 64 * 32 * config["num_warps"]:
        return "the accumulators need more registers than a thread has"
    return f"needs {used} bytes of shared memory, more than the device has" if used > device.smem_bytes else None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (16, 32), "BLOCK_N": (16, 32), "SPLITS": (1, 2, 4, 8, 16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2),
    },
    refusal=_config_refusal,
)  # fmt: skip
# One tile for decode and prefill, and one pass over all keys: a row's bits do not depend on other rows in its tile.
_INVARIANT_SPACE = Space(default=lambda device, problem: {**_tile(device, problem), "SPLITS": 1}, axes={})

TRITON = Impl(name="triton", launch=_launch, space=SPACE)
INVARIANT = Impl(name="invariant", launch=_launch, space=_INVARIANT_SPACE, batch_invariant=True)
