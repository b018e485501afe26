"""`linear` for at most 16 rows of x on tensor cores: the weight is streamed once, at close to memory bandwidth.

A program owns BLOCK_N weight rows. Per step it loads SLICES x BLOCK_K of K through shared memory, in a pipeline of num_stages.
The product is transposed: the weight is the tall operand of the tensor cores, and x the narrow one. So rows of x are padded to
8 or 16, not to 64. The product is batched, with one slice of K per warp. So four warps can share a tile of only 16 weight rows
without computing anything twice; the slices are added once, at the end. Even a weight of 1024 rows gives 64 programs, each with
its whole share of the weight in flight at once, and no reduction across programs is needed.

Limited by reading the weight. Every program reads x once from L2: with 16 rows of x and BLOCK_N 16 that is as many bytes of x
as of the weight, which L2 can sustain.

Refuses: more than 16 rows, batches of weights, operands that are not dense along K, float32 (a product in IEEE precision runs
without tensor cores) and float64.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tilewright.hw.device import Device
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, empty_output, finish, weight_rows
from tilewright.kernels.gemm.work import skinny_work
from tilewright.kernels.launch.pdl import launch_options, release
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["SKINNY"]

_MAX_M = 16


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.m_bucket > _MAX_M:
        return f"supports at most {_MAX_M} rows of x"
    if problem.batched:
        return "supports a single weight only, not a batch of weights"
    if problem.x_major != "k" or problem.w_major != "k":
        return "needs x and the weight contiguous along K"
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    return None


# ---- space


def _stage_bytes(c: Config) -> int:
    return (c["BLOCK_N"] + c["BLOCK_M"]) * c["SLICES"] * c["BLOCK_K"] * 2


def _default(device: Device, problem: Problem) -> Config:
    block_m = max(8, problem.m_bucket)
    return {
        "BLOCK_M": block_m,
        # Small tiles give many programs, which hide each other's start and end. Larger tiles read x less often but are slower.
        "BLOCK_N": 16,
        # Wider steps help only where loads are narrow. H100, M=4 N=K=4095: 24.7 us with 128, 32 with 64.
        "BLOCK_K": 128 if problem.k > 256 and not problem.aligned else 64,
        "SLICES": 4,
        "num_warps": 4,
        # With few programs, each keeps more loads in flight.
        "num_stages": 5 - (block_m == 16) - (problem.n > 32 * device.sms),
        "PDL": False,
    }


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    step = c["SLICES"] * c["BLOCK_K"]
    if c["BLOCK_M"] < problem.m_bucket:
        return "BLOCK_M is smaller than the number of rows of x"
    if c["BLOCK_M"] == 16 and problem.m_bucket <= 8:
        return "BLOCK_M is 16, but 8 is enough for the rows of x"
    if step >= 2 * problem.k and step > 256:
        return "a step (SLICES x BLOCK_K) is at least twice as wide as K"
    if (c["num_stages"] - 1) * _stage_bytes(c) > device.smem_bytes:
        return "more shared memory than the device has"
    if (c["num_stages"] - 1) * c["BLOCK_N"] * step * 2 < 16 << 10:
        return "less than 16 KB of weights in flight"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (8, 16),
        "BLOCK_N": (16, 32, 64),
        "BLOCK_K": (64, 128),
        "SLICES": (2, 4),
        "num_warps": (4,),
        "num_stages": (2, 3, 4, 5),
        # Not tuned: the gain of PDL depends on the neighbouring kernels, which a tuner of a single kernel does not see.
        "PDL": (False,),
    },
    refusal=_config_refusal,
)


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride, residual_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, BY_EIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release()
    if PDL:
        gdc_wait()
    if BY_EIGHTS:
        # The values do not change, but now the compiler knows that they are multiples of 8. Triton checks arguments only for
        # multiples of 16. Without this, K = 2056 would be loaded two bytes at a time, and without pipelining.
        K = K // 8 * 8
        x_stride = x_stride // 8 * 8
        w_stride = w_stride // 8 * 8
    first_col = tl.program_id(0) * BLOCK_N
    cols = (first_col + tl.arange(0, BLOCK_N))[None, :, None]
    rows = tl.arange(0, BLOCK_M)[None, :, None]
    ks = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    x_ptrs = x_ptr + rows * x_stride + ks
    w_ptrs = w_ptr + weight_rows(cols, N, GATED).to(tl.int64) * w_stride + ks
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, K, SLICES * BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=rows < M, other=0.0)
            w = tl.load(w_ptrs, mask=cols < N, other=0.0)
        else:
            x = tl.load(x_ptrs, mask=(rows < M) & (ks < K - k), other=0.0)
            w = tl.load(w_ptrs, mask=(cols < N) & (ks < K - k), other=0.0)
        acc = dot(w, tl.permute(x, (0, 2, 1)), acc)
        x_ptrs += SLICES * BLOCK_K
        w_ptrs += SLICES * BLOCK_K
    tile = tl.trans(tl.sum(acc, axis=0))
    finish(tile, y_ptr, bias_ptr, residual_ptr, 0, first_col, M, N, residual_stride, ACTIVATION, GATED)


# ---- launcher


def _by_eights(x: Tensor, weight: Tensor) -> bool:
    """Whether K and both row strides are multiples of 8, but not all of them multiples of 16."""
    return (weight.shape[1] | x.stride(0) | weight.stride(0)) % 16 == 8


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    function, gated = ACTIVATIONS[activation]
    y = empty_output(x, weight, gated)
    if y.numel():
        m, k = x.shape
        n = weight.shape[0]
        _skinny_kernel[(ceil_div(n, config["BLOCK_N"]),)](
            x, weight, bias, residual, y, m, n, k,
            x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0),
            ACTIVATION=function, GATED=gated, EVEN_K=k % (config["SLICES"] * config["BLOCK_K"]) == 0,
            BY_EIGHTS=_by_eights(x, weight), **{**config, **launch_options(config["PDL"])},
        )  # fmt: skip
    return y


SKINNY = Impl(name="skinny", releases=True, launch=_launch, space=SPACE, refuse=_refuse, work=skinny_work)
