"""Dropout with a counter-based random generator: whether an element is dropped depends only on seed, offset and position.

    y[i] = x[i] / (1 - p) if r[i] >= p 2^32 else 0      (Srivastava et al., "Dropout", 2014, scaled while training)

    x: any shape, bf16, fp16 or fp32, dense memory in any order; i is the position of the element in that memory. state: int64
    [2], (seed, offset). It is read on the device, so a captured graph uses new random numbers once these two numbers are
    changed in memory. r: the words of Philox4x32-10 (kernels/device/philox.py), key = the seed, counter = (c low, c high,
    offset low, offset high), where

        element i  <->  word (i // LANES) % 4 of counter  c = i // (4 LANES) * LANES + i % LANES

The gradient is the same function, applied to dy with the same state. So no mask is ever stored. p is exact to 2^-32.

Memory-bound: one element in, one out. Each element needs a quarter of ten Philox rounds, which take less time than that.
Not supported: whole channels at once (torch's Dropout2d), alpha dropout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.device.contiguous import dense, load_flat, store_flat
from tilewright.kernels.device.philox import LANES, philox4x32_reference
from tilewright.kernels.elementwise.activation import float32_at_most
from tilewright.kernels.elementwise.inputs import dropout_arguments
from tilewright.kernels.launch.row_space import flat_problem
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["dropout", "dropout_op"]

_LOW = 0xFFFFFFFF

# ---- reference


def _words(state: Tensor, size: int) -> Tensor:
    """The random word of each of `size` elements, int64 in [0, 2^32)."""
    blocks = -(-size // (4 * LANES))
    # If there are fewer elements than lanes, the remaining counters are not needed.
    lanes = min(LANES, size)
    counter = torch.arange(blocks * lanes, device=state.device)
    seed, offset = state[:1], state[1:]
    words = philox4x32_reference(
        (counter & _LOW, counter >> 32, offset & _LOW, offset >> 32 & _LOW), (seed & _LOW, seed >> 32 & _LOW)
    )
    return torch.stack([w.unflatten(0, (blocks, lanes)) for w in words], dim=1).flatten()[:size]


def _threshold(p: float) -> int:
    return min(round(p * 2**32), _LOW)


def _reference(x: Tensor, state: Tensor, p: float) -> Tensor:
    y = torch.empty_like(x)
    # Memory order, whatever the order of the dimensions.
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    flat = x.permute(order)
    wide = flat.to(torch.promote_types(x.dtype, torch.float32)) * (1 / (1 - p))
    kept = (_words(state, x.numel()) >= _threshold(p)).view(flat.shape) if x.numel() else flat.bool()
    y.permute(order).copy_(torch.where(kept, wide, 0.0))
    return y


def _cost(x: Tensor, state: Tensor, p: float) -> Cost:
    return Cost(flops=2 * x.numel(), bytes=2 * x.nbytes + state.nbytes)


# ---- space and examples


SPACE = Space(
    default=lambda device, problem: {"num_warps": 4 if problem.dtype.itemsize == 2 else 8}, axes={"num_warps": (4, 8)}
)


@Example.of
def _example(
    inputs: Inputs, p: float, *shape: int, dtype: torch.dtype = torch.bfloat16, last: bool = False, seed: int = 1234
) -> tuple[Tensor, Tensor, float]:
    x = inputs.randn(*shape, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return x, inputs.tensor([seed, 7 << 33], torch.int64), p


EXAMPLES = (
    _example("rows", 0.1, 3, 2048),
    _example("ragged", 0.5, 7, 33, dtype=torch.float16),
    _example("channels last", 0.3, 2, 8, 3, 5, last=True, dtype=torch.float32),
    _example("large seed", 0.9, 50, 101, seed=-5),
    _example("one", 0.25, 1, dtype=torch.float32),
)

# ---- kernel


@triton.jit
def _drop(x_ptr, y_ptr, index, size, word, threshold, scale, WHOLE: tl.constexpr):
    x = load_flat(x_ptr, index, size, WHOLE).to(tl.float32)
    store_flat(y_ptr, index, tl.where(word >= threshold, x * scale, 0.0), size, WHOLE)


@triton.jit(do_not_specialize=["size", "threshold", "scale"])
def _dropout_kernel(x_ptr, state_ptr, y_ptr, size, threshold, scale, LANES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    seed, offset = tl.load(state_ptr), tl.load(state_ptr + 1)
    counter = program * LANES + tl.arange(0, LANES)
    low, high = (offset & 0xFFFFFFFF).to(tl.uint32), ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(
        seed, (counter & 0xFFFFFFFF).to(tl.uint32), ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32), low, high
    )
    limit = (threshold.to(tl.int64) + 2147483648).to(tl.uint32)
    first = program * (4 * LANES)
    index = first + tl.arange(0, LANES)
    if first + 4 * LANES <= size:
        _drop(x_ptr, y_ptr, index, size, r0, limit, scale, True)
        _drop(x_ptr, y_ptr, index + LANES, size, r1, limit, scale, True)
        _drop(x_ptr, y_ptr, index + 2 * LANES, size, r2, limit, scale, True)
        _drop(x_ptr, y_ptr, index + 3 * LANES, size, r3, limit, scale, True)
    else:
        _drop(x_ptr, y_ptr, index, size, r0, limit, scale, False)
        _drop(x_ptr, y_ptr, index + LANES, size, r1, limit, scale, False)
        _drop(x_ptr, y_ptr, index + 2 * LANES, size, r2, limit, scale, False)
        _drop(x_ptr, y_ptr, index + 3 * LANES, size, r3, limit, scale, False)


def _launch(config: Config, x: Tensor, state: Tensor, p: float) -> Tensor:
    y = torch.empty_like(x)
    if x.numel():
        # Shifted by -2^31, the threshold is an int32 for every p, so one binary serves all values.
        _dropout_kernel[(ceil_div(x.numel(), 4 * LANES),)](
            x, state, y, x.numel(), _threshold(p) - 2**31, 1 / (1 - p), LANES=LANES, **config
        )
    return y


dropout_op = Op(
    name="dropout",
    reference=_reference,
    problem=flat_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=dropout_arguments,
    fake=lambda x, *_: torch.empty_like(x),
    impls=(Impl(name="triton", launch=_launch, space=SPACE, refuse=float32_at_most),),
)


def dropout(x: Tensor, state: Tensor, p: float) -> Tensor:
    """x with a share p of its elements set to zero and the rest scaled by 1 / (1 - p), without gradients.

    `ops.dropout` has gradients and describes the arguments. state: int64 [2] on x's device, (seed, offset). It determines which
    elements become zero.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p is {p}, wanted 0 <= p < 1")
    if state.shape != (2,) or state.dtype != torch.int64 or state.device != x.device:
        raise ValueError(
            f"dropout: state must be int64 [2], (seed, offset), on {x.device}; "
            f"got {state.dtype} {list(state.shape)} on {state.device}"
        )
    return dropout_op(dense(x), state, float(p))
