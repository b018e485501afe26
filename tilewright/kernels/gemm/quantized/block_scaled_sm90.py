"""The host side of block_scaled_sm90_kernel.py: the problem, configs, TMA descriptors and the launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.problem import ACTIVATIONS
from tilewright.kernels.gemm.quantized.block_scaled_sm90_kernel import block_sm90_kernel
from tilewright.kernels.gemm.sm90 import box_rows
from tilewright.kernels.gemm.sm90_configs import shares
from tilewright.kernels.hopper.descriptors import box_layout, card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.pdl import launch_options
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.tune.space import Config, Space

__all__ = ["SPACE", "BlockProblem", "best_config", "launch_block_sm90"]


class BlockProblem(NamedTuple):
    """Everything that the choice of a kernel may depend on. `n` counts rows of the weight."""

    dtype: torch.dtype
    m_bucket: int
    n: int
    k: int
    activation: str
    bias: bool
    residual: bool
    block_rows: int
    """The number of weight rows that share a scale: 128 or 1."""
    aligned: bool
    """Whether all rows of x and of the weight start at multiples of 16 bytes."""

    @property
    def gated(self) -> bool:
        """Whether the weight has a gate half and an up half."""
        return ACTIVATIONS[self.activation][1]


# ---- space

_BLOCK_K = 128
_EPILOGUE_N = 64

# BLOCK_M, BLOCK_N -> (PART_N, microseconds for 128 columns of K on an H100)
_TILES = {(128, 256): (64, 0.76), (256, 128): (128, 0.79), (128, 128): (128, 0.385), (64, 128): (64, 0.4)}


def _consumers(c: Config) -> str:
    return "n" if c["BLOCK_M"] == 64 else "m"


def _consumer_tile(c: Config) -> tuple[int, int]:
    """(rows, columns) of the accumulator that one consumer holds in registers."""
    by_rows = _consumers(c) == "m"
    return c["BLOCK_M"] // (1 + by_rows), c["BLOCK_N"] // (2 - by_rows)


def best_config(device: Device, problem: BlockProblem, splits: tuple[int, ...]) -> Config:
    """The tile, and one of `splits`, with the least estimated time: that of the waves of tiles or of reading the weight.

    The constants, in microseconds, are fitted to 15 problems measured on an H100, and 32 of 2048 rows and more (docs/log.md).
    """
    best, best_us = {}, float("inf")
    steps = -(-problem.k // _BLOCK_K)
    weight_us = problem.n * problem.k / 2.2e6 + 8
    for (block_m, block_n), (_, step_us) in _TILES.items():
        waves, left = divmod(-(-problem.m_bucket // block_m) * -(-problem.n // block_n), device.sms)
        for split in splits:
            config = {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLIT_K": split}
            parts = 1 if split == 1 else min(4, steps, device.sms // max(left, 1))
            if _config_refusal(device, problem, config) or (split != 1 and parts < 2):
                continue
            last_us = steps / parts * step_us + 6 if left else 0
            sharing_us = 4 + 0.03 * steps + 3 * (parts - 1) * block_m * block_n / 32768 if parts > 1 else 0
            us = max(waves * (steps * step_us + 2) + last_us + sharing_us, weight_us)
            if us < best_us:
                best, best_us = config, us
    return best


def _config_refusal(device: Device, problem: BlockProblem, c: Config) -> str | None:
    if (c["BLOCK_M"], c["BLOCK_N"]) not in _TILES:
        return "not a supported tile: others of this size load less from L2, or fit in the registers"
    if problem.gated and c["BLOCK_M"] == 64:
        return "with a gate, a consumer's tile must be two epilogue blocks wide: one for the gate, one for the up half"
    if c["SPLIT_K"] != 1 and c["BLOCK_M"] == 256:
        return "SPLIT_K needs tiles with 64 rows per consumer: BLOCK_M must be below 256"
    if c["BLOCK_M"] > (128 if problem.gated else 64) and c["BLOCK_M"] >= 2 * problem.m_bucket:
        return "BLOCK_M is at least twice the number of rows of x"
    return None


SPACE = Space(
    default=lambda device, problem: best_config(device, problem, (1, 0)),
    axes={"BLOCK_M": (64, 128, 256), "BLOCK_N": (128, 256), "SPLIT_K": (1, 0)},
    refusal=_config_refusal,
)
"""SPLIT_K 0: each tile of the last, incomplete wave is shared along K by up to four programs."""

# ---- launcher


def _ring(device: Device, c: Config) -> tuple[int, int]:
    """(pipeline stages, epilogue buffers per consumer). As many stages as fit into shared memory, up to eight."""
    buffers = 1 if c["BLOCK_M"] == 64 else 2
    staging = 2 * 64 * _EPILOGUE_N * 2 * buffers
    return min(8, (device.smem_bytes - staging - 1024) // ((c["BLOCK_M"] + c["BLOCK_N"]) * _BLOCK_K)), buffers


def launch_block_sm90(
    config: Config,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    pdl: bool = False,
) -> Tensor:
    """Fill y [M, F], which must not be empty, and return it. x_scales [M, K / 128], w_scales [N / 128, K / 128]; K is not 0."""
    function, gated = ACTIVATIONS[activation]
    (m, k), width, halves = x.shape, y.shape[1], 1 + gated
    device = card_of(x)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    rows, cols = _consumer_tile(config)
    stages, buffers = _ring(device, config)
    part_n = min(_TILES[block_m, block_n][0], cols // halves)
    # With 64 x 128, a consumer has registers for the products of two steps beside its accumulator, for any PART_N.
    overlap = "steps" if rows * cols == 64 * 128 else "parts" if part_n == 64 and rows // 64 * cols // part_n % 2 == 0 else ""
    y_box = [64, _EPILOGUE_N]
    tiles, steps = ceil_div(m, block_m) * ceil_div(width * halves, block_n), ceil_div(k, _BLOCK_K)
    stream = config["SPLIT_K"] != 1
    # `evened`, as in other 8-bit products, does not help here: on an H100, 128 programs instead of 132 are 0.978 to 1.009 times
    # as fast, 0.992 on average.
    programs, waves, share, most = shares(tiles, steps, device.sms, config["SPLIT_K"])
    scratch = counters = None
    if stream:
        left = tiles - waves * programs
        scratch = torch.empty(max(1, left * (most - 1) * block_m * block_n), dtype=torch.float32, device=x.device)
        counters = tickets(x.device, left * 2)
    block_sm90_kernel[(programs,)](
        descriptor(x, [box_rows(rows, m), _BLOCK_K]), descriptor(weight, [cols // halves, _BLOCK_K]),
        descriptor(y, y_box) if width % 8 == 0 else None, y, x_scales, w_scales, bias, residual, scratch, counters,
        m, width, steps, waves, share, most - 1, *x_scales.stride(), *w_scales.stride(),
        0 if residual is None else residual.stride(0),
        CONSUMERS=_consumers(config), HALVES=halves, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, GROUP_M=8,
        PART_N=part_n, OVERLAP=overlap, EPILOGUE_N=_EPILOGUE_N, EPILOGUE_BUFS=buffers,
        TILE_LAYOUT=box_layout(y_box, torch.bfloat16),
        STREAM=stream, ACTIVATION=function, VECTOR=next(v for v in (8, 4, 2, 1) if width % v == 0), num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return y
