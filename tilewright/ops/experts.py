"""The operators of a mixture of experts: route, sort by expert, multiply by each expert's weights, combine.

    weights, experts = route_experts(logits, chosen)
    order = sort_by_expert(experts, count)
    inner = grouped_linear(x, gate_up, order, activation="silu_mul", gather=True)
    y = combine_tokens(grouped_linear(inner, down, order), order, weights)

If an input requires a gradient, the same calls sort the rows of x before the product, and the activation is a separate
operator. The weights of the routing are differentiable; the choice of experts is not.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.kernels.experts.combine import combine_gradient_op, combine_tokens_op
from tilewright.kernels.experts.permute import permute_tokens_op
from tilewright.kernels.experts.route import route_experts_op, routed_weights
from tilewright.kernels.experts.sort import sort_by_expert_op
from tilewright.kernels.gemm.grouped.linear import check_grouped, grouped_activated, grouped_linear_op
from tilewright.kernels.gemm.grouped.weight_gradient import grouped_weight_gradient_op
from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.ops.expert_weights import ExpertWeights, grouped_codes
from tilewright.ops.pointwise import gelu_mul, silu_mul
from tilewright.ops.values import invariant_scope, valued

__all__ = [
    "ByExpert",
    "combine_tokens",
    "grouped_linear",
    "masked_grouped_linear",
    "permute_tokens",
    "route_experts",
    "sort_by_expert",
]


class ByExpert(NamedTuple):
    """The order of rows by expert, as `sort_by_expert` returns it. Row t * K + k belongs to the k-th expert of token t."""

    offsets: Tensor
    """[X + 1] int32: where each expert's rows begin."""
    order: Tensor
    """[T * K] int32: the row at each position of the sorted order."""
    places: Tensor
    """[T, K] int32: the position of each row in the sorted order."""

    @property
    def chosen(self) -> int:
        """K."""
        return self.places.shape[1]


def route_experts(
    logits: Tensor,
    chosen: int,
    *,
    bias: Tensor | None = None,
    softmax: bool = True,
    groups: int = 1,
    chosen_groups: int = 1,
    normalise: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token and compute their weights, which are differentiable in the logits.

    Args:
        logits: [T, X], float32.
        chosen: K, the number of experts for each token.
        bias: [X], float32, only with `softmax` False: added to the sigmoids for the choice of experts, but not to the weights.
        softmax: True: scores are a softmax over all experts. False: they are sigmoids.
        groups: the number of groups of equal size into which neighbouring experts are divided.
        chosen_groups: the number of groups, those with the best scores, from which experts are chosen.
        normalise: divide the weights by their sum. With `softmax` this equals a softmax over the chosen experts alone.
        scale: factor on the weights.

    Returns:
        (weights [T, K] float32, experts [T, K] int32), the best expert first.

    Raises:
        ValueError: shapes, dtypes or numbers do not fit.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        raise ValueError(f"route_experts: logits must be [T, X] float32; got {list(logits.shape)} {logits.dtype}")
    experts = logits.shape[1]
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32 or softmax):
        raise ValueError(
            f"route_experts: bias must be [{experts}] float32, and needs softmax=False (sigmoids); got "
            f"{list(bias.shape)} {bias.dtype}, softmax={softmax}"
        )
    if groups < 1 or experts % groups or not 1 <= chosen_groups <= groups:
        raise ValueError(
            f"route_experts: {experts} experts cannot be divided into {groups} groups of which {chosen_groups} are chosen"
        )
    each = experts // groups
    if not 1 <= chosen <= chosen_groups * each or (groups > 1 and not softmax and each < 2):
        raise ValueError(f"route_experts: {chosen} experts cannot be chosen from {chosen_groups} groups of {each} experts")
    args = (bias, chosen, softmax, groups, chosen_groups, normalise, scale)
    weights, chosen_experts = route_experts_op(logits.detach().contiguous(), *args)
    if wants_gradient(logits):
        weights = routed_weights(logits, chosen_experts, softmax, normalise, scale)
    return weights, chosen_experts


