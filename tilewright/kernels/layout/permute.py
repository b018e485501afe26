"""Copies a tensor into a contiguous result with its dimensions in another order: transposition, channels last, heads first ...

    y[i_0, ..., i_n] = x[with index i_k on dimension dims[k]]

    x: any strides, any dtype of 1, 2, 4 or 8 bytes; y: contiguous

First, dimensions that stay neighbours are merged, and dimensions of size 1 are dropped. The rest has one of two forms:

    rows        the last dimension stays the last: rows are copied
    tiles       it does not. A tile spans the dimension that is dense in x and the one that is dense in y. It is read along the
                former and written along the latter. In between, threads exchange elements through shared memory or shuffles

A program copies one tile at one index of every other dimension. There are at most four others after merging.

Memory-bound: each byte is read once and written once. Both sides use vectors of 16 bytes where sizes and strides allow. A size
or stride that is not a multiple of 16 bytes makes the accesses of its side narrower: element by element in the worst case. For
this case, with elements of 1 and 2 bytes, there is a second implementation, `words` (unaligned.py). It is chosen for tiles of
large dimensions.
Not supported: elements of 16 bytes, more than six merged dimensions, and inputs without a dense dimension (the public function
copies them first).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.layout.inputs import permute_arguments
from tilewright.kernels.layout.problem import BITS, Problem, form_of, plan_of, problem_of, refuse_form, tile_of
from tilewright.kernels.layout.unaligned import WORDS
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["form_of", "permute_op"]


def _reference(x: Tensor, dims: list[int]) -> Tensor:
    return torch.empty([x.shape[d] for d in dims], dtype=x.dtype, device=x.device).copy_(x.permute(dims))


def _cost(x: Tensor, dims: list[int]) -> Cost:
    return Cost(flops=0, bytes=2 * x.numel() * x.element_size())


# ---- space and examples


def _default(device: Device, problem: Problem) -> Config:
    # H100, fraction of the speed of a copy, 8192 x 8192, tiles of 128 x 128 and of 64 x 64: bf16 0.95 and 0.92; int8 0.92 and
    # 0.89; 4 and 8 bytes 0.95 with both.
    block_a, block_b = (128, 128) if problem.itemsize <= 2 else (64, 64)
    # Unaligned rows, where `words` is not chosen. In brackets with tiles of 128 x 128.
    # 4097 x 8192: bf16 0.79 (0.64), int8 0.53 (0.41); 8192 x 4097: bf16 0.91 (0.86), int8 0.78 (0.67)
    if problem.itemsize <= 2 and problem.y_bytes < 16 and problem.b >= 512:
        block_a, block_b = 32, 512
    elif problem.itemsize <= 2 and problem.x_bytes < 16:
        block_a, block_b = 128, 32
    if problem.rows:
        block_a, block_b = next(
            (a, b) for a, b in ((8, 1024), (64, 128), (128, 64), (1024, 8)) if problem.a <= 2 * a or a > 512
        )
    elif problem.b < 32:
        block_a, block_b = 1024, 8
    elif problem.a < 32:
        block_a, block_b = 8, 1024
    return {"BLOCK_A": block_a, "BLOCK_B": block_b, "num_warps": 8 if block_a * block_b >= 8192 else 4}


def _refusal(device: Device, problem: Problem, c: Config) -> str | None:
    tile = c["BLOCK_A"] * c["BLOCK_B"]
    if not 4096 <= tile <= 16384:
        return "a tile must have 4096 to 16384 elements"
    if tile * problem.itemsize > 64 * 1024:
        return "a tile over 64 KB"
    if tile > 2048 * c["num_warps"]:
        return "over 64 elements per thread"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_A": (8, 32, 64, 128, 1024), "BLOCK_B": (8, 32, 64, 128, 512, 1024), "num_warps": (4, 8)},
    refusal=_refusal,
)


@Example.of
def _example(
    inputs: Inputs, shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, cut: int = 0
) -> tuple[Tensor, list[int]]:
    """`cut`: elements left out at the end of x's last dimension, so that its rows are strided."""
    x = inputs.randn(*shape)
    x = (100 * x).to(dtype) if not dtype.is_floating_point else x.to(dtype)
    return x[..., : shape[-1] - cut], list(dims)


