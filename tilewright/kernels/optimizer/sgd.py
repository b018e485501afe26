"""Stochastic gradient descent over all tensors of a model in one launch, plain and with momentum.

    g = scale * gradient + d p
    sgd:        p <- p - lr r g
    momentum:   b <- beta1 b + g;   p <- p - lr r b, with Nesterov's p <- p - lr r (g + beta1 b)

    p (master), b (momentum buffer, zeros at first): float32, flat as in multi_tensor.py; weights: p rounded to their dtype,
    flat, or None; grads: a list of tensors of one dtype; rates: float32 [tensors, 2], factor r of the learning rate and weight
    decay d of each tensor; control: float64, with beta1, the scale, and whether to write at all.

Weight decay is added to the gradient, as in Sutskever et al., "On the importance of initialization and momentum in deep
learning" (2013) and torch.optim.SGD. Without momentum this is the same as decoupled weight decay. So `sgd` can also apply an
update that was computed elsewhere.
Limited by bytes: with bf16 gradients and weights 6 in and 6 out for each element, 10 and 10 with momentum.
Not supported: dampening.
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

__all__ = ["momentum_op", "sgd_op"]

# ---- reference


def _gradient(master: Tensor, grads: list[Tensor], rates: Tensor, control: Tensor) -> Tensor:
    return gathered(grads, master) * control[Slot.SCALE].to(master.dtype) + spread(rates[:, 1], grads, master) * master


def _sgd_reference(
    master: Tensor, weights: Tensor | None, grads: list[Tensor], rates: Tensor, control: Tensor, lr: float
) -> None:  # fmt: skip
    move = _gradient(master, grads, rates, control)
    put((master,), (master - lr * spread(rates[:, 0], grads, master) * move,), weights, control)


def _momentum_reference(
    master: Tensor, buffer: Tensor, weights: Tensor | None, grads: list[Tensor], rates: Tensor, control: Tensor, lr: float,
    nesterov: bool,
) -> None:  # fmt: skip
    missing = (1 - control[Slot.BETA1]).to(master.dtype)
    grad = _gradient(master, grads, rates, control)
    new = buffer - missing * buffer + grad
    move = grad + new - missing * new if nesterov else new
    moved = master - lr * spread(rates[:, 0], grads, master) * move
    put((master, buffer), (moved, new), weights, control)


# ---- cost


def _sgd_cost(master: Tensor, weights: Tensor | None, grads: list[Tensor], *_: Any) -> Cost:
    return Cost(flops=5 * master.numel(), bytes=moved_bytes((master,), weights, grads))


def _momentum_cost(master: Tensor, buffer: Tensor, weights: Tensor | None, grads: list[Tensor], *_: Any) -> Cost:
    return Cost(flops=8 * master.numel(), bytes=moved_bytes((master, buffer), weights, grads))


# ---- examples


def _sgd_arguments(
    inputs: Inputs, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, weights: torch.dtype | None,
    norm: float | None = None,
) -> tuple:  # fmt: skip
    (master,), grads, rates, control = flat_arguments(inputs, shapes, dtype, 1, norm)
    return master, master.to(weights) if weights else None, grads, rates, control, 1e-2


def _momentum_arguments(
    inputs: Inputs, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, weights: torch.dtype | None, nesterov: bool,
    norm: float | None = None,
) -> tuple:  # fmt: skip
    master, *rest = _sgd_arguments(inputs, shapes, dtype, weights, norm)
    return master, inputs.randn(master.numel()), *rest, nesterov


_CASES = (
    ("several", ((3, 50), (1,), (4097,), (64, 64)), torch.bfloat16, torch.bfloat16, None),
    ("fp16", ((33,), (2, 100)), torch.float16, torch.float16, None),
    ("fp32", ((5, 1000), (7,)), torch.float32, None, None),
    ("empty among them", ((0,), (100,), (0, 3)), torch.bfloat16, torch.bfloat16, None),
    ("not finite", ((3, 50), (9,)), torch.bfloat16, torch.bfloat16, float("inf")),
)
_SGD_EXAMPLES = tuple(Example.of(_sgd_arguments)(*case) for case in _CASES)
_MOMENTUM_EXAMPLES = tuple(
    Example.of(_momentum_arguments)(f"{label}{', Nesterov' * nesterov}", *case, nesterov, norm)
    for label, *case, norm in _CASES
    for nesterov in (False, True)
)


def _make_sgd(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16) -> tuple:
    """M tensors [N, N], gradients and weights of `dtype`."""
    return _sgd_arguments(inputs, ((N, N),) * M, dtype, dtype if dtype != torch.float32 else None)


def _make_momentum(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16, nesterov: bool = False) -> tuple:
    """M tensors [N, N], gradients and weights of `dtype`."""
    return _momentum_arguments(inputs, ((N, N),) * M, dtype, dtype if dtype != torch.float32 else None, nesterov)


# ---- kernels


@triton.jit
def _decayed(p, grad, rates_ptr, owner, control_ptr):
    return grad * tl.load(control_ptr + 7).to(tl.float32) + tl.load(rates_ptr + 2 * owner + 1) * p


@triton.jit(do_not_specialize_on_alignment=["like_ptr"])
def _sgd_kernel(
    p_ptr, buffer_ptr, weights_ptr, like_ptr, owners_ptr, spans_ptr, addresses_ptr, rates_ptr, control_ptr, lr,
    HAS_WEIGHTS: tl.constexpr, NESTEROV: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """buffer_ptr: None without momentum."""
    if tl.load(control_ptr + 8) != 0.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + at)
        if buffer_ptr is not None:
            buffer = tl.load(buffer_ptr + at)
        owner = tl.load(owners_ptr + start // CHUNK)
        grad = load_gradient(like_ptr, owner, spans_ptr, addresses_ptr, start, BLOCK, CHUNK)
        if buffer_ptr is not None:
            grad = _decayed(p, grad, rates_ptr, owner, control_ptr)
            missing = (1.0 - tl.load(control_ptr + 1)).to(tl.float32)
            buffer = buffer - missing * buffer + grad
            move = buffer
            if NESTEROV:
                move = grad + buffer - missing * buffer
            p = p - lr * tl.load(rates_ptr + 2 * owner) * move
            tl.store(p_ptr + at, p)
            tl.store(buffer_ptr + at, buffer)
        else:
            p = p - lr * tl.load(rates_ptr + 2 * owner) * _decayed(p, grad, rates_ptr, owner, control_ptr)
            tl.store(p_ptr + at, p)
        if HAS_WEIGHTS:
            tl.store(weights_ptr + at, p.to(weights_ptr.dtype.element_ty))


def _launch(
    config: Config, master: Tensor, buffer: Tensor | None, weights: Tensor | None, grads: list[Tensor], rates: Tensor,
    control: Tensor, lr: float, nesterov: bool = False,
) -> None:  # fmt: skip
    table = tables(grads, master.device)
    if master.numel():
        _sgd_kernel[(master.numel() // config["BLOCK"],)](
            master, buffer, master if weights is None else weights, grads[0], *table[:3], rates, control, lr,
            HAS_WEIGHTS=weights is not None, NESTEROV=nesterov, CHUNK=CHUNK, **config,
        )  # fmt: skip


def _sgd_launch(config: Config, master: Tensor, *args: Any) -> None:
    _launch(config, master, None, *args)


sgd_op = Op(
    name="sgd",
    reference=_sgd_reference,
    problem=lambda master, weights, grads, *_: problem_of(weights, grads),
    cost=_sgd_cost,
    examples=_SGD_EXAMPLES,
    make=_make_sgd,
    mutates=("master", "weights"),
    impls=(Impl(name="triton", launch=_sgd_launch, space=BLOCKS, batch_invariant=True),),
)

momentum_op = Op(
    name="momentum",
    reference=_momentum_reference,
    problem=lambda master, buffer, weights, grads, *_: problem_of(weights, grads),
    cost=_momentum_cost,
    examples=_MOMENTUM_EXAMPLES,
    make=_make_momentum,
    mutates=("master", "buffer", "weights"),
    impls=(Impl(name="triton", launch=_launch, space=BLOCKS, batch_invariant=True),),
)
