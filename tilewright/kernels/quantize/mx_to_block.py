"""Converts mxfp8 for products that need one scale per 128 columns: four adjacent blocks of 32 get the largest of their scales.

    fold_mx(codes, scales)          codes and scales of `formats.quantize(x, "mxfp8")` -> codes, scales [R, K / 128] float32
    fold_mx_weight(codes, scales)   the same with one scale per 128 x 128 elements, if that is accurate enough
    quantize_fold(x)                fold_mx of quantize_mx(x), in one launch: one read, one write

If the scale of a block increases by a factor of 2^n, its elements are divided by 2^n. This is exact, unless an element falls
below the smallest normal number, which is 2^-6 (e4m3; for e5m2 2^-14). Such an element is rounded to a multiple of 2^-9 (2^-16)
of the new scale, with an error of at most half of that. Quantisers choose scales such that the largest element of a block is at
least 2^8 (2^15) times its scale; this holds for the block with the largest scale. So the error of an element is at most 2^-18
(2^-32) of the largest magnitude among its 128. This is far below 2^-13, where sm_90's tensor cores truncate products.

With one scale per 128 x 128 elements, the 128 elements of a row may lie d binades below the largest element of their block.
Then the error is up to 2^-(18 - d) of the row's largest magnitude. `fold_mx_weight` uses one scale per 128 x 128 elements if d
is at most 5, which gives 2^-13. Otherwise it keeps a scale for each row.

In a block whose scale is NaN, all elements become NaN; the adjacent blocks do not change. The smallest scale, 2^-127, is a
subnormal float32. quantize_fold is limited by bytes: K elements in, K bytes and the scales out. The scales of consecutive rows
are adjacent in memory, because `block_scaled_linear` reads this layout fastest.
Not supported: a K that is not a multiple of 32; a last dimension with a stride other than 1 (the public function copies it
first); cards before sm_89.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS, encode
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.shapes import ceil_div, rows_of, rows_ready
from tilewright.kernels.quantize.inputs import quantize_mx_arguments
from tilewright.kernels.quantize.per_block import MX_FORMATS, power_scales_of
from tilewright.kernels.quantize.per_row import check_format, format_example, format_problem, matrix_of, refuse_format
from tilewright.op import Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["fold_mx", "fold_mx_weight", "quantize_fold", "quantize_fold_op"]

# Divided by 2^20 or more, every element is zero in e4m3; in e5m2, by 2^35 or more.
_FURTHEST = 40
_MOST_BINADES_BELOW = 5

# ---- reference


def fold_mx(codes: Tensor, scales: Tensor, block_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Convert to one scale per 128 columns of `block_rows` rows, instead of one per 32 columns of a row.

    Args:
        codes: [R, K], float8_e4m3fn or float8_e5m2; K is a multiple of 32.
        scales: [R, K / 32], float8_e8m0fnu.

    Returns:
        (codes [R, K], scales [R / block_rows, K / 128] rounded up, float32).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_mx("fold_mx", codes, scales)
    (rows, cols), groups = codes.shape, -(-codes.shape[1] // 128)
    biased = scales.view(torch.uint8).to(torch.int32)
    is_nan = biased == 255
    biased = biased.masked_fill(is_nan, 0)
    high = torch.nn.functional.pad(biased, (0, 4 * groups - biased.shape[1], 0, -rows % block_rows))
    top = high.unflatten(0, (-1, block_rows)).unflatten(-1, (groups, 4)).amax((1, 3)) if high.numel() else high[:, :groups]
    down = (top.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(4, 1)[:, : cols // 32] - biased).clamp_max(_FURTHEST)
    factors = torch.where(is_nan, torch.nan, ((127 - down) << 23).view(torch.float32))
    folded = (codes.to(torch.float32) * factors.repeat_interleave(32, 1)).to(codes.dtype)
    return folded, torch.where(top == 0, 1 << 22, top << 23).view(torch.float32)


def fold_mx_weight(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """`fold_mx` for a weight: one scale per 128 x 128 elements, if no row's 128 lie more than 5 binades below their block.

    Otherwise the weight gets a scale for each row. Products with one scale per 128 x 128 elements are faster. The call waits
    for the device.

    Returns:
        (codes [N, K], scales [N / 128 rounded up, K / 128 rounded up] or [N, K / 128 rounded up], float32).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    by_row, by_block = fold_mx(codes, scales), fold_mx(codes, scales, 128)
    rows = codes.shape[0]
    below = torch.log2(by_block[1].repeat_interleave(128, 0)[:rows]) - torch.log2(by_row[1])
    groups = -(-codes.shape[1] // 128)
    padded = torch.nn.functional.pad(codes.to(torch.float32), (0, 128 * groups - codes.shape[1]))
    counts = padded.unflatten(1, (groups, 128)).ne(0).any(-1) if padded.numel() else below.bool()
    return by_block if not bool((counts & (below > _MOST_BINADES_BELOW)).any()) else by_row


def _check_mx(name: str, codes: Tensor, scales: Tensor) -> None:
    if codes.dim() != 2 or codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or codes.shape[1] % 32:
        raise ValueError(f"{name}: codes must be float8 [R, K], 32 dividing K; got {tuple(codes.shape)} {codes.dtype}")
    if scales.shape != (codes.shape[0], codes.shape[1] // 32) or scales.dtype != torch.float8_e8m0fnu:
        raise ValueError(
            f"{name}: scales of codes {tuple(codes.shape)} must be float8_e8m0fnu {(codes.shape[0], codes.shape[1] // 32)}; "
            f"got {tuple(scales.shape)} {scales.dtype}"
        )


def _reference(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    codes, scales, _ = encode(matrix_of(x), format)
    codes, folded = fold_mx(codes, scales)
    out = _column_scales(x)
    return codes.view(x.shape), out.copy_(folded.view(out.shape))


def _column_scales(x: Tensor) -> Tensor:
    """Memory for scales [..., K / 128] with a stride of 1 between rows."""
    rows, groups = x.shape[:-1], -(-x.shape[-1] // 128)
    return torch.empty((groups, rows.numel()), dtype=torch.float32, device=x.device).t().view(*rows, groups)


def _cost(x: Tensor, format: str) -> Cost:
    scales = 4 * x.shape[:-1].numel() * -(-x.shape[-1] // 128)
    return Cost(flops=6 * x.numel(), bytes=x.nbytes + x.numel() + scales)


# ---- space and examples

SPACE = Space(
    default=lambda device, problem: {"BLOCK_T": 8, "BLOCK_G": 4, "num_warps": 4},
    axes={"BLOCK_T": (1, 4, 8, 16), "BLOCK_G": (1, 2, 4, 8, 16, 32), "num_warps": (2, 4, 8)},
    refusal=lambda device, problem, c: (
        None if 8 <= 4 * c["BLOCK_T"] * c["BLOCK_G"] // c["num_warps"] <= 64 else "under 8 elements per thread, or over 64"
    ),
)


_EXAMPLES = (
    format_example("rows", "mxfp8", 4, 256),
    format_example("deep", "mxfp8", 2, 3, 96),
    format_example("strided", "mxfp8", 5, 160, row_stride=192, dtype=torch.float16),
    format_example("one", "mxfp8", 1, 32, dtype=torch.float32),
    format_example("e5m2", "mxfp8-e5m2", 3, 160),
)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _fold_kernel(
    x_ptr, q_ptr, scale_ptr, n_rows, x_row_stride,
    D: tl.constexpr, EXPONENT: tl.constexpr, FURTHEST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A tile is BLOCK_T rows of BLOCK_G groups of four blocks of 32 columns."""
    release()
    GROUPS: tl.constexpr = (D + 127) // 128
    PER_ROW: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G
    row = tl.program_id(0) // PER_ROW * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(0) % PER_ROW * BLOCK_G + tl.arange(0, BLOCK_G)
    rows = row[:, None, None].to(tl.int64)
    blocks = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    cols = tl.reshape(blocks, [4 * BLOCK_G])[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    inside = (rows < n_rows) & (cols < D)
    x = tl.load(x_ptr + row_start(rows, x_row_stride, D) + cols, mask=inside, other=0.0)
    biased, inverse = power_scales_of(tl.max(magnitude(x), axis=2), EXPONENT)
    is_nan = biased == 255
    low = tl.where(is_nan, 0, biased.to(tl.int32))
    top = tl.max(tl.reshape(low, [BLOCK_T, BLOCK_G, 4]), axis=2, keep_dims=True)
    down = tl.minimum(tl.reshape(tl.broadcast_to(top, [BLOCK_T, BLOCK_G, 4]), [BLOCK_T, 4 * BLOCK_G]) - low, FURTHEST)
    factor = tl.where(is_nan, float("nan"), ((127 - down) << 23).to(tl.float32, bitcast=True))
    # Elements are first rounded with their block's own scale, as in MX.
    q = encode_tile(x, inverse[:, :, None], q_ptr.dtype.element_ty).to(tl.float32) * factor[:, :, None]
    tl.store(q_ptr + rows * D + cols, q.to(q_ptr.dtype.element_ty), mask=inside)
    scale = tl.where(top == 0, 1 << 22, top << 23).to(tl.float32, bitcast=True)
    scale_ptrs = scale_ptr + group[None, :].to(tl.int64) * n_rows + row[:, None]
    tl.store(scale_ptrs, tl.reshape(scale, [BLOCK_T, BLOCK_G]), mask=(row[:, None] < n_rows) & (group[None, :] < GROUPS))


def _launch(config: Config, x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    form, (rows, row_stride) = FORMATS[format], rows_of(x)
    q = torch.empty(x.shape, dtype=form.dtype, device=x.device)
    scale = _column_scales(x)
    if rows:
        groups = -(-x.shape[-1] // 128)
        _fold_kernel[(ceil_div(rows, config["BLOCK_T"]) * ceil_div(groups, config["BLOCK_G"]),)](
            x, q, scale, rows, row_stride, D=x.shape[-1], EXPONENT=form.exponent, FURTHEST=_FURTHEST, **UNFUSED, **config
        )
    return q, scale


quantize_fold_op = Op(
    name="quantize_fold",
    reference=_reference,
    problem=format_problem,
    cost=_cost,
    examples=_EXAMPLES,
    make=quantize_mx_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, refuse=refuse_format, batch_invariant=True),),
)


def quantize_fold(x: Tensor, format: str = "mxfp8") -> tuple[Tensor, Tensor]:
    """`fold_mx(*quantize_mx(x))`, with the same bits.

    Arguments and errors are those of `quantize_mx`.

    Returns:
        (codes [..., K], contiguous, scale [..., K / 128 rounded up] float32, with a stride of 1 between rows).
    """
    check_format("quantize_fold", x, format, MX_FORMATS)
    if x.shape[-1] % 32:
        raise ValueError(f"quantize_fold: K is {x.shape[-1]} in x {tuple(x.shape)}, wanted a multiple of 32; pad x")
    return quantize_fold_op(rows_ready(x), format)
