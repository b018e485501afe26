"""Tensor parallelism: layers are divided into slices. With sequence parallelism, tokens are divided between the layers.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

    y = sum over slices s of layer_s(x)

Each rank holds a contiguous range of slices. Their outputs are added in the order of the tree (reduce.py). Every slice is a
separate product with a shape of its own, so its result has the same bits on every rank. With `cut`, tokens are divided between
the layers: ranks gather all tokens before a layer, and after it each rank receives the sum for its own tokens only.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.nn import Attention, Linear, RMSNorm
from tilewright.nn.shard import SHARDS, Column, Replicate, Shard
from tilewright.parallel.pieces import Piece, merged_rows
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.reduce import tree

__all__ = ["Sliced", "SlicedNorm", "fan", "gather_tokens", "join", "linear_pieces", "narrow", "own_tokens", "shallow"]


class _Fan(torch.autograd.Function):
    """A copy of x, with all tokens, for each slice on this rank. The gradient of x is the sum over all slices of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, cut: bool, copies: int) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.cut = ranks, cut
        whole = ranks.all_gather(x) if cut else x
        return tuple(whole.detach() for _ in range(copies))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum(grads, ctx.ranks, ctx.cut), None, None, None


class _Join(torch.autograd.Function):
    """The sum over all slices of all ranks, for this rank's tokens if tokens are divided. The gradient of the sum is the
    gradient of each slice's output."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, cut: bool, *terms: Tensor) -> Tensor:
        ctx.ranks, ctx.cut, ctx.copies = ranks, cut, len(terms)
        return _sum(terms, ranks, cut)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        grad = grad_outputs[0]
        whole = ctx.ranks.all_gather(grad) if ctx.cut else grad
        return (None, None, *([whole] * ctx.copies))


def _sum(terms: Sequence[Tensor], ranks: Ranks, cut: bool) -> Tensor:
    total = tree(terms) if ranks.invariant or len(terms) > 1 else terms[0]
    return (ranks.reduce_scatter(total) if cut else ranks.all_reduce(total)).to(terms[0].dtype)


class _Gather(torch.autograd.Function):
    """Gathers the tokens of all ranks. All ranks compute the same gradient, and each keeps the part for its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.own(grad_outputs[0]).contiguous(), None


class _Own(torch.autograd.Function):
    """Selects this rank's tokens out of all tokens. The backward pass gathers the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.own(x).contiguous()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_gather(grad_outputs[0]), None


def fan(x: Tensor, ranks: Ranks, copies: int) -> tuple[Tensor, ...]:
    """A copy of x, which is the same on all ranks, for each slice on this rank. Its gradient is the sum over all slices."""
    return _Fan.apply(x, ranks, False, copies)  # pyright: ignore[reportReturnType]


def join(terms: Sequence[Tensor], ranks: Ranks, cut: bool) -> Tensor:
    """The sum over all slices of all ranks; if `cut`, only for this rank's tokens."""
    return _Join.apply(ranks, cut, *terms)  # pyright: ignore[reportReturnType]


def gather_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """The tokens of all ranks, as input to computations that are the same on every rank."""
    return x if ranks.size == 1 else _Gather.apply(x, ranks)  # pyright: ignore[reportReturnType]


def own_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's tokens of a tensor that is the same on every rank."""
    return x if ranks.size == 1 else _Own.apply(x, ranks)  # pyright: ignore[reportReturnType]


class Sliced(nn.Module):
    """A layer as the sum of slices, some of which this rank holds.

    Args:
        layers: the slices of this rank.
        biases: the bias that is added after the sum, as one parameter for each part of the tokens here; empty if there is none.
        ranks: the ranks that hold the slices.
        cut: whether tokens are divided between layers.
    """

    def __init__(self, layers: Sequence[nn.Module], biases: Sequence[nn.Parameter], ranks: Ranks, cut: bool):
        super().__init__()
        self.layers, self.biases = nn.ModuleList(layers), nn.ParameterList(biases)
        self.ranks, self.cut = ranks, cut and ranks.size > 1

    @property
    def reader(self) -> Linear:
        """The linear layer that reads the input."""
        first: Any = self.layers[0]
        return first.reader

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """As the `forward` of the layer."""
        copies: Any = _Fan.apply(x, self.ranks, self.cut, len(self.layers))
        total: Any = _Join.apply(self.ranks, self.cut, *(layer(x, *more, **named) for layer, x in zip(self.layers, copies)))
        parts = len(self.biases)
        return torch.cat([x + bias for x, bias in zip(total.tensor_split(parts), self.biases)]) if parts else total


