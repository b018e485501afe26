"""Sampling one token per row: temperature, top-k, top-p, min-p, and Gumbel-max, with no sort and no random state.

    id[b] = argmax over the kept tokens t of  logits[b, t] / temperature[b] + Gumbel(seed[b], position[b], t)

which draws from softmax(logits / temperature) over the kept tokens (Gumbel, 1954); device/philox.py defines the noise. Kept are

    top-k   logits not below the k-th largest                                                   k = 0: all
    top-p   tokens whose strictly likelier tokens have less than p of the mass that top-k left  p = 1: all
    min-p   tokens at least min_p times as likely as the likeliest                              0: all

All tokens that tie at a threshold are kept, and the likeliest token always is. A temperature below 1e-5 is greedy: the largest
logit, the lowest id among equals, whatever the other parameters. A NaN logit counts as -inf, a +inf one as the largest float. A
-inf logit is never drawn; a row that contains only -inf gives id 0. The noise depends only on seed, position and token, and the
result of a row only on that row.

Two launches. `_scan_kernel` has one program per tile of 4096 logits, so that one row of a large vocabulary uses the whole GPU.
It leaves only a maximum over tiles for plain and greedy rows. For filtered rows it computes the mass of each tile and the
largest logit of each group of 64 tokens. `_finish_kernel` has one program per row. From the maxima of the groups, in registers,
it finds the groups that can contain a kept token: k groups whose maxima are above x prove that no logit up to x is in the top
k, and the mass gives a similar proof. With usual settings a handful of groups remain, and only those are read again. It then
draws by rejection: it takes the best token above a floor. If that token is kept, it is the answer, because all kept tokens were
candidates. If not, no token up to its logit is kept, so its logit is the new floor.

Greedy rows are limited by bytes (one read), other rows by arithmetic (about 35 instructions per token). Float sums decide
top-p: if the mass of the likelier tokens is within rounding (1e-6) of p, another machine may decide differently, and likewise
if two scores agree to 1e-6. Not supported: penalties and biases (they change the logits, before).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.philox import LANES, gumbel, gumbel_reference
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.row_space import Rows, row_problem
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of, rows_ready
from tilewright.kernels.sampling.inputs import sample_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["sample", "sample_op"]

_GREEDY_BELOW = 1e-5
_LARGEST = torch.finfo(torch.float32).max


def _reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    x = logits.to(wide).nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    greedy = ~(temperature >= _GREEDY_BELOW)
    ids = x.argmax(-1)
    if bool(greedy.all()):
        return ids
    scale = (1 / torch.where(greedy, 1, temperature)).to(wide)[:, None]
    kept = _kept(x, scale, top_k, top_p, min_p)
    score = x * scale + gumbel_reference(seed, position, x.shape[1], wide)
    return torch.where(greedy, ids, score.masked_fill(~kept, -torch.inf).argmax(-1))


def _kept(x: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The mask of tokens that the filters keep, for logits x [B, V]; scale [B, 1] is 1 / temperature."""
    vocab = x.shape[1]
    likeliness = (x - x.amax(-1, keepdim=True)) * scale
    kept = likeliness >= torch.where(min_p > 0, min_p, 0).clamp_max(1).to(x.dtype).log()[:, None]
    with_k, with_p = (top_k > 0) & (top_k < vocab), top_p < 1
    if bool((with_k | with_p).any()):
        ordered, order = x.sort(-1, descending=True)
        k = torch.where(with_k, top_k, vocab).long()[:, None]
        in_top_k = ordered >= ordered.gather(1, k - 1)
        mass = likeliness.gather(1, order).exp() * in_top_k
        likelier = mass.cumsum(-1) - mass
        p = torch.where(with_p, top_p, torch.inf).to(x.dtype)[:, None]
        count = (in_top_k & (likelier < p * mass.sum(-1, keepdim=True))).sum(-1, keepdim=True)
        kept &= x >= ordered.gather(1, count.clamp_min(1) - 1)
    return kept


