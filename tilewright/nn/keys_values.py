"""The argument of an attention layer's forward pass that stores keys and values and attends to them.

| class             | where keys and values are                    | gradients | used for            |
|-------------------|----------------------------------------------|-----------|---------------------|
| `KVCache`         | pages, after those of earlier steps          | no        | serving             |
| `LatentCache`     | pages with one row per token for all heads   | no        | serving (`nn.MLA`)  |
| `PackedKeysValues`| the batch itself, nothing is stored          | yes       | training, scoring   |
| `ServedKeysValues`| pages that are filled for one pass           | yes       | the bits of serving |

A model is called with one of these objects, and passes the result of its `.layer(i)` to layer i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewright import ops
from tilewright.nn.batch import Batch, Packed
from tilewright.nn.rope import Rope
from tilewright.ops.paged import CODES
from tilewright.ops.served_heads import paged_is_packed, served_heads
from tilewright.ops.values import valued

__all__ = ["Heads", "KVCache", "KeysValues", "LatentCache", "PackedKeysValues", "PagedKeysValues", "ServedKeysValues"]

# T tokens, H query heads, L layers, P pages, G key/value heads, S tokens per page, D head dim


class Heads(NamedTuple):
    """The options of an attention layer, for `KeysValues.attend`; `nn.Attention` explains the fields."""

    rope: Rope
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_eps: float
    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None = None


class KeysValues(Protocol):
    """Stores the keys and values of one layer and attends to them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch | Packed, heads: Heads) -> Tensor:
        """q [T, H, D], k and v [T, G, D], before norms and rotation -> [T, H, D]."""
        ...


class PagedKeysValues(NamedTuple):
    """One layer of a `KVCache`."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    windowed: bool = False
    """Whether the layer uses the pages of `Batch.window_table`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch | Packed, heads: Heads) -> Tensor:
        """Write the keys and values of this step to their pages; each token then attends to its whole sequence so far."""
        if not isinstance(batch, Batch):
            raise TypeError(
                "attention with a paged cache needs an nn.Batch, which gives the place of each token in the cache; got "
                f"{type(batch).__name__}"
            )
        slots, table = (batch.window_slots, batch.window_table) if self.windowed else (batch.slots, batch.block_table)
        if slots is None or table is None:
            raise ValueError("this layer has a separate set of pages, so its nn.Batch needs window_slots and window_table")
        q_THD = ops.rope_kv_write(
            q, k, v, batch.positions, heads.rope.cos_sin, self.k, self.v, slots,
            heads.q_norm, heads.k_norm, heads.norm_eps, heads.rope.interleaved, self.k_scale, self.v_scale,
        )  # fmt: skip
        return ops.paged_attention(
            q_THD, self.k, self.v, table, batch.kv_lens, batch.cu_q, batch.max_q_len, heads.scale, heads.window,
            self.k_scale, self.v_scale, heads.sinks, heads.softcap,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PackedKeysValues:
    """Stores nothing: tokens attend to the keys and values of their own document in the batch, with gradients.

    deterministic: the same call always gives bitwise the same gradients; on a GPU this is slower.
    """

    deterministic: bool = False

    def layer(self, index: int) -> "PackedKeysValues":
        """The object to pass to attention layer `index`."""
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch | Packed, heads: Heads) -> Tensor:
        """Causal attention within each document."""
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = ops.rms_norm(q, heads.q_norm, heads.norm_eps), ops.rms_norm(k, heads.k_norm, heads.norm_eps)
        q, k = ops.rope(q, k, batch.positions, heads.rope.cos_sin, heads.rope.interleaved)
        return _within_documents(q, k, v, batch, heads, self.deterministic)


def _within_documents(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch | Packed, heads: Heads, deterministic: bool = False
) -> Tensor:
    lengths = {"cu_q": batch.cu_q, "cu_k": batch.cu_q, "max_q": batch.max_q_len, "max_k": batch.max_q_len}
    o_THD = ops.attention(
        q, k, v, causal=True, scale=heads.scale, window=heads.window, sinks=heads.sinks, softcap=heads.softcap,
        deterministic=deterministic, **lengths,
    )  # fmt: skip
    assert isinstance(o_THD, Tensor)
    return o_THD


