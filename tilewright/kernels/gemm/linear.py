"""Matrix products with an epilogue: y = activation(x @ weight^T + bias) + residual.

    x [M, K], weight [N, K] -> [M, N];  or a batch of both, x [B, M, K], weight [B, N, K] -> [B, M, N]. bias is [N].
    bf16, fp16 or fp32; all operands have the same dtype. The product is accumulated in float32, the epilogue is computed in
    float32, and the result is rounded once, at the end.

activation is one of none, relu, gelu, gelu_tanh, silu, silu_mul, gelu_mul. The last two are gated: the weight is [2F, K], gate
half first, and y = act(x @ gate^T) * (x @ up^T) is [M, F]. The residual is added last. With K = 0 the product is zero and the
epilogue is applied to it; with M = 0 or N = 0 nothing is computed.

With few rows the time is set by reading the weight, with hundreds of rows by the tensor cores. These are the implementations,
in order of preference. Each has its own file, which states what it refuses:

    gemv         one row: multiply and add on CUDA cores, the weight is streamed through registers
    skinny       at most 16 rows: tensor cores, the weight is streamed through shared memory
    vendor       cuBLAS
    sm90         many rows, Hopper: Gluon, warp-specialised (one producer warp, two consumer warpgroups); any alignment
    triton_tma   many rows, sm_90 and up: persistent, tiles are loaded by the copy engine (TMA)
    triton       any shape and any layout
    uneven       at most 64 rows, operands of any alignment: the weight is read in place, in classes of rows that have the
                 same alignment
    uneven_tma   the same for up to 1024 rows, sm_90 and up, with TMA. Meant for 17 to 256 rows and weights that are not small
    sm90_invariant  `sm90` without split-K: the bits of a row do not depend on its batch. Only for aligned 16-bit weights
    invariant    `triton` with a single config for every number of rows, for the same purpose. (Each of the other
                 implementations is chosen for a range of row counts, so a row moves from one to the next as its batch grows.)

float32 is multiplied as float32. Only `vendor` uses TF32, where the program enables it in torch (torch.backends.cuda.matmul).

Not supported: gradients, mixed dtypes, a bias per batch entry. On the CPU, where the reference runs, a 16-bit product is
rounded before its epilogue: forming it in float32 would mean converting the weight at every call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import activated
from tilewright.kernels.gemm.cublas import VENDOR
from tilewright.kernels.gemm.gemv import GEMV
from tilewright.kernels.gemm.inputs import linear_arguments
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, problem_of
from tilewright.kernels.gemm.skinny import SKINNY
from tilewright.kernels.gemm.sm90 import SM90, SM90_INVARIANT
from tilewright.kernels.gemm.tile import INVARIANT, TRITON
from tilewright.kernels.gemm.tma import TRITON_TMA
from tilewright.kernels.gemm.unaligned_skinny import MOST_ROWS as UNEVEN_ROWS
from tilewright.kernels.gemm.unaligned_skinny import UNEVEN
from tilewright.kernels.gemm.unaligned_tma import UNEVEN_TMA
from tilewright.kernels.gemm.work import library_activates
from tilewright.kernels.launch.autograd import dense
from tilewright.kernels.launch.shapes import ceil_div, rows_ready
from tilewright.op import Example, Inputs, Op

__all__ = ["add_product", "check_epilogue", "linear_op", "matmul", "operand_ready"]


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    if x.dim() == 2:
        y = F.linear(x, weight, bias)
    else:
        y = torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias, x, weight.mT)
    if activation == "none" and residual is None:
        return y
    y = activated(y.to(torch.promote_types(y.dtype, torch.float32)), activation)
    if residual is not None:
        y.add_(residual)
    return y.to(x.dtype)


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Cost:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()
    n = weight.shape[-2]
    outputs = rows * (n // 2 if ACTIVATIONS[activation][1] else n)
    moved = x.nbytes + weight.nbytes + outputs * x.element_size()
    moved += sum(t.nbytes for t in (bias, residual) if t is not None)
    return Cost(flops=2 * rows * n * x.shape[-1], bytes=moved)


# ---- examples


@Example.of
def _example(
    inputs: Inputs,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    activation: str = "none",
    *,
    bias: bool = False,
    residual: bool = False,
    batch: tuple[int, ...] = (),
    m_major: bool = False,
    n_major: bool = False,
    row_stride: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, str, Tensor | None]:
    def matrix(rows: int, cols: int, transposed: bool = False, scale: float = 1.0) -> Tensor:
        if transposed:
            return inputs.randn(*batch, cols, rows, dtype=dtype, scale=scale).mT
        return inputs.randn(*batch, rows, max(cols, row_stride), dtype=dtype, scale=scale)[..., :cols]

    width = n // 2 if ACTIVATIONS[activation][1] else n
    return (
        matrix(m, k, m_major),
        matrix(n, k, n_major, scale=max(k, 1) ** -0.5),
        inputs.randn(n, dtype=dtype) if bias else None,
        activation,
        inputs.randn(*batch, m, width, dtype=dtype) if residual else None,
    )


EXAMPLES = (
    _example("decode", 1, 16, 256),
    _example("decode gated", 3, 12, 192, activation="silu_mul", residual=True),
    _example("decode ragged", 2, 7, 300, torch.float16, bias=True, residual=True),
    _example("batch 16", 16, 40, 136, activation="gelu_mul", bias=True),
    _example("rows", 70, 96, 128, activation="silu", bias=True),
    _example("rows gated", 33, 72, 64, torch.float16, "silu_mul", residual=True),
    _example("rows odd", 37, 45, 171, activation="silu", bias=True, residual=True),
    _example("odd", 5, 9, 33, torch.float32, "gelu_tanh", bias=True),
    _example("one", 1, 1, 1, torch.float32, "relu"),
    _example("strided", 3, 12, 64, activation="gelu", row_stride=80),
    _example("nn", 20, 48, 64, n_major=True),
    _example("tn", 20, 48, 64, torch.float32, m_major=True, n_major=True),
    _example("batched", 18, 24, 40, torch.float16, "relu", bias=True, residual=True, batch=(2,)),
    _example("no rows", 0, 8, 16),
    _example("no k", 3, 8, 0, activation="silu", bias=True),
)

# ---- op


_CUBLAS_OF_16_ROWS = frozenset({(8192, 8192), (10240, 5120)})
"""The measured (N, K) for which cuBLAS is 2 to 3 % faster than every config of `skinny` (H100, docs/log.md)."""


def _odd_eights(problem: Problem) -> bool:
    """Whether K is a multiple of 8 but not of 16, with 2 to 16 rows. In this case `skinny` needs a mask at every step of K.

    H100, speed relative to cuBLAS: 16 x 2056 x 2056 0.84, 16 x 4104 x 4104 0.87, 16 x 4096 x 1000 0.76, 4 x 2056 x 2056 0.96.
    Not measured: results whose rows do not start at multiples of 16 bytes, and epilogues that cuBLAS does not have.
    """
    plain = problem.activation == "none" and not (problem.bias and problem.residual) and not problem.batched
    aligned = problem.aligned and problem.n % 8 == 0 and problem.dtype.itemsize == 2
    return 1 < problem.m_bucket <= 16 and problem.k % 16 == 8 and plain and aligned


_SHORT_FLOPS = 5e9
_EVEN = 0.9


def _adds_first(device: Device, problem: Problem) -> bool:
    """Whether `sm90` is faster than cuBLAS for a product with a residual.

    `sm90` adds the residual in its epilogue. cuBLAS copies it first (addmm) or adds it in a separate kernel, which takes 2 to
    5 us at 64 to 1024 x 4096. The figures below are from an H100, speed relative to cuBLAS (studies/residual.json,
    linear-epilogue.json).

    `sm90` is faster for short products: 1.09 to 1.17 at 197 and 1024 rows, N 768, K 768 and 3072; 256 rows 1.09 and 0.96. It is
    also faster where the tiles of `sm90` leave few SMs idle in the last wave: 256, 1024 and 4096 rows x 4096 x 4096 1.03 to
    1.12, 1024 and 4096 x 14336 1.03 and 1.06, 128 x 14336 1.09. (512 and 2048 x 14336 had 0.96 and 0.99 with the previous
    version of the kernel, whose product alone was at 0.92 and is now at 1.00; these were not timed again.) It is slower where
    many SMs are idle: 256 and 512 x 5120 x 25600 0.86 and 0.91, 6304 x 768 x 3072 0.81.
    """
    if problem.dtype.itemsize != 2:
        return False
    if problem.m_bucket >= 256 and 2.0 * problem.m_bucket * problem.n * problem.k <= _SHORT_FLOPS:
        return True
    if problem.n < 2048 or problem.m_bucket < 128 or (problem.m_bucket == 128 and problem.n * problem.k < 4e7):
        return False
    config = SM90.space.default(device, problem)
    tiles = ceil_div(problem.m_bucket, config["BLOCK_M"]) * ceil_div(problem.n, config["BLOCK_N"])
    return tiles >= _EVEN * ceil_div(tiles, device.sms) * device.sms


_TMA_ROWS = range(32, 257)
_TMA_WEIGHT = 4e6
"""The row buckets, and the least number of weight elements, for which the three launches of `uneven_tma` are worth their cost.

