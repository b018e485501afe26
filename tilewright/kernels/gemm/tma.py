"""`linear` for many rows on cards with a copy engine (TMA, sm_90 and up): the implementation `triton_tma`.

The kernel is persistent: one program per SM processes one tile after the other. The copy engine loads whole tiles of x and of
the weight into shared memory, with two descriptors that the host makes. (There is no workspace, so a CUDA graph contains
everything it needs.) While a tile is written, the loads of the next tile are already in flight. Limited by the tensor cores
from about 256 rows on.

With a gate the weight's descriptor is [F, 2, K], with the halves as the middle dimension. So a box of it contains gate and up
rows alternately, as the epilogue needs them.

Refuses: float32 (IEEE products do not run on tensor cores), batches of weights, operands that are not dense along K, and rows
that do not start at multiples of 16 bytes: the copy engine cannot address them.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.hw.device import Device, device_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, empty_output, finish
from tilewright.kernels.gemm.tile import best_tile, grouped
from tilewright.kernels.gemm.work import tma_work
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRITON_TMA"]


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    if problem.batched:
        return "supports a single weight only, not a batch of weights"
    if problem.x_major != "k" or problem.w_major != "k":
        return "needs x and the weight contiguous along K"
    if not problem.aligned:
        return "needs rows of x and of the weight that start at multiples of 16 bytes"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    return None


# ---- space

# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages. H100, 8192^3 in bf16: 128x256, 8 warps and 3 stages reached 807 TFLOP/s.
_TILES = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 5),
    (64, 64, 64, 4, 5),
)


def _smem_bytes(c: Config) -> int:
    # The operands, a barrier per stage, and the buffer that converts a tile from the tensor cores' layout to the stored one.
    # Triton 3.7 converts 32 KB at a time, 3.6 the whole tile; the whole tile is counted here.
    tile = c["BLOCK_M"] * c["BLOCK_N"] * 2
    return (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * c["num_stages"] * 2 + tile + 8 * c["num_stages"]


def _config(tile: tuple[int, ...]) -> Config:
    block_m, block_n, block_k, warps, stages = tile
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _default(device: Device, problem: Problem) -> Config:
    tiles = tuple(t for t in _TILES if _config_refusal(device, problem, _config(t)) is None)
    return _config(best_tile(tiles, (1,), device.sms, problem)[:5])


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    if _smem_bytes(c) > device.smem_bytes:
        return "more shared memory than the device has"
    accumulators = c["BLOCK_M"] * c["BLOCK_N"] // (32 * c["num_warps"])
    if accumulators > 128:
        return "the accumulators need more registers than a thread has"
    if accumulators < 32:
        return "fewer than 32 accumulators per thread: too many warps"
    if c["BLOCK_M"] > 64 and c["BLOCK_M"] >= 2 * problem.m_bucket:
        return "BLOCK_M is at least twice the number of rows of x"
    if c["BLOCK_N"] > 64 and c["BLOCK_N"] >= 2 * problem.n:
        return "BLOCK_N is at least twice the number of rows of the weight"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (64, 128),
        "GROUP_M": (8,),
        "num_warps": (4, 8),
        "num_stages": (3, 4, 5),
    },
    refusal=_config_refusal,
)


@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    x_desc, w_desc, bias_ptr, residual_ptr, y_ptr, M, N, K, residual_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    # The store uses a tile counter of its own. Sharing `tile` with the loads would make the next tile's loads depend on the
    # store of this one.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row, col = grouped(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(steps):
            x = x_desc.load([row * BLOCK_M, step * BLOCK_K])
            if GATED:
                w = w_desc.load([col * (BLOCK_N // 2), 0, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
            else:
                w = w_desc.load([col * BLOCK_N, step * BLOCK_K])
            acc = dot(x, w.T, acc)
        stored += tl.num_programs(0)
        row, col = grouped(stored, tiles_m, tiles_n, GROUP_M)
        finish(acc, y_ptr, bias_ptr, residual_ptr, row * BLOCK_M, col * BLOCK_N, M, N, residual_stride, ACTIVATION, GATED)


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    function, gated = ACTIVATIONS[activation]
    y = empty_output(x, weight, gated)
    if not y.numel():
        return y
    m, k = x.shape
    n = weight.shape[0]
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    x_desc = TensorDescriptor(x, [m, k], [x.stride(0), 1], [block_m, block_k])
    w_stride = weight.stride(0)
    if gated:
        w_desc = TensorDescriptor(weight, [n // 2, 2, k], [w_stride, n // 2 * w_stride, 1], [block_n // 2, 2, block_k])
    else:
        w_desc = TensorDescriptor(weight, [n, k], [w_stride, 1], [block_n, block_k])
    tiles = ceil_div(m, block_m) * ceil_div(n, block_n)
    _tma_kernel[(min(tiles, device_of(x.get_device()).sms),)](
        x_desc, w_desc, bias, residual, y, m, n, k, 0 if residual is None else residual.stride(0),
        ACTIVATION=function, GATED=gated, **config,
    )  # fmt: skip
    return y


TRITON_TMA = Impl(name="triton_tma", launch=_launch, space=SPACE, min_arch=90, refuse=_refuse, work=tma_work)