def sort_by_expert(experts: Tensor, count: int) -> ByExpert:
    """The order of rows by expert. The sort is stable, so every run gives the same order.

    Args:
        experts: [T, K] int32, each in [0, count); values outside are replaced by the nearest one inside.
        count: X, the number of experts.

    Raises:
        ValueError: experts has another shape or dtype, or count is below 1.
    """
    if experts.dim() != 2 or experts.dtype != torch.int32 or count < 1:
        raise ValueError(
            "sort_by_expert: experts must be [T, K] int32 and the number of experts at least 1; got "
            f"{list(experts.shape)} {experts.dtype} and {count}"
        )
    return ByExpert(*sort_by_expert_op(experts.contiguous(), count))


class _Permute(torch.autograd.Function):
    """x [T, N] -> its rows by expert [R, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return permute_tokens_op(x.contiguous(), order, places.shape[1], None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        return combine_tokens_op(grads[0].contiguous(), places, None), None, None


def permute_tokens(x: Tensor, order: ByExpert) -> Tensor:
    """The rows of x [T, N] in the order of their experts, [T * K, N]; differentiable.

    Raises:
        ValueError: x does not have one row for each token.
    """
    if x.dim() != 2 or x.shape[0] != order.places.shape[0]:
        raise ValueError(f"permute_tokens: x must be [{order.places.shape[0]}, N]; got {list(x.shape)}")
    if wants_gradient(x):
        return _Permute.apply(x, order.order, order.places)  # pyright: ignore[reportReturnType]
    return permute_tokens_op(x.contiguous(), order.order, order.chosen, None)


class _Combine(torch.autograd.Function):
    """rows [R, N] and weights [T, K] -> [T, N]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        return combine_tokens_op(rows.contiguous(), places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weights, order, places = ctx.saved_tensors
        dy = grads[0].contiguous()
        drows = permute_tokens_op(dy, order, places.shape[1], weights) if ctx.needs_input_grad[0] else None
        dweights = combine_gradient_op(dy, rows.contiguous(), places) if ctx.needs_input_grad[1] else None
        return drows, dweights, None, None


def combine_tokens(rows: Tensor, order: ByExpert, weights: Tensor) -> Tensor:
    """The weighted sum over the K rows of each token; differentiable in the rows and the weights.

    Args:
        rows: [T * K, N], sorted by expert.
        order: their order, from `sort_by_expert`.
        weights: [T, K] float32.

    Returns:
        [T, N] of the rows' dtype, summed in float32 in the order k = 0, 1, ...

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if rows.dim() != 2 or rows.shape[0] != order.order.shape[0]:
        raise ValueError(f"combine_tokens: rows must be [{order.order.shape[0]}, N]; got {list(rows.shape)}")
    if weights.shape != order.places.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"combine_tokens: weights must be {list(order.places.shape)} float32; got {list(weights.shape)} {weights.dtype}"
        )
    if wants_gradient(rows, weights):
        return _Combine.apply(rows, weights.contiguous(), order.order, order.places)  # pyright: ignore[reportReturnType]
    return combine_tokens_op(rows.contiguous(), order.places, weights.contiguous())


class _Grouped(torch.autograd.Function):
    """x [R, K] sorted by expert, weight [X, N, K], bias [X, N] or None -> [R, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return grouped_linear_op(x, weight, offsets, bias, "none", None, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, offsets = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = grouped_linear_op(dy, weight.mT, offsets, None, "none", None, 1)
        if ctx.needs_input_grad[1]:
            dw = grouped_weight_gradient_op(dy, x, offsets)
        if ctx.needs_input_grad[2]:  # a product with ones: the sum of each expert's rows, in float32
            db = grouped_weight_gradient_op(dy, torch.ones_like(dy[:, :1]), offsets)[:, :, 0]
        return dx, dw, db, None


def grouped_linear(
    x: Tensor,
    weight: Tensor | ExpertWeights,
    order: ByExpert,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    gather: bool = False,
) -> Tensor:
    """activation(x @ weight[e]^T + bias[e]), where e is the expert of the row; differentiable in x, weight and bias.

    Args:
        x: [T * K, in], rows sorted by expert; or with `gather` [T, in].
        weight: [X, N, in], dense along `in` or along N; or quantised (then dequantised first if a gradient is needed).
        order: the order of the rows, from `sort_by_expert`.
        bias: [X, N].
        activation: as in `linear`, or clamped_silu_mul (gpt-oss). Gated ones need a weight [X, 2F, in], gate half first.
        gather: x has one row per token, and the product itself reads these rows in the order of the experts.

    Returns:
        [T * K, N] ([T * K, F] with a gated activation) of x's dtype, rows sorted by expert.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    wanted = order.places.shape[0] if gather else order.order.shape[0]
    if x.dim() != 2 or x.shape[0] != wanted:
        kind = "token" if gather else "token's expert"
        raise ValueError(f"grouped_linear: x must have a row for each {kind}, [{wanted}, in]; got {list(x.shape)}")
    rows, chosen = (order.order, order.chosen) if gather else (None, 1)
    check_grouped(x, weight, order.offsets, bias, activation, rows, chosen)
    x, bias = _ready(x), None if bias is None else bias.contiguous()
    if isinstance(weight, ExpertWeights):
        if not wants_gradient(x, bias):
            return grouped_codes(x, weight, order.offsets, bias, activation, rows, chosen)
        weight = weight.dequantize(x.dtype)
    weight = _dense(weight)
    if not wants_gradient(x, weight, bias):
        return grouped_linear_op(x, weight, order.offsets, bias, activation, rows, chosen)
    y: Any = _Grouped.apply(permute_tokens(x, order) if gather else x, weight, bias, order.offsets)
    if activation == "none":
        return y
    if activation in ("silu_mul", "gelu_mul"):
        y = (silu_mul if activation == "silu_mul" else gelu_mul)(*y.chunk(2, -1))
    else:
        y = grouped_activated(y.float(), activation).to(y.dtype)
    if not invariant_scope():
        return y
    with torch.no_grad():  # the values of a call without gradients, bit for bit
        served = grouped_linear_op(x, weight, order.offsets, bias, activation, rows, chosen)
    return valued(y, served)


def masked_grouped_linear(
    x: Tensor,
    weight: Tensor | ExpertWeights,
    counts: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    clear: bool = True,
) -> Tensor:
    """`grouped_linear` for x with M rows per expert, of which the first counts[e] are used; without gradients.

    Args:
        x: [X, M, in].
        weight: [X, N, in], plain or quantised.
        counts: [X] int32, each in [0, M].
        bias: [X, N].
        activation: as in `grouped_linear`.
        clear: whether unused rows of the result are set to zero; otherwise their content is undefined.

    Returns:
        [X, M, N] ([X, M, F] with a gated activation).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
        RuntimeError: an operand requires a gradient.
    """
    if x.dim() != 3:
        raise ValueError(f"masked_grouped_linear: x must be [X, M, in]; got {list(x.shape)}")
    check_grouped(x, weight, counts, bias, activation, None, 1)
    bias = None if bias is None else bias.contiguous()
    if isinstance(weight, ExpertWeights):
        return grouped_codes(x.contiguous(), weight, counts, bias, activation, None, 1, clear)
    return grouped_linear_op(x.contiguous(), _dense(weight), counts, bias, activation, None, 1, clear)


def _ready(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(weight: Tensor) -> Tensor:
    """The weight if it is dense along its rows or its columns, else a copy."""
    return weight if 1 in weight.stride()[1:] else weight.contiguous()