EXAMPLES = (
    _example("matrix", (136, 72), (1, 0), torch.bfloat16),
    _example("ragged", (67, 131), (1, 0), torch.float32),
    _example("strided", (40, 100), (1, 0), torch.float16, cut=28),
    _example("bytes", (3, 90, 48), (0, 2, 1), torch.int8),
    _example("8 bytes", (2, 50, 70), (2, 0, 1), torch.int64),
    _example("channels last", (2, 3, 12, 10), (0, 2, 3, 1), torch.bfloat16),
    _example("channels first", (2, 12, 11, 3), (0, 3, 1, 2), torch.bfloat16),
    _example("rows", (5, 7, 40), (1, 0, 2), torch.float16),
    _example("as it is", (3, 4, 50), (0, 1, 2), torch.float16, cut=1),
    _example("six dimensions", (2, 3, 2, 5, 2, 7), (4, 1, 5, 0, 3, 2), torch.float32),
    _example("contiguous", (33, 5), (0, 1), torch.int16),
    _example("odd rows of x", (80, 67), (1, 0), torch.int8),
    _example("odd rows of y", (67, 160), (1, 0), torch.int8),
    _example("odd rows of both", (131, 67), (1, 0), torch.bfloat16),
    _example("odd and batched", (3, 35, 64), (2, 0, 1), torch.int16),
    _example("odd and strided", (60, 96), (1, 0), torch.int8, cut=13),
    _example("one", (1, 1, 1), (2, 0, 1), torch.float32),
    _example("nothing", (4, 0, 3), (2, 1, 0), torch.float32),
)


@triton.jit(
    do_not_specialize=[
        *("a_units", "b_units", "n0", "n1", "n2", "x_b", "y_b"),
        *("x0", "x1", "x2", "x3", "y0", "y1", "y2", "y3"),
    ]
)
def _permute_kernel(
    x_ptr, y_ptr, a_units, b_units, n0, n1, n2, x_b, y_b, x0, x1, x2, x3, y0, y1, y2, y3,
    ROWS: tl.constexpr, X_VECTOR: tl.constexpr, Y_VECTOR: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Sizes and strides are passed divided by the vector of their side. The kernel multiplies by it again.

    So the compiler sees that they are multiples of the vector. y_b: with ROWS the stride of b in y, otherwise that of a.
    """
    A = a_units * X_VECTOR
    B = b_units * (1 if ROWS else Y_VECTOR)
    tiles_a, tiles_b = tl.cdiv(A, BLOCK_A), tl.cdiv(B, BLOCK_B)
    tile_a, tile_b, i0, i1, i2, i3 = tile_of(tiles_a, tiles_b, n0, n1, n2)
    x_ptr += (i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3) * X_VECTOR
    y_ptr += (i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3) * Y_VECTOR
    a = tile_a * BLOCK_A + tl.arange(0, BLOCK_A)
    b = tile_b * BLOCK_B + tl.arange(0, BLOCK_B)
    x_at = (b.to(tl.int64) * x_b * X_VECTOR)[:, None] + a[None, :]
    x = tl.load(x_ptr + x_at, mask=(b < B)[:, None] & (a < A)[None, :])
    if ROWS:
        y_at = (b.to(tl.int64) * y_b * Y_VECTOR)[:, None] + a[None, :]
        tl.store(y_ptr + y_at, x, mask=(b < B)[:, None] & (a < A)[None, :])
    else:
        y_at = (a.to(tl.int64) * y_b * Y_VECTOR)[:, None] + b[None, :]
        tl.store(y_ptr + y_at, tl.trans(x), mask=(a < A)[:, None] & (b < B)[None, :])


# ---- launcher and op


def _first(device: Device, problem: Problem) -> str | None:
    """Choose `words` if both dimensions of the tile have over 512 elements. Smaller ones were not measured.

    `words` itself refuses problems whose rows are aligned. H100, fraction of the speed of a copy, `triton` in brackets:

        rows of odd length      bf16           int8
        those of y              0.92 (0.79)    0.89 (0.53)
        those of x              0.91 (0.91)    0.87 (0.77)
        both                    1.06 (0.70)    0.93 (0.67)
    """
    return "words" if min(problem.a, problem.b) > 512 else None


def _launch(config: Config, x: Tensor, dims: list[int]) -> Tensor:
    y = torch.empty([x.shape[d] for d in dims], dtype=x.dtype, device=x.device)
    form = form_of(x.shape, x.stride(), dims)
    if not x.numel() or form is None:
        return y
    plan, rows = plan_of(x, form), form.b < form.a
    xv, yv, bits = plan.x_vector, plan.y_vector, BITS[x.element_size()]
    programs = triton.cdiv(plan.a, config["BLOCK_A"]) * triton.cdiv(plan.b, config["BLOCK_B"]) * math.prod(plan.counts)
    numbers = [plan.a // xv, plan.b // (1 if rows else yv), *plan.counts[:3]]
    numbers += [plan.x_b // xv, (plan.y_b if rows else plan.y_a) // yv]
    numbers += [step // xv for step in plan.x_steps] + [step // yv for step in plan.y_steps]
    _permute_kernel[(programs,)](x.view(bits), y.view(bits), *numbers, ROWS=rows, X_VECTOR=xv, Y_VECTOR=yv, **config)
    return y


def _refuse(device: Device, problem: Problem) -> str | None:
    return refuse_form(problem)


permute_op = Op(
    name="permute",
    reference=_reference,
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    make=permute_arguments,
    rows_in_problem=True,
    first=_first,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True, refuse=_refuse), WORDS),
)