@dataclass(frozen=True, kw_only=True)
class ServedKeysValues:
    """Attention within documents with the values of the server's operators and the gradients of `PackedKeysValues`.

    In the invariant scope a token's result has the same bits as on a server that processes one token at a time or in chunks.
    The server normalises, rotates and stores heads in one kernel, which rounds less often than separate operators. If the
    server's paged attention computes the same as attention over packed rows (`paged_is_packed`), the latter is used.
    Otherwise, with gradients, attention is computed twice.
    """

    batch: Batch
    """The documents as the server would see them, each with its own pages."""
    pages: int
    page_size: int
    rows: Tensor
    """[T] int64: 0, 1, ... T - 1."""
    held: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)
    """(heads, head dim, dtype) -> memory for pages. All layers use the same memory, one after the other. It is zeroed once,
    because kernels also read beyond the end of a document, where a NaN would spread to the result."""

    @classmethod
    def of(cls, packed: Packed, *, page_size: int = 16) -> "ServedKeysValues":
        """The object for a packed batch, created without waiting for the device. page_size: the page size of the server."""
        cu, tokens = packed.cu_q, packed.positions.shape[0]
        documents = cu.shape[0] - 1
        lengths = cu.diff()
        used = (lengths + page_size - 1) // page_size
        firsts = used.cumsum(0) - used
        pages = tokens // page_size + documents
        table = firsts[:, None] + torch.arange(-(-packed.max_q_len // page_size), device=cu.device)
        owners = torch.repeat_interleave(lengths, output_size=tokens)
        batch = Batch(
            positions=packed.positions,
            slots=firsts[owners] * page_size + packed.positions,
            block_table=table.clamp_max(pages - 1).int(),
            kv_lens=lengths.int(),
            cu_q=cu,
            max_q_len=packed.max_q_len,
            logits_rows=packed.positions.new_zeros(0),
        )
        return cls(batch=batch, pages=pages, page_size=page_size, rows=torch.arange(tokens, device=cu.device))

    def layer(self, index: int) -> "ServedKeysValues":
        """The object to pass to attention layer `index`."""
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch | Packed, heads: Heads) -> Tensor:
        """Causal attention within each document."""
        if heads.softcap is None and paged_is_packed(q, k.shape[1], self.page_size, heads.window, heads.sinks):
            norms = heads.q_norm, heads.k_norm, heads.norm_eps
            q, k = served_heads(q, k, v, batch.positions, self.rows, heads.rope.cos_sin, *norms, heads.rope.interleaved)
            return _within_documents(q, k, v, batch, heads)
        kind = (k.shape[1], k.shape[2], k.dtype)
        if kind not in self.held:
            shape = (2, self.pages, k.shape[1], self.page_size, k.shape[2])
            self.held[kind] = torch.zeros(shape, dtype=k.dtype, device=k.device)
        with torch.no_grad():
            served = PagedKeysValues(self.held[kind][0], self.held[kind][1]).attend(q, k, v, self.batch, heads)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))):
            return served
        return valued(PackedKeysValues().attend(q, k, v, batch, heads), served)


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Paged keys and values: for each layer one tensor [P, G, S, D] of keys and one of values.

    An int8 or float8 cache also has a scale for each token and head, [P, G, S], and stores values transposed, [P, G, D, S].

    windowed: for each layer, whether it uses the pages of `Batch.window_table`; (): no layer does.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    k_scale: tuple[Tensor, ...] = ()
    v_scale: tuple[Tensor, ...] = ()
    windowed: tuple[bool, ...] = ()

    @classmethod
    def zeros(
        cls,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """An empty cache, one allocation. It is zeroed: kernels may read beyond a sequence's end, where a NaN would spread."""
        data = torch.zeros(2, layers, pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        if dtype not in CODES:
            return cls(k=data[0].unbind(), v=data[1].unbind())
        by_columns = data[1].view(layers, pages, kv_heads, head_dim, page_size)
        # Scales of keys and values are adjacent, because they are read together. With small pages, the 64 bytes of one of them
        # would be a separate read.
        k_scale, v_scale = torch.zeros(layers, pages, kv_heads, 2, page_size, device=device).unbind(3)
        return cls(k=data[0].unbind(), v=by_columns.unbind(), k_scale=k_scale.unbind(), v_scale=v_scale.unbind())

    @property
    def layers(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of each layer."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale) if self.k_scale else (self.k, self.v)
        return zip(*tensors, strict=True)

    def layer(self, index: int) -> PagedKeysValues:
        """The object to pass to attention layer `index`."""
        scales = (self.k_scale[index], self.v_scale[index]) if self.k_scale else (None, None)
        return PagedKeysValues(self.k[index], self.v[index], *scales, windowed=bool(self.windowed) and self.windowed[index])

    @classmethod
    def of_kinds(cls, windowed: Sequence[bool], full: "KVCache", seen: "KVCache") -> "KVCache":
        """A cache with the layers of two caches, in order: windowed layers come from `seen`, the others from `full`."""

        def layers(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            rest = iter(one), iter(other)
            return tuple(next(rest[which]) for which in windowed) if one or other else ()

        pairs = ((full.k, seen.k), (full.v, seen.v), (full.k_scale, seen.k_scale), (full.v_scale, seen.v_scale))
        k, v, k_scale, v_scale = (layers(*pair) for pair in pairs)
        return cls(k=k, v=v, k_scale=k_scale, v_scale=v_scale, windowed=tuple(windowed))

    def copy_pages(self, sources: Tensor, targets: Tensor, *, windowed: bool = False) -> None:
        """Copy whole pages, in all windowed layers or in all others. sources, targets: [N] int64; a page may occur several
        times in sources, but only once in targets."""
        for index, cache in enumerate(tensor for layer in self.layers for tensor in layer):
            if self.windowed and self.windowed[index // (4 if self.k_scale else 2)] != windowed:
                continue
            # torch on a CPU cannot index float8.
            held = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            held.index_copy_(0, targets, held.index_select(0, sources))


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """Paged latent rows, each for the keys and values of a token in all heads (`nn.MLA`): one [P, S, W] tensor per layer."""

    rows: tuple[Tensor, ...]

    @classmethod
    def zeros(
        cls, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> "LatentCache":
        """An empty cache, one allocation. It is zeroed: kernels may read beyond a sequence's end, where a NaN would spread."""
        return cls(rows=torch.zeros(layers, pages, page_size, width, dtype=dtype, device=device).unbind())

    @property
    def layers(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of each layer."""
        return ((rows,) for rows in self.rows)

    def layer(self, index: int) -> Tensor:
        """The object to pass to attention layer `index`."""
        return self.rows[index]

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages in all layers. sources and targets: [N] int64; targets must be different pages."""
        for cache in self.rows:
            cache.index_copy_(0, targets, cache.index_select(0, sources))
