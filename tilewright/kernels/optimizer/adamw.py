"""AdamW over all tensors of a model in one launch (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).

    g = scale * gradient
    m <- m + (1 - beta1) (g - m)
    v <- v + (1 - beta2) (g^2 - v)
    p <- p - lr r (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + d p)

    p (master), m (exp_avg), v (exp_avg_sq): float32, flat as in multi_tensor.py; weights: p rounded to their dtype, flat, or
    None; grads: a list of tensors of one dtype, bf16, fp16 or fp32; rates: float32 [tensors, 2], factor r of the learning rate
    and weight decay d of each tensor; control: float64, with the betas, their powers, the scale, and whether to write.

The averages are updated by (1 - beta) times the difference. In the form beta m + (1 - beta) g, the rounding of beta to float32
would be an error of 1e-8 per step.
Limited by bytes: with bf16 gradients and weights 14 in and 14 out for each element.
Not supported: amsgrad, tensors of different dtypes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.optimizer.multi_tensor import (
    BLOCKS,
    CHUNK,
    Slot,
    flat_arguments,
    gathered,
    load_gradient,
    moved_bytes,
    problem_of,
    put,
    spread,
    tables,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["adamw_op", "adamw_step", "adamw_update"]

# ---- reference


def adamw_update(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, rate: Tensor, decay: Tensor, control: Tensor, lr: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """New (master, m, v) by the formula above, in the dtype of `master`; `rate` and `decay` have a value for each element."""
    like = master.dtype
    grad = grad * control[Slot.SCALE].to(like)
    m = m + (1 - control[Slot.BETA1]).to(like) * (grad - m)
    v = v + (1 - control[Slot.BETA2]).to(like) * (grad * grad - v)
    unbiased = v * control[Slot.FACTOR2].to(like)
    move = m * control[Slot.FACTOR1].to(like) / (unbiased.sqrt() + eps)
    return master - lr * rate * (move + decay * master), m, v


def _reference(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights: Tensor | None, grads: list[Tensor], rates: Tensor,
    control: Tensor, lr: float, eps: float,
) -> None:  # fmt: skip
    rate, decay = (spread(rates[:, i], grads, master) for i in (0, 1))
    grad = gathered(grads, master)
    new = adamw_update(master, exp_avg, exp_avg_sq, grad, rate, decay, control, lr, eps)
    put((master, exp_avg, exp_avg_sq), new, weights, control)


def _cost(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights: Tensor | None, grads: list[Tensor], *_: Any) -> Cost:
    return Cost(flops=16 * master.numel(), bytes=moved_bytes((master, exp_avg, exp_avg_sq), weights, grads))


# ---- examples


def _arguments(
    inputs: Inputs, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.bfloat16,
    weights: torch.dtype | None = torch.bfloat16, norm: float | None = None,
) -> tuple:  # fmt: skip
    (master, m, v), grads, rates, control = flat_arguments(inputs, shapes, dtype, 3, norm)
    return master, m.mul_(0.1), v.square_(), master.to(weights) if weights else None, grads, rates, control, 1e-2, 1e-8


_example = Example.of(_arguments)
EXAMPLES = (
    _example("several", ((3, 50), (1,), (4097,), (64, 64))),
    _example("fp16", ((33,), (2, 100)), torch.float16, torch.float16),
    _example("fp32", ((5, 1000), (7,)), torch.float32, None),
    _example("fp32 gradients", ((17, 63),), torch.float32),
    _example("empty among them", ((0,), (100,), (0, 3))),
    _example("not finite", ((3, 50), (9,)), norm=float("nan")),
)


def _make(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16) -> tuple:
    """M tensors [N, N], gradients and weights of `dtype`."""
    return _arguments(inputs, ((N, N),) * M, dtype, dtype if dtype != torch.float32 else None)


# ---- kernel


@triton.jit
def adamw_step(p, m, v, grad, rates_ptr, owner, control_ptr, lr, eps):
    """New (p, m, v): the formula above for a block of one tensor, in float32."""
    beta1, beta2 = tl.load(control_ptr + 1), tl.load(control_ptr + 2)
    m_factor = tl.load(control_ptr + 9).to(tl.float32)
    v_factor = tl.load(control_ptr + 10).to(tl.float32)
    grad = grad * tl.load(control_ptr + 7).to(tl.float32)
    rate = lr * tl.load(rates_ptr + 2 * owner)
    decay = tl.load(rates_ptr + 2 * owner + 1)
    m = m + (1.0 - beta1).to(tl.float32) * (grad - m)
    v = v + (1.0 - beta2).to(tl.float32) * (grad * grad - v)
    move = m * m_factor / (tl.sqrt(v * v_factor) + eps)
    return p - rate * (move + decay * p), m, v


@triton.jit(do_not_specialize_on_alignment=["like_ptr"])
def _adamw_kernel(
    p_ptr, m_ptr, v_ptr, weights_ptr, like_ptr, owners_ptr, spans_ptr, addresses_ptr, rates_ptr, control_ptr, lr, eps,
    HAS_WEIGHTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(control_ptr + 8) != 0.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        p, m, v = tl.load(p_ptr + at), tl.load(m_ptr + at), tl.load(v_ptr + at)
        owner = tl.load(owners_ptr + start // CHUNK)
        grad = load_gradient(like_ptr, owner, spans_ptr, addresses_ptr, start, BLOCK, CHUNK)
        p, m, v = adamw_step(p, m, v, grad, rates_ptr, owner, control_ptr, lr, eps)
        tl.store(p_ptr + at, p)
        tl.store(m_ptr + at, m)
        tl.store(v_ptr + at, v)
        if HAS_WEIGHTS:
            tl.store(weights_ptr + at, p.to(weights_ptr.dtype.element_ty))


def _launch(
    config: Config, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights: Tensor | None, grads: list[Tensor],
    rates: Tensor, control: Tensor, lr: float, eps: float,
) -> None:  # fmt: skip
    table = tables(grads, master.device)
    if master.numel():
        _adamw_kernel[(master.numel() // config["BLOCK"],)](
            master, exp_avg, exp_avg_sq, master if weights is None else weights, grads[0], *table[:3], rates, control, lr, eps,
            HAS_WEIGHTS=weights is not None, CHUNK=CHUNK, **config,
        )  # fmt: skip


adamw_op = Op(
    name="adamw",
    reference=_reference,
    problem=lambda master, exp_avg, exp_avg_sq, weights, grads, *_: problem_of(weights, grads),
    cost=_cost,
    examples=EXAMPLES,
    make=_make,
    mutates=("master", "exp_avg", "exp_avg_sq", "weights"),
    impls=(Impl(name="triton", launch=_launch, space=BLOCKS, batch_invariant=True),),
)