H100, times in us; in brackets the implementation that would run otherwise. 32 x 4095 x 4095 20.0 (`uneven` 23.2), 64 rows 20.3
(31.4), 128 rows 22.1 (`sm90` 40.4), 256 rows 27.1 (43.0); 127 x 4099 x 2053 16.0 (21.8); 256 x 2049 x 2049 13.3 (14.4). With
older configs: 16 x 4095 x 4095 23.1 (`uneven` 19.2) and 1009 x 1013 x 1019 15.2 (12.5). Below 256 rows no weight of less than
8.4e6 elements was measured."""


def _three_launches(problem: Problem) -> bool:
    """Whether `uneven_tma` is the fastest: for unaligned weights, and for an unaligned x with a long K (H100, times in us).

    `sm90` copies every weight that is not aligned, whatever its K: 17 to 256 x 4096 x 4096 19.4 to 26.6 (`sm90` 39 to 41,
    `uneven` 20.8 to 25.1 up to 64 rows), x 14336 51 to 72 (132 to 145; 58 to 76). If only x is unaligned, its copy is small.
    Then 4096 x 4096 is slower with `uneven_tma` (128 rows 21.6, `sm90` 20.0; 256 rows 25.5, 22.5). 4096 x 14336 is faster,
    because split-K fills the card (17 rows 48.3, `uneven` 52.2; 64 rows 49.5, `sm90` 52.4; 128 rows equal; 256 rows 67.1,
    75.2). For the choice of row counts see docs/log.md.
    """
    if problem.m_bucket not in _TMA_ROWS or problem.n * problem.k < _TMA_WEIGHT:
        return False
    return problem.k % 8 != 0 or not problem.w_aligned or (not problem.aligned and problem.k > 2 * problem.n)


def _in_place(problem: Problem) -> bool:
    """Whether `uneven` is the fastest: few rows, unaligned operands. Not for 64 rows x 4096 x 4096 if only x is unaligned."""
    if problem.aligned or problem.gated or problem.m_bucket > UNEVEN_ROWS:
        return False
    x_alone = problem.k % 8 == 0 and problem.w_aligned
    return not (x_alone and problem.m_bucket == 64 and problem.n * problem.k >= _TMA_WEIGHT)  # 23.7 us, `sm90` 19.6


def _first(device: Device, problem: Problem) -> str | None:
    """The implementation to try first on Hopper, where it is not the first in the list. H100, speed relative to cuBLAS.

    cuBLAS stores the product, and a second kernel reads it again to apply the activation. (Exceptions are ReLU and the tanh
    form of GELU after a bias.) From 256 rows on, `sm90` is 1.0 to 1.37 times as fast for gated products, and 0.97 to 1.4 times
    with GELU. cuBLAS is also much slower if the rows of an operand or of the result do not start at multiples of 16 bytes: by
    a factor of 1.5 with one row, 1.8 at 256 rows, 3 to 8 above.
    """
    if not device.is_hopper:
        return None
    uneven = not problem.aligned or problem.n % (16 if problem.gated else 8) != 0
    if problem.m_bucket == 1:
        return "gemv" if not problem.aligned and not problem.gated else None
    if (problem.m_bucket == 16 and (problem.n, problem.k) in _CUBLAS_OF_16_ROWS) or _odd_eights(problem):
        return "vendor"
    if _three_launches(problem) and UNEVEN_TMA.refusal(device, problem) is None:
        return "uneven_tma"
    if _in_place(problem):
        return "uneven"
    if problem.m_bucket > 16 and uneven:
        return "sm90"
    if problem.activation == "none" and not problem.batched:
        return "sm90" if problem.residual and _adds_first(device, problem) else None
    if problem.m_bucket < 256 or problem.batched:
        return None
    return "vendor" if library_activates(problem.dtype, problem.activation, problem.bias, problem.batched) else "sm90"


linear_op = Op(
    name="linear",
    reference=_reference,
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    make=linear_arguments,
    first=_first,
    rows_in_problem=True,
    impls=(GEMV, SKINNY, VENDOR, SM90, TRITON_TMA, TRITON, UNEVEN, UNEVEN_TMA, SM90_INVARIANT, INVARIANT),
)

# ---- public functions


def check_epilogue(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    lead: tuple[int, ...],
    names: tuple[str, str] = ("x", "weight"),
) -> tuple[int, ...]:
    """Check the operands and return the shape of the output: `lead` plus its last dimension. The weight is read as [..., N, K].

    `names` are the names of x and the weight in error messages.

    Raises:
        ValueError: the activation is unknown, or shapes, dtypes or devices do not fit. The caller checks K.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    n = weight.shape[-2]
    if ACTIVATIONS[activation][1]:
        if n % 2:
            raise ValueError(f"{op}: {activation} needs an even N of {names[1]}, for a gate half and an up half; got {n}")
        width = n // 2
    else:
        width = n
    shape = (*lead, width)
    for name, other, wanted in (("bias", bias, (n,)), ("residual", residual, shape)):
        if other is not None and other.shape != wanted:
            raise ValueError(f"{op}: {name} must be {list(wanted)}; got {list(other.shape)}")
    for name, other in ((names[1], weight), ("bias", bias), ("residual", residual)):
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(
                f"{op}: {name} must have the dtype and device of {names[0]}, {x.dtype} on {x.device}; "
                f"got {other.dtype} on {other.device}"
            )
    return shape


