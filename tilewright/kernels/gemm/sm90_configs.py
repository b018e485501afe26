"""The configs of the Hopper products (sm90_kernel.py): tiles, which of them a problem takes, how work is cut into pieces.

Nothing here launches; sm90.py does.
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
"""Rows of tiles that are walked down before the next column."""
_EPILOGUE_N = 64

# BLOCK_M, BLOCK_N, CONSUMERS
_TILES = (
    (128, 256, "m"),
    (256, 128, "m"),
    (128, 128, "m"),
    (128, 128, "tiles"),
    (64, 128, "n"),  # of as many cycles by the estimate as the next one, and up to 13 % faster at long K
    (128, 64, "m"),
    (64, 64, "n"),
    (64, 256, "n"),
)
# Shapes between the others, which fill the card in one wave where those take one and a half; for up to so many rows.
_BETWEEN = ((128, 192, "m"), (128, 96, "m"), (64, 32, "n"))
_MOST_BETWEEN = {1: 512, 2: 1024}


def _config(tile: tuple[int, int, str], split_k: int, unaligned: str) -> Config:
    block_m, block_n, consumers = tile
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "CONSUMERS": consumers, "SPLIT_K": split_k, "UNALIGNED": unaligned}


def _default(device: Device, problem: Problem, shared: bool = True) -> Config:
    """The tile with the least estimated time; `shared`: or of a program's share of it.

    The constants of `_cycles` fit some 340 measured problems on an H100 (docs/log.md). Beside the best config measured the
    choice costs 0.7 % of plain products of 16 bits, 1.5 % of those with an epilogue, 0.2 to 0.8 % of int8.
    """
    best, best_split, best_cycles = _TILES[0], 1, float("inf")
    # Many rows are read by classes, whose tiles are never shared by columns or in turns: 5 to 10 % faster than copies.
    by_class = not problem.aligned and problem.x_major == "k" and problem.m_bucket >= 2048
    for tile in _TILES + _BETWEEN:
        block_m, block_n, consumers = tile
        if _shape_refusal(problem, *tile) or _too_high(problem, block_m):
            continue
        if by_class and consumers != "m":
            continue
        many = _tiles(problem, 128, 128) > 35 * device.sms
        if tile in _BETWEEN and _tiles(problem, block_m, block_n) > device.sms and not (many and _in_spans(problem)):
            continue  # in one wave they win 10 to 15 % (docs/log.md), in several they lose
        for split, cycles in _cycles(device, problem, tile, by_class).items():
            if cycles < best_cycles and (shared or split == 1):
                best, best_split, best_cycles = tile, split, cycles
    return _config(best, best_split, "classes" if by_class else "copy")


def _cycles(device: Device, problem: Problem, tile: tuple[int, int, str], by_class: bool) -> dict[int, float]:
    """SPLIT_K -> estimated cycles: waves of tiles, each as long as its products or its operands' way from L2, and its end."""
    block_m, block_n, consumers = tile
    turns, codes = consumers == "tiles", problem.dtype == torch.int8  # float8 has the constants that fitted it before
    tiles, numbers = _tiles(problem, block_m, block_n), block_m * block_n
    waves, left = divmod(tiles, device.sms)
    rounds = waves + (left > 0)
    # A column of x and of the weight: their product, or their way from L2; as measured, not as promised. Of codes fewer
    # programs ask L2 at once (`evened`).
    product = numbers * (1.02 if turns else 1.2) / 2048
    way = (block_m + block_n) * 2 / (52 if codes else 50)
    # Less of it is shared in L2 by programs that are no longer in step: int8 in turns 1430 T up to 32 rounds, 1170 from 48 on.
    way *= (1.1 if rounds > 36 else 1.0) if turns else (1.03 if waves >= 4 else 1.0)
    whole = problem.k * max(product, way)
    if block_n == 192 and tiles > device.sms:
        whole *= 1.092  # sums in spans
    if numbers == 32768:
        whole *= _beside(problem, tile, by_class)
    # Column scales are loaded for a consumer's columns, once for all of its rows.
    rows = block_m // (1 + (consumers == "m"))
    per_number = 0.21 * (problem.activation != "none") + 0.06 * problem.residual + codes * 10 / rows
    # The end of the last tile in turns is one consumer's. Those of all others are hidden.
    end = 1800 + (1 + turns) * numbers * per_number / (1 + problem.gated)
    ways = {1: rounds * (whole + (360 if turns else end)) + (end if turns else 0)}
    if tile in _TILES and not turns and 2 * left <= device.sms and problem.k >= (4096 if waves else 16384):
        parts = min(4, device.sms // max(left, 1))
        # Less than a wave is shared by twos; by threes 256 x 5120 x 25600 in 128x256 (132 us, by twos 147), of 16 bits.
        threes = parts == 3 and numbers == 32768 and problem.dtype.itemsize == 2
        parts = parts if waves or threes else 2
        # The program that ends a tile reads the others' parts one after the other: 128 KB in 4200 cycles.
        shared = (9600 + 4200 * (parts - 1) * numbers / 32768) if waves else 22000
        crowd = min(1.02, device.sms / evened(tiles, device.sms)) if codes else 1.0
        ways[0 if waves or threes else 2] = crowd * (waves * (whole + end) + whole / parts) + shared
    if tile in _BETWEEN and problem.dtype.itemsize == 2:
        ways[1] *= 0.95  # 160 tiles of 128 columns, K 8192, a fifth of them shared: 6 and 11 % slower (products-left.json)
    return ways


def _beside(problem: Problem, tile: tuple[int, int, str], by_class: bool) -> float:
    """What tells the two largest tiles apart, which take as long by their products and bytes.

    The copy engine takes its time for rows of the weight that are not there: 4096 x 1800 x 4096, bf16, takes 102 us in 128x256,
    of whose columns 12 % are outside of y, 90 in 256x128 (6 %). Else 256x128 is 1 % slower in 16 bits, by classes 8 %.
    """
    n = _whole_columns(problem, tile[1])
    columns = -(-n // tile[1]) * tile[1]
    slower = tile[0] == 256 and problem.dtype != torch.int8
    return (1 + 0.1 * (columns - n) / columns) * (1 + slower * (0.08 if by_class else 0.003))


def left_over(size: int, block: int) -> int:
    """Rows or columns behind the last whole tile, where they are few enough to be computed without one."""
    return size % block if size > block and size % block <= MOST_LEFT_OVER else 0


def _tiles(problem: Problem, block_m: int, block_n: int) -> int:
    """Tiles of the bucket's rows, without the columns that need none."""
    return -(-problem.m_bucket // block_m) * -(-_whole_columns(problem, block_n) // block_n)


def _whole_columns(problem: Problem, block_n: int) -> int:
    """N without the columns that are computed beside the tiles."""
    return problem.n - (left_over(problem.n, block_n) if not problem.aligned and not problem.gated else 0)


def _in_spans(problem: Problem) -> bool:
    """Whether its sums are made of spans; `scaled_linear` halves K."""
    return float8_span(problem.dtype, 2 * problem.k) > 0


def _too_high(problem: Problem, block_m: int) -> bool:
    return block_m > 64 and block_m >= 2 * problem.m_bucket


def consumer_tile(c: Config) -> tuple[int, int]:
    """(rows, columns) that one consumer has in its registers."""
    return c["BLOCK_M"] // (1 + (c["CONSUMERS"] == "m")), c["BLOCK_N"] // (1 + (c["CONSUMERS"] == "n"))


def epilogue_n(cols: int, itemsize: int = 2) -> int:
    """Columns of a block of a consumer's epilogue: rows of at most 128 bytes."""
    return min(_EPILOGUE_N, cols & -cols, 128 // itemsize)


def ring(device: Device, c: Config) -> tuple[int, int]:
    """(stages, buffers of a consumer's epilogue): as many stages as fit, up to eight."""
    rows, cols = consumer_tile(c)
    buffers = 2 if c["CONSUMERS"] == "tiles" else 1
    staging = 2 * rows * epilogue_n(cols) * 2 * buffers
    stage = (c["BLOCK_M"] + c["BLOCK_N"]) * BLOCK_K_BYTES
    return min(8, (device.smem_bytes - staging - 1024) // stage), buffers


def _shape_refusal(problem: Problem, block_m: int, block_n: int, consumers: str) -> str | None:
    rows, cols = consumer_tile({"BLOCK_M": block_m, "BLOCK_N": block_n, "CONSUMERS": consumers})
    if block_n in (32, 96, 192):
        if (block_m, block_n, consumers) not in _BETWEEN:
            return "of the tiles between others these are the ones that fit the groups of warps"
        most = _MOST_BETWEEN[problem.dtype.itemsize]
        if problem.gated or (problem.m_bucket > most and not _in_spans(problem)):
            return f"tiles between others are for up to {most} rows, without a gate"
        if problem.dtype.itemsize > 1 and (block_n != 192 or not problem.aligned or problem.w_major != "k"):
            return "of the tiles between others 16 bits gain by 128x192, of operands that are read as they are"
        if block_n == 96 and _in_spans(problem):
            return "sums in spans gain by other tiles: 2 to 9 % of 128x96 by 128x128"
    if consumers == "tiles" and (block_m, block_n) != (128, 128):
        return "consumers take turns at tiles of 128x128: smaller ones end too soon, larger ones fill the registers"
    if consumers == "m" and rows < 64:
        return "the tensor cores take 64 rows at once"
    if consumers == "n" and block_m != 64:
        return "where there are rows for both consumers they share those"
    if max(block_m, block_n) > 2 * min(block_m, block_n) and not (problem.gated and block_m == 64):
        return "a tile four times as long as wide asks L2 for more than a squarer one of its size"
    if rows * cols > 64 * 256:
        return "more accumulators than the registers hold"
    if rows * cols > 64 * 192 and _in_spans(problem):
        return "long sums of float8 are made of spans: their sum needs as many registers as a span's"
    if problem.gated and cols < 2 * _EPILOGUE_N:
        return "gate and up halves of a consumer's tile are at least one block of the epilogue wide"
    return None


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    block_m, block_n, consumers = c["BLOCK_M"], c["BLOCK_N"], c["CONSUMERS"]
    if reason := _shape_refusal(problem, block_m, block_n, consumers):
        return reason
    if c["SPLIT_K"] != 1 and (consumers == "tiles" or (block_m, block_n, consumers) in _BETWEEN):
        return "consumers that take turns, or have a tile between others, do not share tiles with other programs"
    if c["SPLIT_K"] > 1 and c["SPLIT_K"] * _tiles(problem, block_m, block_n) > device.sms:
        # Of 3,152 such configs measured at 338 problems on an H100 one came within 2 % of the best.
        return "tiles are shared where there are fewer than SMs, and not by more programs than those"
    if _too_high(problem, block_m):
        return "BLOCK_M is twice as high as x"
    if c["UNALIGNED"] == "classes" and (problem.aligned or problem.x_major != "k" or consumers != "m"):
        return "nothing to read by classes of rows: x is aligned or not dense along K, or its tiles are shared"
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
"""SPLIT_K: programs that share a tile along K; 0 shares just the tiles that are left when no more fill the card."""

INVARIANT_SPACE = Space(
    default=lambda device, problem: _default(device, problem._replace(aligned=True, x_major="k"), shared=False), axes={}
)
"""For operands that are aligned, x dense along K. Whatever the tile, a number of y is one sum along K, 64 steps after 64 steps
by the instructions of a warpgroup: the tile may follow the rows, and no bit does."""

# ---- pieces of work


def shares(tiles: int, steps: int, sms: int, split_k: int) -> tuple[int, int, int, int]:
    """(programs, whole tiles a program, steps of K in its share of the tiles left, most programs that share a tile)."""
    if split_k == 1:
        return min(tiles, sms), 0, 0, 1
    waves, left = (tiles // sms, tiles % sms) if split_k == 0 else (0, tiles)
    share = -(-steps // (split_k or max(1, min(4, sms // max(left, 1)))))
    programs = max(-(-left * steps // share), sms * (waves > 0))
    parts = max(((t * steps + steps - 1) // share - t * steps // share + 1 for t in range(left)), default=1)
    return programs, waves, share, parts


def evened(tiles: int, sms: int) -> int:
    """As few programs as need no more rounds than one an SM: 128 of 132 for 512 tiles. They have more of the power and of L2.

    H100, products of codes in several rounds, 22 shapes: 0.994 to 1.034 times as fast, 1.011 on average; 15 of 16 bits: 0.998.
    """
    return -(-tiles // -(-tiles // sms))
