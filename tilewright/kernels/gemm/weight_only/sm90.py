"""The host side of sm90_kernel.py: the implementation `sm90` of `mixed_linear`, for int4 weights and many rows.

As in `dequantized`, W = (code - zero) * scale is rounded to x's dtype once, but by the same launch that multiplies by it. The
workspace is as large as the 16-bit weight.

Refuses: 1024 rows and fewer, codes other than int4 in groups of 64 or 128 columns of a row, gated activations, and x or codes
whose rows do not start at multiples of 16 bytes.
"""

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.problem import ACTIVATIONS
from tilewright.kernels.gemm.quantized_operands import empty_product
from tilewright.kernels.gemm.sm90 import box_rows, pieces
from tilewright.kernels.gemm.sm90_configs import BLOCK_K_BYTES, consumer_tile, epilogue_n, ring
from tilewright.kernels.gemm.weight_only.problem import MixedProblem, as_units
from tilewright.kernels.gemm.weight_only.sm90_dequant_rows import ITEM
from tilewright.kernels.gemm.weight_only.sm90_kernel import mixed_sm90_kernel
from tilewright.kernels.hopper.descriptors import box_layout, card_of, descriptor
from tilewright.kernels.hopper.producer_rows import counters_of
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["MIXED_SM90", "tiles_of"]

_LEAST_ROWS = 1024
# The only large tile whose pipeline stages leave shared memory for the reordering of codes.
_TILE: Config = {"BLOCK_M": 128, "BLOCK_N": 256, "CONSUMERS": "m"}
_BLOCK_K = BLOCK_K_BYTES // 2
_COLS = 2048  # the columns of an item that are converted at a time
_K_VECTOR = 64  # a divisor of K (every group size is a multiple of it), so that the kernel can use wide accesses
_REGISTERS = (208, 24, 72)


def _refuse(device: Device, problem: MixedProblem) -> str | None:
    if problem.dtype.itemsize != 2 or problem.format != "int4":
        return f"supports int4 codes with a 16-bit x only, not {problem.format} with {problem.dtype}"
    if problem.block_rows != 1 or problem.block_cols not in (64, 128):
        return "supports scales per group of 64 or 128 columns of a row only"
    if problem.gated:
        return "does not support a gate: it dequantises rows in order, but gate and up rows are needed together"
    if not problem.aligned or problem.k % _K_VECTOR:
        return "needs rows of x, of the codes and of the 16-bit weight that start at multiples of 16 bytes"
    if problem.m_bucket <= _LEAST_ROWS:
        return f"is for more than {_LEAST_ROWS} rows: with fewer, writing the dequantised weight takes longer than the product"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    return None


def tiles_of(problem: MixedProblem) -> int:
    """The number of tiles of the product with the bucket's rows."""
    return -(-problem.m_bucket // _TILE["BLOCK_M"]) * -(-problem.n // _TILE["BLOCK_N"])


def _first_items(tiles_m: int, tiles_n: int, programs: int, group_m: int) -> int:
    """The item from which on a consumer, after converting it, begins its tiles.

    By then the items that the first wave of tiles needs have been converted, or are being converted.
    """
    columns = min(tiles_n, ceil_div(programs, min(group_m, tiles_m)))
    return max(0, columns * _TILE["BLOCK_N"] // int(ITEM) - 3 * programs)


def _launch(
    config: Config, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Tensor:  # fmt: skip
    y = empty_product(x, codes, activation, x.dtype)
    if not y.numel():
        return y
    (m, k), n = x.shape, codes.shape[0]
    device = card_of(x)
    weight, words = torch.empty((n, k), dtype=x.dtype, device=x.device), as_units(codes)
    tile = {**_TILE, **config}
    rows, cols = consumer_tile(tile)
    stages, _ = ring(device, tile)
    y_box, y_stride = [rows, epilogue_n(cols)], y.stride(0)
    x_desc, w_desc = descriptor(x, [box_rows(rows, m), _BLOCK_K]), descriptor(weight, [cols, _BLOCK_K])
    y_desc = descriptor(y, y_box) if y_stride % 8 == 0 else None
    tiles_m, tiles_n, steps = ceil_div(m, tile["BLOCK_M"]), ceil_div(n, tile["BLOCK_N"]), ceil_div(k, _BLOCK_K)
    work = pieces(tile, device, y, tiles_m * tiles_n, steps, False, more=counters_of(n))
    assert work.counters is not None
    mixed_sm90_kernel[(work.programs,)](
        (words, scales, zeros, weight, words.stride(0), scales.stride(0)), x_desc, w_desc, y_desc, y, bias, residual,
        work.scratch, work.counters, work.counters[work.others :],
        _first_items(tiles_m, tiles_n, work.programs, config["GROUP_M"]), m, n, k, steps, work.waves, work.share,
        work.parts - 1, 0 if residual is None else residual.stride(0), y_stride,
        BLOCK_M=tile["BLOCK_M"], BLOCK_N=tile["BLOCK_N"], BLOCK_K=_BLOCK_K, STAGES=stages, GROUP_M=config["GROUP_M"],
        EPILOGUE_N=y_box[1], TILE_LAYOUT=box_layout(y_box, y.dtype),
        STREAM=config["SPLIT_K"] != 1, ACTIVATION=ACTIVATIONS[activation][0],
        VECTOR=next(v for v in (8, 4, 2, 1) if n % v == 0), GROUP=block_cols, COLS=_COLS,
        K_VECTOR=_K_VECTOR, REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip
    return y


# H100, docs/log.md#int4-weights-written-under-the-products: sharing the tiles of the last wave along K is 2 % faster on
# average, at most 20 %. GROUP_M 32 is up to 1.5 % faster than 16, and 4 % than 8.
_SPACE = Space(
    default=lambda device, problem: {"SPLIT_K": 0, "GROUP_M": 32},
    axes={"SPLIT_K": (0, 1), "GROUP_M": (16, 32)},
)

MIXED_SM90 = Impl(name="sm90", launch=_launch, space=_SPACE, written_for=90, refuse=_refuse, extra_roundings=1)
