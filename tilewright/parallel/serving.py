"""Divides a decoder for serving, into slices of layers (tp) and ranges of layers (pp), and exchanges data between the ranks.

    y = sum over slices s of layer_s(x)          as in training (tensor.py), but without gradients; each slice has its own cache

Tokens are not divided between layers, so there may be any kind of norm between them. Only rank 0 holds the head, and only rank
0 knows the tokens that were sampled in the previous step. So token ids are sent from rank 0 to the ranks with the embedding,
and after the last layer the hidden states are sent to rank 0. Between parts of the layers, the residual stream is sent as two
tensors, because the next norm computes their sum.

Each layer is divided as soon as it is loaded. So a rank never stores more than its share of the model and one whole layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewright.nn import Attention, ExpertLinear, KVCache, Linear
from tilewright.nn.keys_values import PagedKeysValues
from tilewright.nn.shard import SHARDS, Column, Row, Shard
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.plan import Plan
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.reduce import tree
from tilewright.parallel.tensor import linear_pieces, narrow

__all__ = ["ServedCut", "ServedPart", "SliceCaches", "check_served"]

# T tokens, E features


def check_served(model: Any, plan: Plan) -> None:
    """Raise ValueError, with a message of one sentence, if the plan cannot divide a decoder (which may be on "meta")."""
    config = model.config
    for name, count in (
        ("heads", config.num_attention_heads), ("key and value heads", config.num_key_value_heads),
        ("feed-forward width", config.intermediate_size),
    ):  # fmt: skip
        if count % plan.slices:
            raise ValueError(
                f"tp divides layers into {plan.slices} slices, which does not divide the {name}, {count}; use a "
                "number that does"
            )
    if plan.pp > config.num_hidden_layers:
        raise ValueError(f"pp is {plan.pp}, more than the {config.num_hidden_layers} layers of the model")
    if config.latent is not None and plan != Plan():
        raise ValueError("tp and pp are not supported with latent attention; leave them out")
    for index, block in enumerate(model.blocks if plan.slices > 1 else ()):
        plain = type(block.attn) in SHARDS and type(block.ffn) in SHARDS
        if not plain or getattr(block.attn, "wide_norm_eps", None) is not None:
            raise ValueError(
                f"tp cannot divide block {index} of the model, because it has experts, or a norm over all heads "
                "together; use pp"
            )


class SliceCaches(NamedTuple):
    """A paged cache for each slice on this rank."""

    slices: tuple[KVCache, ...]

    @property
    def layers(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of each layer, those of all slices together."""
        for parts in zip(*(cache.layers for cache in self.slices), strict=True):
            yield tuple(tensor for part in parts for tensor in part)

    def layer(self, index: int) -> tuple[PagedKeysValues, ...]:
        """The caches that a layer's attention receives, one for each slice."""
        return tuple(cache.layer(index) for cache in self.slices)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """As `KVCache.copy_pages`."""
        for cache in self.slices:
            cache.copy_pages(sources, targets)


class _Slices(nn.Module):
    """A layer as the sum of slices, some of which this rank holds. `bias` is added after the sum."""

    def __init__(self, layers: Sequence[nn.Module], bias: Tensor | None, ranks: Ranks):
        super().__init__()
        self.layers, self.ranks = nn.ModuleList(layers), ranks
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def reader(self) -> Linear:
        """The linear layer that reads the input."""
        first: Any = self.layers[0]
        return first.reader

    def summed(self, terms: Sequence[Tensor]) -> Tensor:
        """The output of the layer, from the outputs of the slices on this rank."""
        dtype = terms[0].dtype
        total = tree(terms) if self.ranks.invariant or len(terms) > 1 else terms[0]
        total = self.ranks.all_reduce_into(total).to(dtype)
        return total if self.bias is None else total + self.bias


class _SlicedAttention(_Slices):
    def forward(self, x: Tensor, batch: Any, caches: Sequence[PagedKeysValues]) -> Tensor:
        """[T, E] -> [T, E]. `caches`: one for each slice on this rank."""
        return self.summed([layer(x, batch, cache) for layer, cache in zip(self.layers, caches, strict=True)])