def _cost(logits: Tensor, *_: Any) -> Cost:
    return Cost(flops=10 * logits.numel(), bytes=logits.nbytes + logits.shape[0] * (4 * 4 + 3 * 8))


# ---- space and examples


SPACE = Space(
    default=lambda device, problem: {"SCAN_WARPS": 8, "FINISH_WARPS": 8},
    axes={"SCAN_WARPS": (4, 8, 16), "FINISH_WARPS": (4, 8, 16)},
)

_ROWS = (
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.3, 5, 1.0, 0.0),
    (0.8, 0, 0.7, 0.0),
    (2.0, 0, 1.0, 0.1),
    (1.0, 40, 0.9, 0.05),
    (0.5, 10**6, 0.5, 0.0),
)


@Example.of
def _example(
    inputs: Inputs, rows: tuple[int, ...], vocab: int, spread: float, dtype: torch.dtype, row_stride: int = 0
) -> tuple[Tensor, ...]:
    logits = inputs.randn(len(rows), row_stride or vocab, dtype=dtype, scale=spread)[:, :vocab]
    temperature, top_k, top_p, min_p = zip(*(_ROWS[r] for r in rows), strict=True)
    return (
        logits,
        inputs.tensor(temperature, torch.float32),
        inputs.tensor(top_k, torch.int32),
        inputs.tensor(top_p, torch.float32),
        inputs.tensor(min_p, torch.float32),
        inputs.randint(-(2**62), 2**62, len(rows)),
        inputs.randint(0, 2**20, len(rows)),
    )


EXAMPLES = (
    _example("plain", (0, 1), 300, 3.0, torch.float32),
    _example("filters", (2, 4, 6), 1000, 3.0, torch.float32),
    _example("flat", (3, 5, 7), 300, 0.3, torch.bfloat16, row_stride=320),
    _example("two tiles", (1, 2), 5003, 4.0, torch.float16),
    _example("one", (2,), 1, 1.0, torch.float32),
)

# ---- kernels

_LANES = tl.constexpr(LANES)
_NEVER = tl.constexpr(2**31 - 1)
_INF_BITS = tl.constexpr(-(2**23))  # -inf as an int32
_INF_KEY = tl.constexpr(-(2**31) + 2**23 - 1)  # _key(-inf)


