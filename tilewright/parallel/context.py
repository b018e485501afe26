"""Context parallelism by all-to-all: the tokens of a micro-batch are divided into chunks, one for each rank.

Jacobs et al., "DeepSpeed Ulysses", 2023. For operations that treat tokens one by one, a rank holds one chunk of the tokens. For
attention, it holds all tokens of some heads. ring.py is the alternative. Documents may begin and end anywhere. Gradients are
summed over chunks in the order of the tree (reduce.py).

A single process that holds all chunks computes them one after the other (`Chunked`), with the same shapes and the same sums as
if each chunk were on a rank of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewright.nn.keys_values import Heads
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.reduce import tree
from tilewright.parallel.tensor import shallow

__all__ = ["Across", "Chunked", "InSlices", "chunk_of", "fan_weight", "loss_by_chunks"]

# T tokens, C chunks, H heads, D head dim


def chunk_of(batch: Any, index: int, count: int) -> Any:
    """A chunk of a micro-batch: its token ids and targets. The document boundaries stay those of all tokens, because attention
    needs them."""
    cut = {name: getattr(batch, name).tensor_split(count)[index] for name in ("token_ids", "targets")}
    return replace(batch, **cut)


class _Exchange(torch.autograd.Function):
    """[T / C, H, D], this rank's tokens -> [T, H / C, D], this rank's heads; or the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, to_heads: bool) -> Tensor:
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _exchanged(x, ranks, to_heads)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad_outputs[0], ctx.ranks, not ctx.to_heads), None, None


def _exchanged(x: Tensor, ranks: Ranks, to_heads: bool) -> Tensor:
    if to_heads:
        return ranks.all_to_all(x.unflatten(1, (ranks.size, -1)).transpose(0, 1)).flatten(0, 1)
    return ranks.all_to_all(x.unflatten(0, (ranks.size, -1))).transpose(0, 1).flatten(1, 2)


class Across(NamedTuple):
    """Attention over the chunks of all ranks: each rank computes some of the heads, for all tokens."""

    inner: Any
    ranks: Ranks

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, heads: Heads) -> Tensor:
        """As `KeysValues.attend`, with the inputs and the output of this rank's tokens only."""
        q, k, v = (_Exchange.apply(x, self.ranks, True) for x in (q, k, v))  # pyright: ignore[reportAssignmentType]
        sinks = None if heads.sinks is None else heads.sinks.chunk(self.ranks.size)[self.ranks.rank]
        out = self.inner.attend(q, k, v, batch, heads._replace(sinks=sinks))
        return _Exchange.apply(out, self.ranks, False)  # pyright: ignore[reportReturnType]


class InSlices(NamedTuple):
    """The same as `Across` in one process: heads are computed in as many slices as there are chunks."""

    inner: Any
    slices: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, heads: Heads) -> Tensor:
        """As `KeysValues.attend`."""
        found = []
        norms = [fan_weight(norm, self.slices) for norm in (heads.q_norm, heads.k_norm)]
        sinks = [None] * self.slices if heads.sinks is None else heads.sinks.chunk(self.slices)
        for index in range(self.slices):
            some = (x.chunk(self.slices, 1)[index].contiguous() for x in (q, k, v))
            own = heads._replace(q_norm=norms[0][index], k_norm=norms[1][index], sinks=sinks[index])
            found.append(self.inner.attend(*some, batch, own))
        return torch.cat(found, 1)


# ---- all chunks in one process


class _Fan(torch.autograd.Function):
    """A copy of a weight for each chunk. The copies share memory; the gradient of the weight is the sum over the chunks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(weight.detach() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return tree(grad_outputs).to(grad_outputs[0].dtype), None


def fan_weight(weight: Tensor | None, count: int) -> Sequence[Any]:
    """The weight for each of `count` chunks, with a separate gradient for each chunk; [None, ...] if there is no weight."""
    return [None] * count if weight is None else _Fan.apply(weight, count)  # pyright: ignore[reportReturnType]


def _bound(module: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A copy of the module with other tensors as its parameters."""
    new = shallow(module)
    inner: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = tensor
        else:
            new._parameters[first] = tensor
    for name, some in inner.items():
        new._modules[name] = _bound(module._modules[name], some)
    return new


class Chunked(nn.Module):
    """Applies a module that treats tokens one by one to each chunk. Each chunk has its own weight tensors, with their own
    gradients; they share the memory of the module's weights."""

    def __init__(self, module: nn.Module, count: int):
        super().__init__()
        self.module, self.count = module, count

    def each(self) -> list[Any]:
        """One copy of the module for each chunk."""
        fans = {name: fan_weight(parameter, self.count) for name, parameter in self.module.named_parameters()}
        return [_bound(self.module, {name: fan[index] for name, fan in fans.items()}) for index in range(self.count)]

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """As the module's `forward`."""
        return torch.cat([module(part, *more, **named) for module, part in zip(self.each(), x.tensor_split(self.count))])

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add`."""
        residuals = [None] * self.count if residual is None else residual.tensor_split(self.count)
        pairs = [m.add(part, r) for m, part, r in zip(self.each(), x.tensor_split(self.count), residuals)]
        normed, total = (torch.cat(both) for both in zip(*pairs))
        return normed, total

    def add_for(self, reader: Any, x: Tensor, residual: Tensor | None, adapters: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add_for`. Modules that are trained in chunks are not quantised and have no adapters."""
        assert adapters is None
        return self.add(x, residual)

    @property
    def reader(self) -> Any:
        """As the `reader` of the module."""
        inner: Any = self.module
        return inner.reader


class _Chunk:
    """What an objective receives as the model when it computes the loss of one chunk."""

    def __init__(self, model: Any, hidden: Callable[[Any, Any], Tensor], head: Any, index: int, count: int):
        self.config, self.head, self._hidden, self._index, self._count = model.config, head, hidden, index, count

    def __call__(self, token_ids: Tensor, packed: Any, keys_values: Any) -> Tensor:
        return self._hidden(packed, keys_values).tensor_split(self._count)[self._index]


def loss_by_chunks(model: Any, batch: Any, loss_of: Callable[[Any, Any], Tensor], count: int) -> Tensor:
    """The loss of a micro-batch: the sum of the losses of its chunks."""
    made: list[Tensor] = []

    def hidden(packed: Any, keys_values: Any) -> Tensor:
        if not made:
            made.append(model(batch.token_ids, packed, keys_values))
        return made[0]

    heads = Chunked(model.head, count).each()
    return tree([loss_of(_Chunk(model, hidden, heads[i], i, count), chunk_of(batch, i, count)) for i in range(count)])
