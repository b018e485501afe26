"""`linear` for a few rows of x (M <= 4): multiply and add over streamed weight rows, no tensor cores.

Limited by the weight's bytes. A program owns BLOCK_N weight rows and walks them in steps of BLOCK_K, a whole step in registers
at once; warps meet nowhere before the end, so while one multiplies, the others of its SM wait for memory with up to 16 loads of
16 bytes a thread under way. Each row of x is multiplied in turn with the weights held: the arithmetic grows with M and the
bytes do not (at M = 8 an H100 would spend half its float32 rate to keep up with its memory).

PDL (programmatic dependent launch, sm_90): the program starts while the kernel before it still runs, fetches its first
weights, and only then waits for x. Right only when the kernel before does not write the weight.

Refuses: more than 4 rows, batches of weights, operands that are not dense along K.
"""

import triton
import triton.language as tl
import triton.language.extra.cuda as tlc
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.matmul_common import ACTIVATIONS, Problem, empty_output, finish, weight_rows
from tilewright.kernels.shapes import next_pow2
from tilewright.kernels.work import gemv_work
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["GEMV"]

_MAX_M = 2  # H100: at 4 rows the tensor cores of `skinny` win every shape, at 2 it is a draw (docs/log.md#skinny-products)


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.m_bucket > _MAX_M:
        return f"takes at most {_MAX_M} rows"
    if problem.batched:
        return "takes one weight, not a batch of them"
    if problem.x_major != "k" or problem.w_major != "k":
        return "needs x and the weight dense along K"
    if not problem.n or not problem.k:
        return "has nothing to stream: N or K is 0"
    if problem.dtype.itemsize > 4:
        return f"does not take {problem.dtype}"
    return None


# ---- space


def _default(device: Device, problem: Problem) -> Config:
    # Two programs an SM at least. Fewer rows of the weight want wider steps instead, for as many bytes under way.
    block_n = 4 if problem.n >= 8 * device.sms else 2
    widest = (8192 if block_n == 2 and problem.m_bucket == 1 else 2048) // problem.dtype.itemsize
    block_k = min(max(256, next_pow2(problem.k)), widest)
    if problem.k % block_k and problem.k % (block_k // 2) == 0:
        block_k //= 2
    # Four 16-byte loads a thread or more.
    warps = max(1, min(4, block_k * problem.dtype.itemsize // 512, block_n * block_k * problem.dtype.itemsize // 2048))
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "PDL": False}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    # 16-byte loads of one thread for one step.
    loads = c["BLOCK_N"] * c["BLOCK_K"] * problem.dtype.itemsize // (c["num_warps"] * 32 * 16)
    if c["BLOCK_K"] >= 2 * next_pow2(problem.k) and c["BLOCK_K"] > 256:
        return "BLOCK_K wider than the row needs"
    if c["BLOCK_K"] * problem.dtype.itemsize < 512 * c["num_warps"]:
        return "a row of x that is not one vector a thread changes layout through shared memory at every step"
    if loads < 2:
        return "fewer than two loads in flight a thread"
    if loads > 16 // max(1, problem.m_bucket // 2):
        return "a step that spills registers: too many loads a thread beside the sums of so many rows"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_N": (2, 4, 8, 16),
        "BLOCK_K": (256, 512, 1024, 2048, 4096),
        "num_warps": (1, 2, 4, 8),
        # What it gains depends on the kernels before and after, which a tuner of one kernel does not see.
        "PDL": (False,),
    },
    refusal=_config_refusal,
)

# ---- kernel


@triton.jit(do_not_specialize=["M"])
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride, residual_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first_col = tl.program_id(0) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)[:, None]
    ks = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + weight_rows(cols, N, GATED).to(tl.int64) * w_stride + ks[None, :]
    live = cols < N
    if PDL:
        tlc.gdc_launch_dependents()
    # Weights pass through once and would only push x out of L1.
    w = tl.load(w_ptrs, mask=live if EVEN_K else live & (ks < K)[None, :], other=0.0, cache_modifier=".cg")
    if PDL:
        tlc.gdc_wait()
    # For each row of x, the sums that one thread's vectors give: nothing crosses threads before the end.
    sums = ()
    for _ in tl.static_range(BLOCK_M):
        sums += (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)
    for k in range(0, K, BLOCK_K):
        left = ks < K - k
        if k > 0:
            w = tl.load(w_ptrs + k, mask=live if EVEN_K else live & left[None, :], other=0.0, cache_modifier=".cg")
        wide = w.to(tl.float32)
        added = ()
        for m in tl.static_range(BLOCK_M):
            x = tl.load(x_ptr + m * x_stride + k + ks, mask=m < M if EVEN_K else left & (m < M), other=0.0)
            products = tl.reshape(wide * x.to(tl.float32)[None, :], [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
            added += (sums[m] + tl.sum(products, axis=2),)
        sums = added
    rows = tl.arange(0, BLOCK_M)[:, None]
    tile = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in tl.static_range(BLOCK_M):
        tile += tl.where(rows == m, tl.sum(sums[m], axis=1)[None, :], 0.0)
    finish(tile, y_ptr, bias_ptr, residual_ptr, 0, first_col, M, N, residual_stride, ACTIVATION, GATED)


# ---- launcher


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    function, gated = ACTIVATIONS[activation]
    y = empty_output(x, weight, gated)
    m, k = x.shape
    n = weight.shape[0]
    if m:
        _gemv_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](
            x, weight, bias, residual, y, m, n, k,
            x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0),
            ACTIVATION=function, GATED=gated, EVEN_K=k % config["BLOCK_K"] == 0,
            BLOCK_M=next_pow2(m), VECTOR=16 // x.element_size(),
            **({"launch_pdl": True} if config["PDL"] else {}), **config,
        )  # fmt: skip
    return y


GEMV = Impl(name="gemv", launch=_launch, space=SPACE, refuse=_refuse, work=gemv_work)