def operand_ready(x: Tensor) -> Tensor:
    """x [..., M, K] if it is dense along K, or along M with M > 1, and its other stride is not 0; otherwise a contiguous copy.

    Kernels receive one stride of an operand. TMA was not tested with a stride of 0, as `expand` makes it.
    """
    down, along = x.stride(-2), x.stride(-1)
    return x if (along == 1 and down) or (down == 1 and along and x.shape[-2] > 1) else x.contiguous()


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none", residual: Tensor | None = None
) -> Tensor:
    """activation(a @ b + bias) + residual. Either operand may be a transposed view; it is read in place.

    Args:
        a: [..., M, K], bf16, fp16 or fp32.
        b: [K, N], or [..., K, N] with leading dims that broadcast with a's.
        bias: [N].
        activation: none, relu, gelu, gelu_tanh, silu; or silu_mul, gelu_mul, where b's columns are gate and up, F each, and
            the output is act(gate) * up.
        residual: the shape of the output.

    Returns:
        [..., M, N] ([..., M, F] with silu_mul and gelu_mul) of a's dtype, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: a must be [..., M, K] and b [..., K, N] with one K; got a {list(a.shape)} and b {list(b.shape)}"
        )
    bias = dense(bias)
    if b.dim() == 2:
        shape = check_epilogue("matmul", a, b.mT, bias, activation, residual, a.shape[:-1], ("a", "b"))
        if residual is not None:
            residual = rows_ready(residual.flatten(0, -2))
        x = operand_ready(a if a.dim() == 2 else a.flatten(0, -2))
        return linear_op(x, operand_ready(b.mT), bias, activation, residual).view(shape)
    try:
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        raise ValueError(
            f"matmul: leading dims of a and b must broadcast; got a {list(a.shape)} and b {list(b.shape)}"
        ) from error
    shape = check_epilogue("matmul", a, b.mT, bias, activation, residual, (*lead, a.shape[-2]), ("a", "b"))
    if residual is not None:
        residual = residual.flatten(0, -3).contiguous()
    x = operand_ready(a.expand(*lead, *a.shape[-2:]).flatten(0, -3))
    weight = operand_ready(b.mT.expand(*lead, *b.mT.shape[-2:]).flatten(0, -3))
    return linear_op(x, weight, bias, activation, residual).view(shape)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in float32 or wider, for a gradient that is computed in parts. `total` is overwritten; None stands for 0.

    cuBLAS accumulates into the float32 total itself, at the speed of the product. (H100, 131072 x 4096 from 2048 rows: 3.5 ms;
    a 16-bit product takes 3.2 ms, and the addition another 1.7 ms.) On a CPU, and where rows would not be aligned, the product
    and the addition are two steps.

    Args:
        total: [M, N].
        a: [M, K], bf16, fp16 or fp32.
        b: [K, N] of a's dtype.
    """
    if a.is_cuda and a.dtype.itemsize == 2 and (a.shape[0] | b.shape[1]) % 8 == 0:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    part = matmul(a, b)
    return part.to(torch.promote_types(part.dtype, torch.float32)) if total is None else total.add_(part)
