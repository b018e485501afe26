"""The norm of all gradients together, and the gradient scale that follows from it, without the host.

    grad_squares(squares, grads):    squares <- the sum of squares of every 4096 elements of each tensor
    clip_scale(squares, control):    norm = sqrt(sum of squares)
                                     scale = min(1, max_norm / (norm + 1e-6)); applied = 1 if the norm is finite, else 0
                                     if applied: step + 1, each power of beta times its beta, and 1 / (1 - power)

    squares: float32 [chunks]; grads: a list of tensors of one dtype, bf16, fp16 or fp32; control: float64, see
    multi_tensor.py.

The scale is that of torch.nn.utils.clip_grad_norm_. Squares are added in float32 within a chunk and in float64 over the chunks,
always in the same order. So if several ranks each compute the squares of some chunks, the norm has the same bits as on one
rank. A sum of squares that exceeds float32 counts as not finite, and the step is skipped. `grad_squares` is limited by bytes.
`clip_scale` is limited by the latency of one SM: 10 microseconds for 0.6 billion parameters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.row_space import flat_problem
from tilewright.kernels.optimizer.multi_tensor import CHUNK, Slot, control_values, flat_size, gathered, load_gradient, tables
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import NO_CHOICES, Config, Space

__all__ = ["clip_scale_op", "grad_squares_op"]

# ---- references


def _squares_reference(squares: Tensor, grads: list[Tensor]) -> None:
    flat = squares.new_empty(squares.numel() * CHUNK)
    squares.copy_(gathered(grads, flat).view(-1, CHUNK).square().sum(1))


def _clip_reference(squares: Tensor, control: Tensor) -> None:
    norm = squares.double().sum().sqrt()
    good = norm.isfinite()
    new = control.clone()
    new[Slot.NORM] = norm
    new[Slot.SCALE] = torch.where(good, (control[Slot.MAX_NORM] / (norm + 1e-6)).clamp(max=1.0), 1.0)
    new[Slot.APPLIED] = good.double()
    new[Slot.STEP] += good.double()
    slots = ((Slot.BETA1_POWER, Slot.BETA1, Slot.FACTOR1), (Slot.BETA2_POWER, Slot.BETA2, Slot.FACTOR2))
    for power, beta, factor in slots:
        new[power] = torch.where(good, control[power] * control[beta], control[power])
        new[factor] = torch.where(good, 1 / (1 - new[power]), control[factor])
    control.copy_(new)


def _squares_cost(squares: Tensor, grads: list[Tensor]) -> Cost:
    return Cost(flops=2 * sum(g.numel() for g in grads), bytes=sum(g.nbytes for g in grads) + squares.nbytes)


def _clip_cost(squares: Tensor, control: Tensor) -> Cost:
    return Cost(flops=squares.numel(), bytes=squares.nbytes + 2 * control.nbytes)


# ---- examples


SPACE = Space(default=lambda device, problem: {"num_warps": 8}, axes={"num_warps": (4, 8, 16)})


def _squares_arguments(
    inputs: Inputs, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    grads = [inputs.randn(*shape, dtype=dtype) for shape in shapes]
    return inputs.randn(flat_size([g.numel() for g in grads]) // CHUNK), grads


_squares_example = Example.of(_squares_arguments)


@Example.of
def _clip_example(inputs: Inputs, chunks: int, max_norm: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return inputs.randn(chunks).square() * scale, inputs.tensor(control_values(0.9, 0.999, max_norm), torch.float64)


SQUARES_EXAMPLES = (
    _squares_example("several", ((3, 50), (1,), (4097,), (64, 64))),
    _squares_example("fp16", ((33,), (2, 100)), torch.float16),
    _squares_example("fp32", ((5, 1000), (7,)), torch.float32),
    _squares_example("empty among them", ((0,), (100,))),
)
CLIP_EXAMPLES = (
    _clip_example("clipped", 5, 0.3),
    _clip_example("as they are", 1, 1e6),
    _clip_example("many", 3001, 1.0),
    _clip_example("not finite", 10, 1.0, float("inf")),
    _clip_example("none", 0, 1.0),
)


def _make_squares(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, list[Tensor]]:
    """M gradients [N, N]."""
    return _squares_arguments(inputs, ((N, N),) * M, dtype)


def _make_clip(inputs: Inputs, *, M: int) -> tuple[Tensor, Tensor]:
    """M chunks."""
    return inputs.randn(M).square(), inputs.tensor(control_values(0.9, 0.999, 1.0), torch.float64)


@triton.jit(do_not_specialize_on_alignment=["like_ptr"])
def _squares_kernel(squares_ptr, like_ptr, owners_ptr, spans_ptr, addresses_ptr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    grad = load_gradient(like_ptr, tl.load(owners_ptr + chunk), spans_ptr, addresses_ptr, chunk * CHUNK, CHUNK, CHUNK)
    tl.store(squares_ptr + chunk, tl.sum(grad * grad, axis=0))


@triton.jit(do_not_specialize=["chunks"])
def _clip_kernel(squares_ptr, control_ptr, chunks, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(squares_ptr + at, mask=at < chunks, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(total, axis=0))
    good = norm < float("inf")  # false for NaN as well
    scale = tl.load(control_ptr + 5) / (norm + 1e-6)
    one = tl.full([], 1.0, tl.float64)
    scale = tl.where(good & (scale < 1.0), scale, one)
    step, power1, power2 = tl.load(control_ptr), tl.load(control_ptr + 3), tl.load(control_ptr + 4)
    tl.store(control_ptr, tl.where(good, step + 1.0, step))
    next1, next2 = power1 * tl.load(control_ptr + 1), power2 * tl.load(control_ptr + 2)
    tl.store(control_ptr + 3, tl.where(good, next1, power1))
    tl.store(control_ptr + 4, tl.where(good, next2, power2))
    tl.store(control_ptr + 9, tl.where(good, 1.0 / (1.0 - next1), tl.load(control_ptr + 9)))
    tl.store(control_ptr + 10, tl.where(good, 1.0 / (1.0 - next2), tl.load(control_ptr + 10)))
    tl.store(control_ptr + 6, norm)
    tl.store(control_ptr + 7, scale)
    tl.store(control_ptr + 8, good.to(tl.float64))


# ---- launchers and ops


def _squares_launch(config: Config, squares: Tensor, grads: list[Tensor]) -> None:
    table = tables(grads, squares.device)
    if squares.numel():
        _squares_kernel[(squares.numel(),)](squares, grads[0], *table[:3], CHUNK=CHUNK, **config)


def _clip_launch(config: Config, squares: Tensor, control: Tensor) -> None:
    _clip_kernel[(1,)](squares, control, squares.numel(), BLOCK=4096, num_warps=8)


grad_squares_op = Op(
    name="grad_squares",
    reference=_squares_reference,
    problem=lambda squares, grads: flat_problem(grads[0]),
    cost=_squares_cost,
    examples=SQUARES_EXAMPLES,
    make=_make_squares,
    mutates=("squares",),
    impls=(Impl(name="triton", launch=_squares_launch, space=SPACE, batch_invariant=True),),
)

clip_scale_op = Op(
    name="clip_scale",
    reference=_clip_reference,
    problem=flat_problem,
    cost=_clip_cost,
    examples=CLIP_EXAMPLES,
    make=_make_clip,
    mutates=("control",),
    impls=(Impl(name="triton", launch=_clip_launch, space=NO_CHOICES, batch_invariant=True),),
)
