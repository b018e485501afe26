"""Elementwise operators with gradients: activations, gated activations, dropout, rotary embedding.

Each is an op without gradients (activation.py, glu.py, dropout.py and rope.py in kernels/elementwise/). If an input requires a
gradient, a `torch.autograd.Function` calls it. Only the inputs of the forward pass are saved for the backward pass;
derivatives, masks and rotations are recomputed. Second derivatives raise an error, because the ops themselves are forward only.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.device.contiguous import dense, laid_out_like
from tilewright.kernels.elementwise import activation as pointwise
from tilewright.kernels.elementwise import glu as gates
from tilewright.kernels.elementwise.activation_backward import activation_backward_op
from tilewright.kernels.elementwise.dropout import dropout as _drop
from tilewright.kernels.elementwise.glu_backward import gated_backward_op
from tilewright.kernels.elementwise.rope import rope as _rotate
from tilewright.kernels.elementwise.rope import rope_frequencies, rope_table
from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.launch.shapes import rows_ready

__all__ = [
    "activation",
    "dropout",
    "gated_halves",
    "gated_mul",
    "gelu_mul",
    "glu",
    "rope",
    "rope_frequencies",
    "rope_table",
    "silu_mul",
]


# ---- activations


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, alpha: float) -> Tensor:
        x = dense(x)
        ctx.save_for_backward(x)
        ctx.options = (kind, alpha)
        return pointwise.activation(x, kind, alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return activation_backward_op(laid_out_like(grads[0], x), x, *ctx.options), None, None


def activation(x: Tensor, kind: str, alpha: float = 1.0) -> Tensor:
    """f(x), elementwise, differentiable in x.

    Args:
        x: any shape, bf16, fp16 or fp32. Dense memory is read without a copy, whatever the order of its dimensions.
        kind: "elu", "gelu", "gelu_tanh", "hardswish", "leaky_relu", "mish", "relu", "sigmoid", "silu" or "tanh".
        alpha: the alpha of "elu" or the negative slope of "leaky_relu"; ignored for the others.

    Returns:
        A tensor of x's shape and dtype, with x's strides if x is dense.

    Raises:
        ValueError: the kind is unknown or the dtype is not supported.
    """
    if not wants_gradient(x):
        return pointwise.activation(x, kind, alpha)
    pointwise.check(x, kind)
    return _Activation.apply(x, kind, float(alpha))  # pyright: ignore[reportReturnType]


# ---- gates


_GATES = (*gates.GATES, "silu", "gelu", "gelu_tanh")


def _check_gate(op: str, kind: str) -> None:
    if kind not in _GATES:
        raise ValueError(f"{op}: kind is {kind!r}, wanted one of {', '.join(_GATES)}")


def _gate(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return gates.silu_mul(gate, up)
    if kind in ("gelu", "gelu_tanh"):
        return gates.gelu_mul(gate, up, kind == "gelu_tanh")
    return gates.gated_mul(gate, up, kind)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _gate(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        both = gated_backward_op(rows_ready(grads[0]), rows_ready(gate), rows_ready(up), ctx.kind, True)
        return *both.chunk(2, -1), None


class _Halves(torch.autograd.Function):
    """f(gate) * up, where gate and up are the halves of x along the last dimension. The gradient of x is one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, gate_first: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = (kind, gate_first)
        return _gate(*_halves(x, gate_first), kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kind, gate_first = ctx.options
        gate, up = _halves(ctx.saved_tensors[0], gate_first)
        return gated_backward_op(rows_ready(grads[0]), rows_ready(gate), rows_ready(up), kind, gate_first), None, None


def _halves(x: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """(gate, up) of x [..., 2 F]."""
    first, second = x.chunk(2, -1)
    return (first, second) if gate_first else (second, first)


def gated_halves(x: Tensor, kind: str, gate_first: bool = True) -> Tensor:
    """f(gate) * up for x = [gate | up] along the last dimension, or [up | gate] if not gate_first; differentiable.

    kind: f, as in `gated_mul`.
    """
    if wants_gradient(x):
        return _Halves.apply(x, kind, gate_first)  # pyright: ignore[reportReturnType]
    return _gate(*_halves(x, gate_first), kind)


def _gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if wants_gradient(gate, up):
        return _Gated.apply(gate, up, kind)  # pyright: ignore[reportReturnType]
    return _gate(gate, up, kind)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, differentiable in both.

    Args:
        gate: [..., F], bf16, fp16 or fp32. It may be a half of a merged [..., 2F] tensor, which is read without a copy.
        up: in the shape and dtype of gate.

    Returns:
        [..., F] of gate's dtype, contiguous.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    return _gated(gate, up, "silu")


def gelu_mul(gate: Tensor, up: Tensor, approximate: bool = False) -> Tensor:
    """gelu(gate) * up, elementwise, differentiable in both; as `silu_mul`. approximate: use the tanh form of gelu."""
    return _gated(gate, up, "gelu_tanh" if approximate else "gelu")


def gated_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """f(gate) * up, elementwise, differentiable in both; as `silu_mul`.

    kind: f: "relu", "sigmoid", "silu", "gelu" or "gelu_tanh".
    """
    _check_gate("gated_mul", kind)
    return _gated(gate, up, kind)


def glu(x: Tensor, dim: int = -1, kind: str = "sigmoid") -> Tensor:
    """up * f(gate), where up and gate are the first and the second half of x along `dim`: torch's `glu` with a choice of f.

    Args:
        x: bf16, fp16 or fp32, with an even size along `dim`. If `dim` is not the last dimension, x is copied first.
        dim: the dimension that is halved.
        kind: the gate's function, as in `gated_mul`.

    Returns:
        A tensor of x's dtype, with half of x's size along `dim`.

    Raises:
        ValueError: the size along `dim` is odd, or the kind is unknown.
    """
    _check_gate("glu", kind)
    if x.dim() == 0 or x.shape[dim] % 2:
        raise ValueError(f"glu: x must have an even size along dimension {dim}, got {tuple(x.shape)}")
    return gated_halves(x.movedim(dim, -1), kind, False).movedim(-1, dim)


# ---- dropout


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, p: float) -> Tensor:
        x = dense(x)
        ctx.save_for_backward(state)
        # The mask depends on the order of elements in memory, so the gradient must have the layout of x.
        ctx.options = (x.shape, x.stride(), p)
        return _drop(x, state, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (state,) = ctx.saved_tensors
        shape, stride, p = ctx.options
        grad = grads[0]
        if grad.stride() != stride:
            grad = torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return _drop(grad, state, p), None, None


def dropout(x: Tensor, p: float = 0.5, state: Tensor | None = None) -> Tensor:
    """Set each element of x to zero with probability p and scale the others by 1 / (1 - p); differentiable in x.

    Args:
        x: any shape, bf16, fp16 or fp32.
        p: in [0, 1].
        state: int64 [2] on x's device, (seed, offset). Together with the order of x's elements in memory it determines the
            mask. None: torch's generator of that device draws the two numbers, in one small launch. `torch.manual_seed` makes
            them reproducible, and a captured graph draws new ones at each replay.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ValueError: p is not in [0, 1], or state has another shape, dtype or device.
    """
    if p == 1:
        return x * 0.0
    if state is None:
        state = torch.randint(1 << 62, (2,), dtype=torch.int64, device=x.device)
    if not wants_gradient(x):
        return _drop(x, state, p)
    return _Dropout.apply(x, state, float(p))  # pyright: ignore[reportReturnType]


# ---- rotary embedding


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, cos_sin)
        ctx.options = (interleaved, inverse)
        return _rotate(q, k, positions, cos_sin, interleaved, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        positions, cos_sin = ctx.saved_tensors
        interleaved, inverse = ctx.options
        dq, dk = grads
        return *_rotate(dq, dk, positions, cos_sin, interleaved, not inverse), None, None, None, None


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, differentiable in both.

    Args:
        q: [T, H, D], bf16, fp16 or fp32. It may be a view of a merged projection, which is read without a copy.
        k: [T, G, D] of q's dtype.
        positions: [T] int64, each in [0, max_pos).
        cos_sin: [max_pos, 2, R/2] float32 from `rope_table`; R <= D. It has no gradient.
        interleaved: the pairs that are rotated are (2i, 2i + 1) instead of (i, i + R/2).
        inverse: rotate by the negative angle.

    Returns:
        (q, k) rotated, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if wants_gradient(q, k):
        return _Rope.apply(q, k, positions, cos_sin, interleaved, inverse)  # pyright: ignore[reportReturnType]
    return _rotate(q, k, positions, cos_sin, interleaved, inverse)