class _SlicedFeedForward(_Slices):
    def forward(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, E] -> [T, E]"""
        return self.summed([layer(x, adapters) for layer in self.layers])


class ServedCut:
    """Reduces a decoder to the share of the rank at `place` in a plan, as returned by `Plan.place(rank)`.

    First pass `convert` to the function that loads the weights, or call `all` with a model on "meta". Then call `part`.

    Args:
        model: the whole decoder, which may be on "meta"; only its structure is used.
    """

    def __init__(self, model: Any, plan: Plan, place: dict[str, int]):
        check_served(model, plan)
        self.plan, self._tp, self._pp = plan, place["tp"], place["pp"]
        self._own = plan.layers_of(self._pp, len(model.blocks))
        self._shards: dict[str, Shard] = {}
        for index, block in enumerate(model.blocks if plan.slices > 1 else ()):
            for home, layer in (("attn", block.attn), ("ffn", block.ffn)):
                self._shards |= {f"blocks.{index}.{home}.{name}": shard for name, shard in SHARDS[type(layer)].items()}

    @property
    def _has_head(self) -> bool:
        return self._tp == self._pp == 0

    def convert(self, name: str, layer: Linear | ExpertLinear) -> None:
        """Reduce a layer to what this rank needs. To be called as soon as the layer's weights are loaded."""
        words = name.split(".")
        foreign = words[0] == "blocks" and int(words[1]) not in self._own
        if foreign or (name == "head" and not self._has_head):
            del layer.weight  # a quantised weight is a module, and torch does not allow a parameter to replace it
            layer.weight, layer.bias = nn.Parameter(torch.empty(0), requires_grad=False), None
        elif (shard := self._shards.get(name)) is not None and isinstance(layer, Linear):
            for own, piece in linear_pieces(layer, shard, self._tp, self.plan.tp).items():
                if piece is not None and not piece.is_whole:
                    part = piece.cut(getattr(layer, own).data)
                    layer._parameters[own] = nn.Parameter(part.contiguous(), requires_grad=False)
            if isinstance(shard, Column):
                layer.parts = tuple(part // self.plan.tp for part in layer.parts)

    def all(self, model: Any) -> None:
        """Call `convert` for every layer."""
        for name, layer in list(model.named_modules()):
            if isinstance(layer, Linear | ExpertLinear):
                self.convert(name, layer)

    def part(self, model: Any, mesh: Mesh) -> Any:
        """This rank's share, a `ServedPart`, of a model whose layers were reduced by `convert`. It reuses the model's
        modules."""
        plan, config = self.plan, model.config
        blocks = [model.blocks[index] for index in self._own]
        if plan.slices > 1:
            for block in blocks:
                block.attn = _SlicedAttention(*self._sliced(block.attn), mesh.tp)
                block.ffn = _SlicedFeedForward(*self._sliced(block.ffn), mesh.tp)
        shape = replace(
            config, num_hidden_layers=len(blocks), windows=tuple(config.windows[index] for index in self._own),
            num_attention_heads=config.num_attention_heads // plan.tp,
            num_key_value_heads=config.num_key_value_heads // plan.tp,
            intermediate_size=config.intermediate_size // plan.tp,
        )  # fmt: skip
        last = self._pp == plan.pp - 1
        return ServedPart(
            shape, plan, mesh, embed=model.embed if self._pp == 0 else None, blocks=blocks,
            norm=model.norm if last and self._tp == 0 else None, head=model.head if self._has_head else None,
            example=model.embed.weight.new_empty(0),
        )  # fmt: skip

    def _sliced(self, layer: Any) -> tuple[list[nn.Module], Tensor | None]:
        """From a layer whose linear layers are already divided: this rank's slices, and the bias to add after their sum."""
        tp, here, bias = self.plan.tp, self.plan.slices // self.plan.tp, None
        for name, shard in SHARDS[type(layer)].items():
            part = getattr(layer, name)
            if isinstance(part, nn.Parameter) and isinstance(shard, Column):
                setattr(layer, name, nn.Parameter(part.chunk(tp)[self._tp].clone(), requires_grad=False))
            elif isinstance(part, Linear) and isinstance(shard, Row) and part.bias is not None:
                bias, part.bias = part.bias.data, None
        if isinstance(layer, Attention):
            layer.head_counts = tuple(heads // tp for heads in layer.head_counts)  # pyright: ignore[reportAttributeAccessIssue]
            layer.qkv_shape = (-1, sum(layer.head_counts), layer.head_dim)
        return [layer] if here == 1 else [narrow(layer, index, here)[0] for index in range(here)], bias


class ServedPart(nn.Module):
    """A rank's share of a decoder. Every rank must call it at every step; rank 0 receives the result of the decoder.

    Args:
        config: the model config of this share, with the numbers of heads and layers of this rank.
        embed, norm, head: None if this rank does not hold the module.
        example: a tensor with the dtype and the device of the weights.
    """

    def __init__(
        self, config: Any, plan: Plan, mesh: Mesh, *, embed: Any, blocks: Sequence[nn.Module], norm: Any, head: Any,
        example: Tensor,
    ):  # fmt: skip
        super().__init__()
        self.config, self.embed, self.norm, self.head = config, embed, norm, head
        self.blocks = nn.ModuleList(blocks)
        self._plan, self._mesh = plan, mesh
        self.dtype, self.device = example.dtype, example.device

    def empty_cache(self, pages: int, page_size: int, dtype: torch.dtype | None = None) -> SliceCaches | KVCache:
        """A cache for the layers and heads of this rank; otherwise as `Decoder.empty_cache`."""
        plan, config = self._plan, self.config
        here = plan.slices // plan.tp
        made = tuple(
            KVCache.zeros(
                layers=config.num_hidden_layers, pages=pages, page_size=page_size,
                kv_heads=config.num_key_value_heads // here, head_dim=config.head_dim, dtype=dtype or self.dtype,
                device=self.device,
            )
            for _ in range(here)
        )  # fmt: skip
        return SliceCaches(made) if plan.slices > 1 else made[0]

    def forward(self, token_ids: Tensor, batch: Any, cache: SliceCaches | KVCache) -> Tensor:
        """token_ids [T] int64 -> hidden [T, E] after the final norm on rank 0, [0] on other ranks. Only rank 0's ids are
        used."""
        pp, tp, last = self._mesh.pp, self._mesh.tp, self._plan.pp - 1
        if self.embed is not None:
            h, residual = self.embed(tp.broadcast(token_ids)), None
        else:
            place = {"dtype": self.dtype, "device": token_ids.device}
            h, residual = pp.receive(torch.empty(2, token_ids.shape[0], self.config.hidden_size, **place), pp.rank - 1)
        for index, block in enumerate(self.blocks):
            h, residual = block(h, residual, batch, cache.layer(index))
        assert residual is not None
        if pp.rank < last:
            pp.send(torch.stack((h, residual)), pp.rank + 1)
        if self.norm is not None:
            h = self.norm.add(h, residual)[0]
            if last:
                self._mesh.pair.send(h, 0)
        if last and self.head is not None:
            return self._mesh.pair.receive(torch.empty_like(h), 1)
        return h if self.head is not None else h.new_empty(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`. Only rank 0 may call it."""
        return self.head(hidden)
