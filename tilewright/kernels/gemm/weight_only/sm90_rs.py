"""The host side of sm90_rs_kernel.py: supported problems, tile shapes, the division of work, the launch.

A tile is 128 rows of the weight by BLOCK_M rows of x. With a small BLOCK_M, two programs per SM hide each other's latencies.

Refuses: cards other than sm_90, groups of 32 columns, zero points of whole rows, an odd K, and rows that do not start at
multiples of 16 bytes.
"""

# M rows of x, N rows of the weight, K the shared dimension

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.problem import ACTIVATIONS
from tilewright.kernels.gemm.quantized_operands import empty_product
from tilewright.kernels.gemm.weight_only.problem import FORMATS, MixedProblem
from tilewright.kernels.gemm.weight_only.sm90_rs_kernel import mixed_registers_kernel
from tilewright.kernels.hopper.descriptors import box_layout, card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["MIXED_REGISTERS", "shares"]

_BLOCK_N = 128
_BLOCK_K = 128
_REGISTERS = {1: 168, 2: 80, 3: 56}  # per thread, for twelve warps per program; consumers receive the producer's registers
_ON_SUMS = 64  # up to so many rows of x, a group's scale multiplies the sums; above, there are fewer weight elements than sums


def _refuse(device: Device, problem: MixedProblem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    if not problem.aligned:
        return "needs rows of x and of the codes that start at multiples of 16 bytes"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    if problem.k % 2:
        return "needs an even K: 8-bit codes are loaded in pairs"
    if problem.block_cols == 32:
        return "supports groups of at least 64 columns only"
    if problem.zeros and not problem.block_cols:
        return "supports zero points per group only, not per row"
    return None


# ---- space


def _span(config: Config, format: str) -> int:
    """The columns per stage, divided by 64. int4 has chunks of 128; tall tiles of 8-bit codes need more, smaller stages."""
    return 1 if format != "int4" and config["BLOCK_M"] >= 128 else 2


def _ring(device: Device, config: Config, format: str) -> int:
    """The number of pipeline stages: as many as fit into shared memory, up to twelve."""
    block_m = config["BLOCK_M"]
    columns = 64 * _span(config, format)
    stage = block_m * 2 * columns + _BLOCK_N * columns // (2 if format == "int4" else 1)
    room = device.smem_bytes // config["PER_SM"] - 1024
    # Subtract the buffer with which the epilogue transposes sums, and the barriers.
    return min(12, (room - _BLOCK_N * min(block_m, 16) * 4 - 512) // stage)


def _default(device: Device, problem: MixedProblem) -> Config:
    """The tile and the split along K for which the busiest program has the fewest `_cycles`."""
    block_m, int4 = min(256, max(8, problem.m_bucket)), problem.format == "int4"
    # 8-bit codes are limited by HBM. int4 is limited by the latency between two steps of a program.
    per_sm = 2 if int4 and block_m <= 16 else 1
    # H100, 4096 to 57344 rows of the weight: this choice is 0.5 % slower than the best config of each product, at most 7 %.
    heights = (256, 128) if block_m == 256 else (block_m,)
    ways = [(height, cut) for height in heights for cut in (_in_step(height), 0)]
    block_m, split = min(ways, key=lambda way: _cycles(device, problem, per_sm, *way))
    # Loading a group's scale and zero point one step ahead gains 4 % at 16 and 2048 rows, 12 % at 64 (not timed for 8 bits).
    ahead = int(int4 and problem.block_cols > 0)
    return {"BLOCK_M": block_m, "SPLIT_K": split, "PER_SM": per_sm, "AHEAD": ahead}


def _in_step(block_m: int) -> int:
    """The SPLIT_K that keeps programs in step along K: per tile, or per pair of tall tiles, which are fewer than programs."""
    return 3 if block_m >= 128 else 2


def _cycles(device: Device, problem: MixedProblem, per_sm: int, block_m: int, split_k: int) -> float:
    """The estimated cycles of the busiest program (H100)."""
    steps, tiles = -(-problem.k // _BLOCK_K), -(-problem.m_bucket // block_m) * -(-problem.n // _BLOCK_N)
    _, waves, share, parts = shares(tiles, steps, device.sms * per_sm, block_m, split_k)
    if not split_k and steps % share:
        # Every program is at a different place along K, so L2 serves x less well, in particular if it holds only a part of x.
        share *= 1.2 if 5 * problem.m_bucket * problem.k > device.l2_bytes else 1.05
    # A program that adds parts reads them from L2, at some 40 bytes per cycle.
    return (waves * steps + share) * (800 + 5 * block_m) + (2000 + parts * block_m * 13 if parts > 1 else 0)


def _config_refusal(device: Device, problem: MixedProblem, c: Config) -> str | None:
    block_m, split, m, groups = c["BLOCK_M"], c["SPLIT_K"], problem.m_bucket, bool(problem.block_cols)
    int4 = problem.format == "int4"
    if block_m > 8 and block_m >= 2 * m:
        return "BLOCK_M is at least twice the number of rows of x"
    if block_m < min(m, 128):
        return "BLOCK_M must cover all rows of x or be at least 128: every tile of x converts the codes again"
    if block_m > {1: 256, 2: 32 if groups else 64, 3: 8 if int4 else 16}[c["PER_SM"]]:
        return "this BLOCK_M is too large for PER_SM programs: their accumulators and stages do not fit on an SM"
    # The following configs are refused because no product timed on an H100 was faster with them by more than 1 %
    # (studies/mixed-linear-choices.json).
    if int4 and block_m == 16 and c["PER_SM"] == 1:
        return "PER_SM must be above 1 here: a single program per SM waits for each product"
    if split == 1 and (int4 or block_m >= 64):
        return "SPLIT_K 1 is not needed here: 2 or 3 also leave a tile unsplit where that is faster"
    if split > 1 and split != _in_step(block_m):
        return "SPLIT_K must be 2 with BLOCK_M below 128, and 3 from 128 on, for programs to stay in step along K"
    if c["AHEAD"] and not groups:
        return "AHEAD needs scales per group: scales per row are not loaded ahead"
    if not c["AHEAD"] and groups and int4 and block_m <= 64:
        return "AHEAD must be 1 here: a step with BLOCK_M up to 64 is too short to load group scales in it"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (8, 16, 32, 64, 128, 256),
        "SPLIT_K": (1, 0, 2, 3),
        "PER_SM": (1, 2, 3),
        "AHEAD": (0, 1),
    },
    refusal=_config_refusal,
)
"""SPLIT_K: 1 splits nothing. The other values split the tiles of the last, incomplete wave along K: 0 into one share per
program, 2 into a whole number of shares per tile, 3 per pair of tiles. PER_SM: programs per SM. AHEAD: see sm90_rs_kernel.py.
"""


def shares(tiles: int, steps: int, programs: int, block_m: int, split_k: int) -> tuple[int, int, int, int]:
    """(programs, whole tiles per program, steps in a program's share of the other tiles, most programs that share a tile)."""
    if split_k == 1:
        return min(tiles, programs), 0, 0, 1
    waves, left = divmod(tiles, programs)
    # A single program adds the parts of a tile, which takes long if they are many and large.
    share = max(2, -(-left * steps // programs), -(-steps * block_m // 1024))
    if split_k:
        # Programs that are in step along K read the same columns of x, which are then in L2. With shares of any length, each
        # program would read other columns.
        whole = (split_k - 1) * steps
        share = max(share, -(-whole // max(1, whole // share)))
    parts = max(((t * steps + steps - 1) // share - t * steps // share + 1 for t in range(left)), default=1)
    return programs if waves else -(-left * steps // share), waves, share, parts


def _launch(
    config: Config, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Tensor:  # fmt: skip
    y = empty_product(x, codes, activation, x.dtype)
    if not y.numel():
        return y
    function, gated = ACTIVATIONS[activation]
    (m, k), n, format = x.shape, codes.shape[0], FORMATS[codes.dtype]
    device = card_of(x)
    units = codes.view(torch.int32 if format == "int4" else torch.int16)
    box = [_BLOCK_N // (1 + gated), 64 // units.itemsize]
    block_m = config["BLOCK_M"]
    steps, tiles = ceil_div(k, _BLOCK_K), ceil_div(m, block_m) * ceil_div(n, _BLOCK_N)
    programs, waves, share, parts = shares(tiles, steps, device.sms * config["PER_SM"], block_m, config["SPLIT_K"])
    stream = config["SPLIT_K"] != 1
    scratch = counters = None
    if stream:
        left = tiles - waves * programs
        scratch = torch.empty(max(1, left * (parts - 1) * block_m * _BLOCK_N), dtype=torch.float32, device=x.device)
        counters = tickets(x.device, left)
    mixed_registers_kernel[(programs,)](
        descriptor(x, [block_m, 64]), descriptor(units, box), y, scales, zeros, bias, residual, scratch, counters,
        m, y.shape[1], k, steps, waves, share, parts - 1, scales.stride(0), 0 if residual is None else residual.stride(0),
        FORMAT=format, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, HALVES=1 + gated, BLOCK_M=block_m,
        SPAN=_span(config, format), STAGES=_ring(device, config, format), GROUP_M=8, STREAM=stream,
        ON_SUMS=bool(block_cols) and block_m <= _ON_SUMS, AHEAD=config["AHEAD"],
        ACTIVATION=function, CODE_LAYOUT=box_layout([_BLOCK_N, box[1]], units.dtype), num_warps=8,
        maxnreg=_REGISTERS[config["PER_SM"]],
    )  # fmt: skip
    return y


MIXED_REGISTERS = Impl(name="registers", launch=_launch, space=SPACE, written_for=90, refuse=_refuse, extra_roundings=1)