class SlicedNorm(nn.Module):
    """A norm over tokens in several parts. Each part has its own weight parameter; all share the memory of the first one.

    Args:
        norms: one norm for each part of the tokens here.
        whole: the ranks from which to gather tokens, if the result must contain all tokens.
    """

    def __init__(self, norms: Sequence[RMSNorm], whole: Ranks | None = None):
        super().__init__()
        self.norms, self.whole = nn.ModuleList(norms), whole

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add`."""
        parts = len(self.norms)
        residuals = [None] * parts if residual is None else residual.tensor_split(parts)
        pairs = [norm.add(part, r) for norm, part, r in zip(self.norms, x.tensor_split(parts), residuals)]  # pyright: ignore
        normed, total = (torch.cat(both) for both in zip(*pairs))
        return normed if self.whole is None else gather_tokens(normed, self.whole), total

    def add_for(
        self, reader: Linear, x: Tensor, residual: Tensor | None, adapters: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `add`: layers that are trained in slices are not quantised and have no adapters."""
        assert adapters is None
        return self.add(x, residual)


# ---- dividing layers


def shallow(module: Any) -> Any:
    """A copy of a module with the same parameters. Parameters and submodules of the copy can be replaced."""
    new = copy.copy(module)
    new._parameters, new._modules = dict(module._parameters), dict(module._modules)
    new._forward_hooks, new._forward_pre_hooks = module._forward_hooks.copy(), module._forward_pre_hooks.copy()
    return new


def narrow(layer: nn.Module, index: int, count: int) -> tuple[nn.Module, dict[str, Piece]]:
    """Slice `index` of `count` of a layer, and the pieces of its parameters, by their names in the layer. A bias that is added
    after the sum is left out."""
    made, pieces = shallow(layer), {}
    for name, shard in SHARDS[type(layer)].items():
        part = getattr(layer, name)
        if part is None:
            continue
        if isinstance(part, nn.Parameter):
            rows = ((0, part.shape[0]),) if isinstance(shard, Replicate) else merged_rows((part.shape[0],), index, count)
            pieces[name] = Piece(of=name, shape=tuple(part.shape), rows=rows, columns=(0, 1))
            made._parameters[name] = nn.Parameter(pieces[name].cut(part.data))
            continue
        linear = made._modules[name] = shallow(part)
        for own, piece in linear_pieces(part, shard, index, count).items():
            if piece is None:
                linear._parameters[own] = None
                continue
            pieces[f"{name}.{own}"] = replace(piece, of=f"{name}.{own}")
            linear._parameters[own] = nn.Parameter(piece.cut(part._parameters[own].data).contiguous())
        if isinstance(shard, Column):
            linear.parts = tuple(p // count for p in part.parts)
    if isinstance(made, Attention):
        made.head_counts = tuple(heads // count for heads in made.head_counts)  # pyright: ignore[reportAttributeAccessIssue]
        made.qkv_shape = (-1, sum(made.head_counts), made.head_dim)
    return made, pieces


def linear_pieces(linear: Linear, shard: Shard, index: int, count: int) -> dict[str, Piece | None]:
    """For each parameter of a linear layer, its piece in slice `index` of `count`; None for a bias that is added after the
    sum."""
    found: dict[str, Piece | None] = {}
    for own, parameter in linear.named_parameters():
        shape, wide = tuple(parameter.shape), parameter.dim() > 1
        if isinstance(shard, Column):
            rows, columns = merged_rows(linear.parts, index, count), (0, shape[1] if wide else 1)
        elif not wide:
            found[own] = None
            continue
        else:
            rows, columns = ((0, shape[0]),), (shape[1] * index // count, shape[1] * (index + 1) // count)
        found[own] = Piece(of=own, shape=shape, rows=rows, columns=columns)
    return found