@triton.jit
def _key(x):
    """An int32 that has the same order as the floats x; -0.0 equals 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(row_ptr, token, live, V: tl.constexpr):
    """Logits as float32. NaN and masked elements become -inf, and +inf becomes the largest float."""
    x = tl.load(row_ptr + token, mask=live & (token < V), other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), 3.4028234663852886e38)


@triton.jit
def _load_four(row_ptr, counter, live, V: tl.constexpr, WIDTH: tl.constexpr):
    """The logits of the four tokens of each counter, and the first of these tokens. Counters come in runs of WIDTH."""
    token = (counter // _LANES) * (4 * _LANES) + counter % _LANES
    token = tl.max_contiguous(tl.multiple_of(token, WIDTH), WIDTH)
    x0, x1 = _load(row_ptr, token, live, V), _load(row_ptr, token + _LANES, live, V)
    x2, x3 = _load(row_ptr, token + 2 * _LANES, live, V), _load(row_ptr, token + 3 * _LANES, live, V)
    return (x0, x1, x2, x3), token


@triton.jit
def _settings(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V: tl.constexpr):
    """(1 / temperature, or 0 for greedy; k; p; log(min_p); whether any is on). Off is k = V, p = inf, log(min_p) = -inf."""
    temperature = tl.load(temperature_ptr + row)
    scale = tl.where(temperature >= 1e-5, tl.div_rn(1.0, tl.maximum(temperature, 1e-5)), 0.0)
    k = tl.load(top_k_ptr + row)
    k = tl.where((k > 0) & (k < V), k, V)
    p = tl.load(top_p_ptr + row)
    p = tl.where(p < 1.0, p, float("inf"))
    min_p = tl.load(min_p_ptr + row)
    log_min_p = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, tl.minimum(min_p, 1.0), 1.0)), float("-inf"))
    return scale, k, p, log_min_p, (scale > 0.0) & ((k < V) | (p < 1.0) | (min_p > 0.0))


_ROW_POINTERS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr"]


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=_ROW_POINTERS)
def _scan_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, work_ptr, row_stride,
    V: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    PER_TILE: tl.constexpr = _LANES // WIDTH
    row, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    work_ptr += row * (2 * TILES * (1 + PER_TILE)) + tile
    scale, _k, _p, _log_min_p, filtered = _settings(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    counter = tile * _LANES + tl.arange(0, _LANES)
    x, token = _load_four(logits_ptr + row_start(row, row_stride, V), counter, counter >= 0, V, _LANES)
    if filtered:
        group_max = tl.max(tl.maximum(tl.maximum(x[0], x[1]), tl.maximum(x[2], x[3])).reshape(PER_TILE, WIDTH), axis=1)
        group = 2 * TILES + tile * (PER_TILE - 1) + tl.arange(0, PER_TILE)
        tl.store(work_ptr + group, group_max.to(tl.int32, bitcast=True))
        tile_max = tl.max(group_max, axis=0)
        base = tl.where(tile_max == float("-inf"), 0.0, tile_max)
        mass = tl.zeros([_LANES], tl.float32)
        for w in tl.static_range(4):
            mass += tl.exp2((x[w] - base) * (scale * 1.4426950408889634))
        tl.store(work_ptr, tile_max.to(tl.int32, bitcast=True))
        tl.store(work_ptr + TILES, tl.sum(mass, axis=0).to(tl.int32, bitcast=True))
    else:
        if scale > 0.0:
            noise = gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), counter)
            x = (x[0] * scale + noise[0], x[1] * scale + noise[1], x[2] * scale + noise[2], x[3] * scale + noise[3])
        score, at = x[0], token
        for w in tl.static_range(1, 4):
            at = tl.where(x[w] > score, token + w * _LANES, at)
            score = tl.maximum(score, x[w])
        top = tl.max(score, axis=0)
        tl.store(work_ptr, top.to(tl.int32, bitcast=True))
        tl.store(work_ptr + TILES, tl.min(tl.where(score == top, at, _NEVER), axis=0))


@triton.jit
def _load_listed(row_ptr, list_ptr, block, n_listed, V: tl.constexpr, WIDTH: tl.constexpr):
    """Load block `block` of the listed groups: logits, first tokens and counters."""
    lane = block * _LANES + tl.arange(0, _LANES)
    live = lane // WIDTH < n_listed
    counter = tl.load(list_ptr + lane // WIDTH, mask=live, other=0) * WIDTH + lane % WIDTH
    x, token = _load_four(row_ptr, counter, live, V, WIDTH)
    return x, token, counter


@triton.jit
def _above(row_ptr, list_ptr, n_listed, key, row_max, scale, V: tl.constexpr, WIDTH: tl.constexpr):
    """The number of listed tokens whose key is above `key`, and their mass relative to the largest logit."""
    count, mass = tl.zeros([_LANES], tl.int32), tl.zeros([_LANES], tl.float32)
    for block in range(tl.cdiv(n_listed * WIDTH, _LANES)):
        x, _token, _counter = _load_listed(row_ptr, list_ptr, block, n_listed, V, WIDTH)
        for w in tl.static_range(4):
            above = _key(x[w]) > key
            count += above.to(tl.int32)
            mass += tl.where(above, tl.exp2((x[w] - row_max) * (scale * 1.4426950408889634)), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _draw(row_ptr, list_ptr, n_listed, floor, row_max, scale, log_min_p, seed, position, V: tl.constexpr, WIDTH: tl.constexpr):
    """The listed token with the best score among those with a key of at least `floor` that pass min-p."""
    best, at = tl.full([_LANES], float("-inf"), tl.float32), tl.full([_LANES], _NEVER, tl.int32)
    for block in range(tl.cdiv(n_listed * WIDTH, _LANES)):
        x, token, counter = _load_listed(row_ptr, list_ptr, block, n_listed, V, WIDTH)
        noise = gumbel(seed, position, counter)
        for w in tl.static_range(4):
            kept = (_key(x[w]) >= floor) & ((x[w] - row_max) * scale >= log_min_p)
            score = tl.where(kept, x[w] * scale + noise[w], float("-inf"))
            # Across blocks, the tokens of a counter are not in the order of ids, so equal scores are compared by id.
            better = (score > best) | (kept & (score == best) & (token + w * _LANES < at))
            best, at = tl.where(better, score, best), tl.where(better, token + w * _LANES, at)
    return tl.min(tl.where(best == tl.max(best, axis=0), at, _NEVER), axis=0)


@triton.jit
def _list_groups(
    group_ptr, list_ptr, row_max, total, scale, k, p, log_min_p,
    V: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List the groups that can contain a kept token, or mass of the top k. -> (their number, a key below all kept keys)"""
    group = tl.arange(0, BLOCK_G)
    top = tl.load(group_ptr + group, mask=group < GROUPS, other=_INF_BITS).to(tl.float32, bitcast=True)
    key, mass = _key(top), tl.exp2((top - row_max) * (scale * 1.4426950408889634))
    # With both k and p, the mass is relative to that of the top k, so only the count can exclude a group.
    both = (k < V) & (p < 1.0)
    # The bound is on a float32 sum. It is slightly more than p, so that rounding cannot exclude a group wrongly.
    bound = tl.where(both, float("inf"), p * total * 1.0001)
    live = ((top - row_max) * scale >= log_min_p) | both
    low, high = tl.full((), _INF_KEY, tl.int32), _key(row_max)
    n_live = tl.sum((live & (key > low)).to(tl.int32), axis=0)
    middle = (low & high) + ((low ^ high) >> 1)
    while (middle > low) & (n_live * WIDTH > _LANES):
        above = key > middle
        proven = (tl.sum(above.to(tl.int32), axis=0) >= k) | (tl.sum(tl.where(above, mass, 0.0), axis=0) >= bound)
        low, high = tl.where(proven, middle, low), tl.where(proven, high, middle)
        n_live = tl.sum((live & (key > low)).to(tl.int32), axis=0)
        middle = (low & high) + ((low ^ high) >> 1)
    listed = live & (key > low)
    tl.store(list_ptr + tl.cumsum(listed.to(tl.int32), axis=0) - 1, group, mask=listed)
    # Other threads of this program read the list.
    tl.debug_barrier()
    return n_live, low


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=_ROW_POINTERS)
def _finish_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, work_ptr, ids_ptr, row_stride,
    V: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TILES: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = TILES * (_LANES // WIDTH)
    row = tl.program_id(0).to(tl.int64)
    work_ptr += row * (2 * (TILES + GROUPS))
    group_ptr, list_ptr = work_ptr + 2 * TILES, work_ptr + 2 * TILES + GROUPS
    scale, k, p, log_min_p, filtered = _settings(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, V)
    tile = tl.arange(0, BLOCK_TILES)
    first = tl.load(work_ptr + tile, mask=tile < TILES, other=_INF_BITS).to(tl.float32, bitcast=True)
    second = tl.load(work_ptr + TILES + tile, mask=tile < TILES, other=_NEVER)
    row_max = tl.max(first, axis=0)
    token = tl.min(tl.where(first == row_max, second, _NEVER), axis=0)
    if filtered & (row_max == float("-inf")):
        token = 0
    elif filtered:
        mass = tl.where(tile < TILES, second, 0).to(tl.float32, bitcast=True)
        total = tl.sum(mass * tl.exp2((first - row_max) * (scale * 1.4426950408889634)), axis=0)
        n_listed, low = _list_groups(group_ptr, list_ptr, row_max, total, scale, k, p, log_min_p, V, GROUPS, BLOCK_G, WIDTH)
        row_ptr = logits_ptr + row_start(row, row_stride, V)
        top = _key(row_max)
        if (k < V) & (p < 1.0):
            # Search for the k-th largest key: fewer than k keys are above `high`, at least k are above `low` (or it is -inf).
            high = top
            middle = (low & high) + ((low ^ high) >> 1)
            while middle > low:
                count, _mass = _above(row_ptr, list_ptr, n_listed, middle, row_max, scale, V, WIDTH)
                low = tl.where(count >= k, middle, low)
                high = tl.where(count < k, middle, tl.where(count == k, middle + 1, high))
                middle = (low & high) + ((low ^ high) >> 1)
            _count, total = _above(row_ptr, list_ptr, n_listed, low, row_max, scale, V, WIDTH)
        floor = low + 1
        done = False
        while not done:
            token = _draw(
                row_ptr, list_ptr, n_listed, floor, row_max, scale, log_min_p,
                tl.load(seed_ptr + row), tl.load(position_ptr + row), V, WIDTH,
            )  # fmt: skip
            key = _key(_load(row_ptr, token, True, V))
            count, mass_above = _above(row_ptr, list_ptr, n_listed, key, row_max, scale, V, WIDTH)
            done = ((count < k) & (mass_above < p * total)) | (key >= top)
            floor = key + 1
    tl.store(ids_ptr + row, token.to(tl.int64))


def _launch(
    config: Config,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    rows, vocab = logits.shape
    tiles = ceil_div(vocab, 4 * LANES)
    # At most 4096 groups, which fit one program's registers; up to a vocabulary of 262144 a group has 64 tokens.
    width = max(16, next_pow2(ceil_div(tiles * LANES, 4096)))
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    # Per row: score and token, or largest logit and mass, of each tile; the largest logit of each group; a list of groups.
    work = torch.empty(rows, 2 * tiles * (1 + LANES // width), dtype=torch.int32, device=logits.device)
    settings = (temperature, top_k, top_p, min_p, seed, position)
    constants = {"V": vocab, "TILES": tiles, "WIDTH": width}
    if rows:
        stride = rows_of(logits)[1]
        _scan_kernel[(rows * tiles,)](logits, *settings, work, stride, **constants, num_warps=config["SCAN_WARPS"])
        _finish_kernel[(rows,)](
            logits, *settings, work, ids, stride, **constants, BLOCK_TILES=next_pow2(tiles),
            # Without the limit, ptxas aims at 80 registers and spills.
            BLOCK_G=next_pow2(tiles * (LANES // width)), num_warps=config["FINISH_WARPS"], maxnreg=128,
        )  # fmt: skip
    return ids


def _refuse(device: Device, problem: Rows) -> str | None:
    return "supports a vocabulary of up to 2^22 only" if problem.cols > 1 << 22 else None


sample_op = Op(
    name="sample",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=sample_arguments,
    fake=lambda logits, *_: torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device),
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True, refuse=_refuse),),
)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """Draw one token per row; see the top of this file for the filters and for ties.

    Args:
        logits: [B, V], bf16, fp16 or fp32; rows may be strided.
        temperature: [B] float32; below 1e-5 is greedy.
        top_k: [B] int32; 0 is off.
        top_p: [B] float32; 1 is off.
        min_p: [B] float32; 0 is off.
        seed: [B] int64.
        position: [B] int64, the position of the drawn token, so that each step of a sequence has its own noise.

    Returns:
        [B] int64.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"sample: logits must be floats [B, V] with V > 0, got {tuple(logits.shape)} {logits.dtype}")
    wanted = {
        "temperature": (temperature, torch.float32),
        "top_k": (top_k, torch.int32),
        "top_p": (top_p, torch.float32),
        "min_p": (min_p, torch.float32),
        "seed": (seed, torch.int64),
        "position": (position, torch.int64),
    }
    for name, (value, dtype) in wanted.items():
        if value.shape != logits.shape[:1] or value.dtype != dtype or not value.is_contiguous():
            raise ValueError(
                f"sample: {name} must be contiguous [{logits.shape[0]}] {dtype}, one per row of logits; "
                f"got {tuple(value.shape)} {value.dtype}"
            )
    return sample_op(rows_ready(logits), temperature, top_k, top_p, min_p, seed, position)
