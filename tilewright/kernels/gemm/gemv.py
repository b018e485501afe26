"""`linear` for one row of x: multiply and add on CUDA cores over streamed weight rows, without tensor cores.

Limited by reading the weight. A program owns BLOCK_N weight rows and reads them in steps of BLOCK_K, with a whole step in
registers at once. The warps do not synchronise before the end. So while one warp multiplies, the other warps of the SM have
loads in flight, up to 16 loads of 16 bytes per thread.

With PDL (programmatic dependent launch, sm_90; launch/pdl.py), a program starts while the preceding kernel still runs. It loads
its first weights and its bias, and then waits before it reads x. This is correct only if the preceding kernel writes neither
weight nor bias. `optimize` makes sure of that; inside `op.early_launches` both must be parameters.

A separate kernel handles 16-bit weights, without a gate, whose rows do not start at multiples of 16 bytes or do not have a
multiple of 16 elements. As in `uneven` (unaligned_skinny.py), each of its programs takes rows of one class, which all have the
same alignment. So weight loads keep their full width. x is read from the first aligned column of that class, two bytes per
load.

Refuses: more rows, batches of weights, operands that are not dense along K.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.language.extra.cuda import gdc_wait

from tilewright.hw.device import Device
from tilewright.kernels.gemm.pad_operands import aligned_base, class_count, is_aligned
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, empty_output, finish, weight_rows
from tilewright.kernels.gemm.unaligned_skinny import first_whole
from tilewright.kernels.gemm.work import gemv_work
from tilewright.kernels.hopper.early import early
from tilewright.kernels.launch.pdl import launch_options, release
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["GEMV"]


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.m_bucket > 1:
        return "supports one row of x only: from two rows on, the tensor cores of `skinny` are faster"
    if problem.batched:
        return "supports a single weight only, not a batch of weights"
    if problem.x_major != "k" or problem.w_major != "k":
        return "needs x and the weight contiguous along K"
    if not problem.n or not problem.k:
        return "N or K is 0: there is nothing to load"
    if problem.dtype.itemsize > 4:
        return f"does not support {problem.dtype}"
    return None


# ---- space


def _default(device: Device, problem: Problem) -> Config:
    # At least two programs per SM. With fewer weight rows, use wider steps to keep as many bytes in flight.
    block_n = 4 if problem.n >= 8 * device.sms else 2
    widest = (8192 if block_n == 2 else 2048) // problem.dtype.itemsize
    block_k = min(max(256, next_pow2(problem.k)), widest)
    if block_k > 256 and problem.k % block_k and problem.k % (block_k // 2) == 0:
        block_k //= 2
    # At least four 16-byte loads per thread.
    warps = max(1, min(4, block_k * problem.dtype.itemsize // 512, block_n * block_k * problem.dtype.itemsize // 2048))
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "PDL": False}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    # The number of 16-byte loads per thread and step.
    loads = c["BLOCK_N"] * c["BLOCK_K"] * problem.dtype.itemsize // (c["num_warps"] * 32 * 16)
    if c["BLOCK_K"] >= 2 * next_pow2(problem.k) and c["BLOCK_K"] > 256:
        return "BLOCK_K wider than the row needs"
    if c["BLOCK_K"] * problem.dtype.itemsize < 512 * c["num_warps"]:
        return "with less than 16 bytes of x per thread, x changes its layout through shared memory in every step"
    if loads < 2:
        return "fewer than two loads in flight per thread"
    if loads > 16:
        return "more than 16 loads per thread and step spill registers"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_N": (2, 4, 8, 16),
        "BLOCK_K": (256, 512, 1024, 2048, 4096),
        "num_warps": (1, 2, 4, 8),
        # Not tuned: the gain of PDL depends on the neighbouring kernels, which a tuner of a single kernel does not see.
        "PDL": (False,),
    },
    refusal=_config_refusal,
)

# ---- kernel


@triton.jit
def _bias_of(bias_ptr, first_col, STEP: tl.constexpr, N, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bias, [1, BLOCK_N], loaded with the weights. Loaded after the sums, it would be a tenth of a small product's time."""
    if bias_ptr is None:
        return tl.zeros([1, BLOCK_N], tl.float32)
    else:
        cols = first_col + tl.arange(0, BLOCK_N) * STEP
        return tl.load(bias_ptr + weight_rows(cols, N, GATED), mask=cols < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, N, K, w_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, ONE_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release()
    first_col = tl.program_id(0) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)[:, None]
    ks = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + weight_rows(cols, N, GATED).to(tl.int64) * w_stride + ks[None, :]
    live = cols < N
    # Weights are read only once, so caching them in L1 would only evict x.
    w = tl.load(w_ptrs, mask=live if EVEN_K else live & (ks < K)[None, :], other=0.0, cache_modifier=".cg")
    bias = _bias_of(bias_ptr, first_col, 1, N, GATED, BLOCK_N)
    if PDL:
        gdc_wait()
    # Partial sums per thread: no reduction across threads before the end.
    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    # A row that fits into one step needs no loop, so all of its loads are in flight at once. With longer rows some would spill.
    for k in range(0, BLOCK_K if ONE_STEP else K, BLOCK_K):
        left = ks < K - k
        if k > 0:
            w = tl.load(w_ptrs + k, mask=live if EVEN_K else live & left[None, :], other=0.0, cache_modifier=".cg")
        x = tl.load(x_ptr + k + ks) if EVEN_K else tl.load(x_ptr + k + ks, mask=left, other=0.0)
        products = tl.reshape(w.to(tl.float32) * x.to(tl.float32)[None, :], [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
        sums += tl.sum(products, axis=2)
    tile = tl.sum(sums, axis=1)[None, :] + bias
    finish(tile, y_ptr, None, residual_ptr, 0, first_col, 1, N, 0, ACTIVATION, GATED)


@triton.jit(do_not_specialize=["K", "lead", "w_stride"])
def _uneven_gemv_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, N, K, lead, w_stride,
    ACTIVATION: tl.constexpr, CLASSES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """w_ptr is 16-byte aligned, `lead` elements before the weight. Rows CLASSES apart have the same alignment."""
    kind = tl.program_id(0) % CLASSES
    first_col = kind + tl.program_id(0) // CLASSES * (BLOCK_N * CLASSES)
    begin = first_whole(lead, w_stride, kind)
    cols = (first_col + tl.arange(0, BLOCK_N) * CLASSES)[:, None]
    ks = tl.arange(0, BLOCK_K)
    starts = lead + cols.to(tl.int64) * w_stride
    # The sum is already a multiple of 8; writing it this way tells the compiler, which then emits 16-byte loads. For the same
    # reason masks are constant over groups of 8.
    w_ptrs = w_ptr + (starts + begin) // 8 * 8 + ks[None, :]
    whole = tl.maximum(K - begin, 0) // 8 * 8
    bias = _bias_of(bias_ptr, first_col, CLASSES, N, False, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for k in range(0, whole, BLOCK_K):
        inside = (k + ks) // 8 * 8 < whole
        w = tl.load(w_ptrs + k, mask=(cols < N) & inside[None, :], other=0.0, cache_modifier=".cg")
        x = tl.load(x_ptr + begin + k + ks, mask=inside, other=0.0)
        products = tl.reshape(w.to(tl.float32) * x.to(tl.float32)[None, :], [BLOCK_N, BLOCK_K // 8, 8])
        sums += tl.sum(products, axis=2)
    # The remaining columns: at most 7 before the aligned part and 7 after it.
    at = tl.arange(0, 16)
    k = tl.where(at < begin, at, at + whole)
    w = tl.load(w_ptr + starts + k[None, :], mask=(cols < N) & (k < K)[None, :], other=0.0)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    tile = tl.sum(sums, axis=1) + tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    finish(tile[None, :] + bias, y_ptr, None, residual_ptr, 0, first_col, 1, N, 0, ACTIVATION, False, COL_STEP=CLASSES)


def _stays(operand: Tensor | None) -> bool:
    """Whether no kernel writes this operand during a step: true for parameters and None. Others may be results of kernels."""
    return operand is None or isinstance(operand, Parameter)


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    function, gated = ACTIVATIONS[activation]
    y = empty_output(x, weight, gated)
    if y.numel():
        n, k = weight.shape
        # If Triton does not know K to be a multiple of 16, the plain kernel's masked loads become narrow (2049^2: 10.1 us, here
        # 5.5 us).
        if x.element_size() == 2 and not gated and (k % 16 or not is_aligned(weight)):
            classes, (base, lead) = class_count(weight), aligned_base(weight)
            _uneven_gemv_kernel[(classes * ceil_div(ceil_div(n, classes), config["BLOCK_N"]),)](
                x, base, bias, residual, y, n, k, lead, weight.stride(0), ACTIVATION=function, CLASSES=classes,
                BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"], num_warps=config["num_warps"],
            )  # fmt: skip
            return y
        _gemv_kernel[(ceil_div(n, config["BLOCK_N"]),)](
            x, weight, bias, residual, y, n, k, weight.stride(0),
            ACTIVATION=function, GATED=gated, EVEN_K=k % config["BLOCK_K"] == 0, ONE_STEP=k <= config["BLOCK_K"] <= 2048,
            VECTOR=16 // x.element_size(),
            **{**config, **launch_options(config["PDL"] or (early(x, 1) and _stays(weight) and _stays(bias)))},
        )  # fmt: skip
    return y


GEMV = Impl(name="gemv", releases=True, launch=_launch, space=SPACE, refuse=_refuse, work=gemv_work)
