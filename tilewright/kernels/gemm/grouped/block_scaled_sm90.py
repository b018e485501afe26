"""The host side of block_scaled_sm90_kernel.py: supported problems, tile shapes and TMA descriptors."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.grouped.block_scaled_sm90_kernel import grouped_block_sm90_kernel
from tilewright.kernels.gemm.grouped.problem import GROUPED_ACTIVATIONS, most_tiles
from tilewright.kernels.hopper.descriptors import box_layout, card_of, descriptor
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.tune.space import Config, Space

__all__ = ["BLOCK_SM90_SPACE", "GroupedBlockProblem", "launch_grouped_block_sm90", "refuse_block_sm90"]


class GroupedBlockProblem(NamedTuple):
    """Everything that the choice of a kernel may depend on. `n` counts rows of an expert's weight."""

    dtype: torch.dtype
    rows: int
    """R, or X * M, rounded up to a power of two."""
    experts: int
    n: int
    k: int
    activation: str
    bias: bool
    masked: bool
    aligned: bool
    """Whether all rows of x and of the weight start at multiples of 16 bytes."""
    packed: bool
    """Whether the experts' weights follow each other in memory without gaps."""

    @property
    def gated(self) -> bool:
        """Whether the weight has a gate half and an up half."""
        return GROUPED_ACTIVATIONS[self.activation][1]

    @property
    def rows_each(self) -> int:
        """The rows per expert if they are distributed evenly."""
        return max(1, self.rows // self.experts)


def refuse_block_sm90(device: Device, problem: GroupedBlockProblem) -> str | None:
    """Why the kernel refuses the problem; None if it accepts it."""
    if not problem.aligned:
        return "needs rows of x and of the weight that start at multiples of 16 bytes"
    if not problem.packed:
        return "needs the experts' weights stored one after another, without gaps"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    if problem.gated and problem.n % 256:
        return "with a gate, needs N to be a multiple of 256, so that both halves begin with a block of 128 rows"
    if problem.activation == "clamped_silu_mul":
        return "does not support the activation clamped_silu_mul"
    return None


# ---- space

_BLOCK_K = 128
_EPILOGUE_N = 64

# BLOCK_M, BLOCK_N -> (PART_N, microseconds per 128 columns of K for the same tile in `block_scaled_linear` on an H100)
_TILES = {(128, 256): (64, 0.76), (256, 128): (128, 0.79), (128, 128): (128, 0.385), (64, 128): (64, 0.4)}


def _config_refusal(problem: GroupedBlockProblem, block_m: int, block_n: int) -> str | None:
    if (block_m, block_n) not in _TILES:
        return "not a supported tile: others of this size load less from L2, or fit in the registers"
    if problem.gated and block_m == 64:
        return "with a gate, a consumer's tile must be two epilogue blocks wide: one for the gate, one for the up half"
    if block_m > (128 if problem.gated else 64) and block_m >= 2 * problem.rows_each:
        return "BLOCK_M is at least twice the number of rows per expert"
    return None


def _default(device: Device, problem: GroupedBlockProblem) -> Config:
    """The tile with the least estimated time. The figures are those of `block_scaled_linear`; this one was not measured yet."""
    best, best_us = {}, float("inf")
    for (block_m, block_n), (_, step_us) in _TILES.items():
        if _config_refusal(problem, block_m, block_n):
            continue
        tiles = problem.experts * ceil_div(problem.rows_each, block_m) * ceil_div(problem.n, block_n)
        us = ceil_div(tiles, device.sms) * (ceil_div(problem.k, _BLOCK_K) * step_us + 2)
        if us < best_us:
            best, best_us = {"BLOCK_M": block_m, "BLOCK_N": block_n}, us
    return best


BLOCK_SM90_SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (64, 128, 256), "BLOCK_N": (128, 256)},
    refusal=lambda device, problem, c: _config_refusal(problem, c["BLOCK_M"], c["BLOCK_N"]),
)


def launch_grouped_block_sm90(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor,
    bias: Tensor | None, activation: str, masked: bool, clear: bool,
) -> Tensor:  # fmt: skip
    """Fill y, which must not be empty, and return it. x [R, K] and x_scales [R, K / 128] are of all experts; K is not 0."""
    (function, gated), device = GROUPED_ACTIVATIONS[activation], card_of(x)
    (experts, n, k), rows, halves = weight.shape, x.shape[0], 1 + gated
    block_m, block_n, width = config["BLOCK_M"], config["BLOCK_N"], n // (1 + gated)
    by_rows = block_m > 64
    own_rows, own_cols = block_m // (1 + by_rows), block_n // (2 - by_rows)
    buffers = 2 if by_rows else 1
    staging = 2 * 64 * _EPILOGUE_N * 2 * buffers
    stages = min(8, (device.smem_bytes - staging - 1024) // ((block_m + block_n) * _BLOCK_K))
    part_n = min(_TILES[block_m, block_n][0], own_cols // halves)
    # With 64 x 128, a consumer has registers for the products of two steps beside its accumulator, for any PART_N.
    parts = own_rows // 64 * own_cols // part_n
    overlap = "steps" if own_rows * own_cols == 64 * 128 else "parts" if part_n == 64 and parts % 2 == 0 else ""
    each = rows // experts if masked else 0
    high = experts * ceil_div(each, block_m) if masked else most_tiles(rows, experts, block_m)
    y_box = [64, _EPILOGUE_N]
    grouped_block_sm90_kernel[(min(high * ceil_div(n, block_n), device.sms),)](
        descriptor(x, [own_rows, _BLOCK_K]), descriptor(weight.flatten(0, 1), [own_cols // halves, _BLOCK_K]), bounds, y,
        x_scales, w_scales, bias, rows, experts, each, width, k, ceil_div(k, _BLOCK_K), *x_scales.stride(), *w_scales.stride(),
        CONSUMERS="m" if by_rows else "n", HALVES=halves, MASKED=masked, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages,
        GROUP_M=8, PART_N=part_n, OVERLAP=overlap, EPILOGUE_N=_EPILOGUE_N, EPILOGUE_BUFS=buffers,
        TILE_LAYOUT=box_layout(y_box, y.dtype),
        ACTIVATION=function, VECTOR=next(v for v in (8, 4, 2, 1) if width % v == 0), CLEAR=clear,
        num_warps=4,
    )  # fmt: skip
    return y
