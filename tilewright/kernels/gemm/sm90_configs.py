"""The configs of the Hopper products (sm90_kernel.py): tile shapes, the choice of a tile, and the division of work (split-K).

Nothing is launched here; sm90.py does that.
"""

import torch

from tilewright.hw.device import Device
from tilewright.kernels.gemm.pad_operands import MOST_LEFT_OVER
from tilewright.kernels.gemm.problem import Problem
from tilewright.kernels.gemm.quantized_operands import float8_span
from tilewright.tune.space import Config, Space

__all__ = [
    "BLOCK_K_BYTES",
    "GROUP_M",
    "INVARIANT_SPACE",
    "SPACE",
    "consumer_tile",
    "epilogue_n",
    "evened",
    "left_over",
    "ring",
    "shares",
]

BLOCK_K_BYTES = 128
GROUP_M = 8
"""The number of tile rows that are processed in one tile column before the next column."""
_EPILOGUE_N = 64

# BLOCK_M, BLOCK_N, CONSUMERS
_TILES = (
    (128, 256, "m"),
    (256, 128, "m"),
    (128, 128, "m"),
    (128, 128, "tiles"),
    (64, 128, "n"),  # the estimate gives it as many cycles as the next one; it is up to 13 % faster with a long K
    (128, 64, "m"),
    (64, 64, "n"),
    (64, 256, "n"),
)
# Intermediate shapes. They fill the card in one wave where the shapes above need one and a half. _MOST_BETWEEN: up to how many
# rows they are used, by the bytes of an operand's element.
_BETWEEN = ((128, 192, "m"), (128, 96, "m"), (64, 32, "n"))
_MOST_BETWEEN = {1: 512, 2: 1024}


def _config(tile: tuple[int, int, str], split_k: int, unaligned: str) -> Config:
    block_m, block_n, consumers = tile
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "CONSUMERS": consumers, "SPLIT_K": split_k, "UNALIGNED": unaligned}


def _default(device: Device, problem: Problem, shared: bool = True) -> Config:
    """The tile, and with `shared` the split of K, with the least estimated time.

    The constants of `_cycles` are fitted to some 340 measured problems on an H100 (docs/log.md). Compared with the best config
    measured, this choice loses 0.7 % for plain 16-bit products, 1.5 % for those with an epilogue, 0.2 to 0.8 % for int8.
    """
    best, best_split, best_cycles = _TILES[0], 1, float("inf")
    # An unaligned x of many rows is read in classes of rows, which is 5 to 10 % faster than a copy. This works only with
    # consumers that each take half of the tile's rows ("m").
    by_class = not problem.aligned and problem.x_major == "k" and problem.m_bucket >= 2048
    for tile in _TILES + _BETWEEN:
        block_m, block_n, consumers = tile
        if _shape_refusal(problem, *tile) or _too_high(problem, block_m):
            continue
        if by_class and consumers != "m":
            continue
        many = _tiles(problem, 128, 128) > 35 * device.sms
        if tile in _BETWEEN and _tiles(problem, block_m, block_n) > device.sms and not (many and _in_spans(problem)):
            continue  # in one wave they are 10 to 15 % faster (docs/log.md), in several waves slower
        for split, cycles in _cycles(device, problem, tile, by_class).items():
            if cycles < best_cycles and (shared or split == 1):
                best, best_split, best_cycles = tile, split, cycles
    return _config(best, best_split, "classes" if by_class else "copy")


def _cycles(device: Device, problem: Problem, tile: tuple[int, int, str], by_class: bool) -> dict[int, float]:
    """SPLIT_K -> estimated cycles.

    The estimate counts waves of tiles. A wave lasts as long as its products or the loads of its operands from L2, whichever is
    longer, plus the epilogue.
    """
    block_m, block_n, consumers = tile
    turns, codes = consumers == "tiles", problem.dtype == torch.int8  # float8 keeps the constants of an earlier fit
    tiles, numbers = _tiles(problem, block_m, block_n), block_m * block_n
    waves, left = divmod(tiles, device.sms)
    rounds = waves + (left > 0)
    # Cycles for one index of K: to multiply one column of x and of the weight, or to load them from L2. The rates are measured,
    # not those of the data sheet. With 8-bit operands fewer programs load from L2 at the same time (`evened`).
    product = numbers * (1.02 if turns else 1.2) / 2048
    way = (block_m + block_n) * 2 / (52 if codes else 50)
    # After many waves programs are no longer in step, and share less in L2: int8 with consumers that alternate tiles reaches
    # 1430 T up to 32 waves, 1170 from 48 on.
    way *= (1.1 if rounds > 36 else 1.0) if turns else (1.03 if waves >= 4 else 1.0)
    whole = problem.k * max(product, way)
    if block_n == 192 and tiles > device.sms:
        whole *= 1.092  # the cost of partial sums (spans) that are added in float32
    if numbers == 32768:
        whole *= _beside(problem, tile, by_class)
    # A consumer loads the scales of its columns once for all of its rows.
    rows = block_m // (1 + (consumers == "m"))
    per_number = 0.21 * (problem.activation != "none") + 0.06 * problem.residual + codes * 10 / rows
    # `end`: the epilogue of a tile. With consumers that alternate tiles, only the epilogue of the last tile is visible, and one
    # consumer alone runs it; all others are hidden.
    end = 1800 + (1 + turns) * numbers * per_number / (1 + problem.gated)
    ways = {1: rounds * (whole + (360 if turns else end)) + (end if turns else 0)}
    if tile in _TILES and not turns and 2 * left <= device.sms and problem.k >= (4096 if waves else 16384):
        parts = min(4, device.sms // max(left, 1))
        # Less than one wave is split in two. Only the largest tiles, in 16 bits, are split in three: 256 x 5120 x 25600 in
        # 128x256 takes 132 us in three parts, 147 in two.
        threes = parts == 3 and numbers == 32768 and problem.dtype.itemsize == 2
        parts = parts if waves or threes else 2
        # The program that finishes a tile reads the partial sums of the others one after the other: 128 KB in 4200 cycles.
        shared = (9600 + 4200 * (parts - 1) * numbers / 32768) if waves else 22000
        crowd = min(1.02, device.sms / evened(tiles, device.sms)) if codes else 1.0
        ways[0 if waves or threes else 2] = crowd * (waves * (whole + end) + whole / parts) + shared
    if tile in _BETWEEN and problem.dtype.itemsize == 2:
        # Compared with 160 tiles of 128 columns at K 8192, of which a fifth are split: those are 6 and 11 % slower
        # (products-left.json).
        ways[1] *= 0.95
    return ways


def _beside(problem: Problem, tile: tuple[int, int, str], by_class: bool) -> float:
    """A factor that distinguishes the two largest tiles, which have the same number of products and bytes.

    The copy engine also takes time for rows of a box that lie beyond the weight: 4096 x 1800 x 4096, bf16, takes 102 us in
    128x256 (12 % of the columns are outside of y) and 90 us in 256x128 (6 %). Otherwise 256x128 is slower in 16 bits: by 1 %
    (the factor counts 0.3 %), or by 8 % if x is read in classes.
    """
    n = _whole_columns(problem, tile[1])
    columns = -(-n // tile[1]) * tile[1]
    slower = tile[0] == 256 and problem.dtype != torch.int8
    return (1 + 0.1 * (columns - n) / columns) * (1 + slower * (0.08 if by_class else 0.003))


def left_over(size: int, block: int) -> int:
    """The rows or columns beyond the last whole tile if they are few enough to be computed without a tile; otherwise 0."""
    return size % block if size > block and size % block <= MOST_LEFT_OVER else 0


def _tiles(problem: Problem, block_m: int, block_n: int) -> int:
    """The number of tiles for the bucket's rows. Columns that are computed without a tile are not counted."""
    return -(-problem.m_bucket // block_m) * -(-_whole_columns(problem, block_n) // block_n)


def _whole_columns(problem: Problem, block_n: int) -> int:
    """N without the columns that are computed without a tile."""
    return problem.n - (left_over(problem.n, block_n) if not problem.aligned and not problem.gated else 0)


def _in_spans(problem: Problem) -> bool:
    """Whether its sums are computed in spans. (`scaled_linear` passes half of its K, so K is doubled here.)"""
    return float8_span(problem.dtype, 2 * problem.k) > 0


def _too_high(problem: Problem, block_m: int) -> bool:
    return block_m > 64 and block_m >= 2 * problem.m_bucket


def consumer_tile(c: Config) -> tuple[int, int]:
    """(rows, columns) of the accumulator that one consumer holds in registers."""
    return c["BLOCK_M"] // (1 + (c["CONSUMERS"] == "m")), c["BLOCK_N"] // (1 + (c["CONSUMERS"] == "n"))


def epilogue_n(cols: int, itemsize: int = 2) -> int:
    """The number of columns that a consumer's epilogue stores at a time: rows of at most 128 bytes."""
    return min(_EPILOGUE_N, cols & -cols, 128 // itemsize)


def ring(device: Device, c: Config) -> tuple[int, int]:
    """(pipeline stages, epilogue buffers per consumer). As many stages as fit into shared memory, up to eight."""
    rows, cols = consumer_tile(c)
    buffers = 2 if c["CONSUMERS"] == "tiles" else 1
    staging = 2 * rows * epilogue_n(cols) * 2 * buffers
    stage = (c["BLOCK_M"] + c["BLOCK_N"]) * BLOCK_K_BYTES
    return min(8, (device.smem_bytes - staging - 1024) // stage), buffers


def _shape_refusal(problem: Problem, block_m: int, block_n: int, consumers: str) -> str | None:
    rows, cols = consumer_tile({"BLOCK_M": block_m, "BLOCK_N": block_n, "CONSUMERS": consumers})
    if block_n in (32, 96, 192):
        if (block_m, block_n, consumers) not in _BETWEEN:
            return "BLOCK_N 32, 96 and 192 are for the tiles 64x32, 128x96 and 128x192 only, which fit the warpgroups"
        most = _MOST_BETWEEN[problem.dtype.itemsize]
        if problem.gated or (problem.m_bucket > most and not _in_spans(problem)):
            return f"BLOCK_N 32, 96 and 192 are for at most {most} rows of x, without a gate"
        if problem.dtype.itemsize > 1 and (block_n != 192 or not problem.aligned or problem.w_major != "k"):
            return "with 16 bits, BLOCK_N 32 and 96 gain nothing, and 192 needs an aligned x and a weight contiguous along K"
        if block_n == 96 and _in_spans(problem):
            return "with float8 sums in spans, the tile 128x128 is 2 to 9 % faster than 128x96"
    if consumers == "tiles" and (block_m, block_n) != (128, 128):
        return "consumers alternate between tiles of 128x128 only: smaller ones end too soon, larger ones exceed the registers"
    if consumers == "m" and rows < 64:
        return "each consumer needs at least 64 rows, which the tensor cores multiply at once"
    if consumers == "n" and block_m != 64:
        return "the consumers split the columns only if BLOCK_M is 64; otherwise they split the rows"
    if max(block_m, block_n) > 2 * min(block_m, block_n) and not (problem.gated and block_m == 64):
        return "one side of the tile is at least four times the other: a squarer tile of its size loads less from L2"
    if rows * cols > 64 * 256:
        return "the accumulators need more registers than a thread has"
    if rows * cols > 64 * 192 and _in_spans(problem):
        return "float8 with a long K adds up partial sums of spans: the second set of accumulators does not fit in registers"
    if problem.gated and cols < 2 * _EPILOGUE_N:
        return "with a gate, a consumer's tile must be two epilogue blocks wide: one for the gate, one for the up half"
    return None


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    block_m, block_n, consumers = c["BLOCK_M"], c["BLOCK_N"], c["CONSUMERS"]
    if reason := _shape_refusal(problem, block_m, block_n, consumers):
        return reason
    if c["SPLIT_K"] != 1 and (consumers == "tiles" or (block_m, block_n, consumers) in _BETWEEN):
        return "SPLIT_K must be 1 if the consumers alternate between tiles, or if the tile is 64x32, 128x96 or 128x192"
    if c["SPLIT_K"] > 1 and c["SPLIT_K"] * _tiles(problem, block_m, block_n) > device.sms:
        # 3,152 such configs were measured on 338 problems on an H100. Only one was within 2 % of the best config.
        return "SPLIT_K times the number of tiles must not exceed the number of SMs"
    if _too_high(problem, block_m):
        return "BLOCK_M is at least twice the number of rows of x"
    if c["UNALIGNED"] == "classes" and (problem.aligned or problem.x_major != "k" or consumers != "m"):
        return "UNALIGNED=classes needs an unaligned x that is contiguous along K, and consumers that split the rows"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 192, 256),
        "CONSUMERS": ("m", "n", "tiles"),
        "SPLIT_K": (1, 0, 2, 4),
        "UNALIGNED": ("copy", "classes"),
    },
    refusal=_config_refusal,
)
"""SPLIT_K: the number of programs that share a tile along K. With 0 only the tiles of the last, incomplete wave are shared."""

INVARIANT_SPACE = Space(
    default=lambda device, problem: _default(device, problem._replace(aligned=True, x_major="k"), shared=False), axes={}
)
"""For aligned operands with x dense along K. With every tile shape, an element of y is one sum along K, which the warpgroup's
instructions accumulate in steps of 64. So the tile may depend on the number of rows, and the bits do not."""

# ---- pieces of work


def shares(tiles: int, steps: int, sms: int, split_k: int) -> tuple[int, int, int, int]:
    """Divide tiles among programs.

    Returns:
        The number of programs, the whole tiles per program, the steps of K in a program's share of the remaining tiles, and the
        largest number of programs that share one tile.
    """
    if split_k == 1:
        return min(tiles, sms), 0, 0, 1
    waves, left = (tiles // sms, tiles % sms) if split_k == 0 else (0, tiles)
    share = -(-steps // (split_k or max(1, min(4, sms // max(left, 1)))))
    programs = max(-(-left * steps // share), sms * (waves > 0))
    parts = max(((t * steps + steps - 1) // share - t * steps // share + 1 for t in range(left)), default=1)
    return programs, waves, share, parts


def evened(tiles: int, sms: int) -> int:
    """The fewest programs that need no more waves than one program per SM would: 128 (of 132 SMs) for 512 tiles.

    Each of them then gets more power and more L2 bandwidth. H100, 8-bit products of several waves, 22 shapes: 0.994 to 1.034
    times as fast, 1.011 on average; 15 products of 16 bits: 0.998.
    """
    return -(-tiles // -(-tiles // sms))
