"""Draft heads: one or two layers that predict the token after next from the hidden states of the model they were trained with.

At position i a head reads the model's hidden state h_i and the embedding e of the next token, t_{i+1}, and predicts t_{i+2}. To
predict further tokens it uses its own last stream as the next state. The three kinds read and combine different inputs:

| kind    | states                                           | joined as                          | then                     |
|---------|--------------------------------------------------|------------------------------------|--------------------------|
| MTP     | after the final norm                             | P [norm(e); norm(h)]               | a block, a norm, a head  |
| EAGLE   | after the final norm                             | F [e; h]                           | a block, model's head    |
| EAGLE-3 | streams before three blocks, F [s1; s2; s3]      | attention reads [norm(e); norm(h)] | block's rest, norm, head |

MTP: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. EAGLE: Li et al., 2024 (arXiv 2401.15077), whose first
block has no norm before its attention. EAGLE-3: Li et al., 2025 (arXiv 2503.01840), whose head may know fewer tokens.

    T tokens, E hidden, F stored numbers, R rows, V vocabulary, S tokens per page
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.decoder import Block, Decoder
from tilewright.nn import Batch, KVCache, LatentCache, Linear, RMSNorm

__all__ = ["CacheWithStates", "DraftHead", "Eagle3Block", "Eagle3Join", "EagleJoin", "Join", "KeptStates", "MTPJoin", "NoNorm"]


class NoNorm(nn.Module):
    """Replaces a norm that a block or a model does not have."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + residual, the same)."""
        total = x if residual is None else x + residual
        return total, total

    def add_for(self, reader: Linear, x: Tensor, residual: Tensor | None, adapters: Any = None) -> tuple[Tensor, Tensor]:
        """As `add`."""
        return self.add(x, residual)


class Join(nn.Module):
    """Combines a model's states with the next token's embedding, before a head's first block."""

    layers: tuple[int, ...] | None = None
    """The states are the streams before these blocks; None: the model's output after its final norm."""

    def kept(self, states: Tensor) -> Tensor:
        """The states in the form in which they are stored: [T, their numbers] -> [T, F]."""
        return states

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """([T, E], [T, F]) -> the input of the first block."""
        raise NotImplementedError


class EagleJoin(Join):
    """EAGLE's: one product."""

    def __init__(self, size: int, *, bias: bool, **place: Any):
        super().__init__()
        self.fc = Linear(2 * size, size, bias=bias, **place)

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Join`."""
        return self.fc(torch.cat((embedded, states), -1)), None


class MTPJoin(Join):
    """DeepSeek-V3's: a norm on each, and one product."""

    def __init__(self, size: int, *, eps: float, **place: Any):
        super().__init__()
        self.enorm, self.hnorm = RMSNorm(size, eps=eps, **place), RMSNorm(size, eps=eps, **place)
        self.eh_proj = Linear(2 * size, size, bias=False, **place)

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Join`."""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), -1)), None


class Eagle3Join(Join):
    """EAGLE-3's: three streams become one state, which the block itself combines with the embedding."""

    def __init__(self, size: int, *, wide: int, layers: Sequence[int], **place: Any):
        super().__init__()
        self.layers = tuple(layers)
        self.fc = Linear(wide, size, bias=False, **place)

    def kept(self, states: Tensor) -> Tensor:
        """See `Join`."""
        return self.fc(states)

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Join`."""
        return embedded, states


class Eagle3Block(Block):
    """A block whose attention reads [norm(embedding); norm(state)]; the stream is the state.

    normed_stream: the stream is norm(state) instead.
    """

    def __init__(self, *, hidden_norm: RMSNorm, normed_stream: bool, **parts: Any):
        super().__init__(**parts)
        self.hidden_norm, self._normed_stream = hidden_norm, normed_stream

    def forward(self, h: Tensor, residual: Tensor | None, batch: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """(embedding [T, E], state [T, E]) -> (h, residual)."""
        assert residual is not None
        normed = self.hidden_norm(residual)
        stream = normed if self._normed_stream else residual
        h = self.attn(torch.cat((self.attn_norm(h), normed), -1), batch, cache)
        normed, stream = self.ffn_norm.add(h, stream)
        return self.ffn(normed), stream


class KeptStates:
    """States by cache cell, [pages * S + 1, F]: the model writes them together with its cache, and its head reads them."""

    def __init__(self, *, pages: int, page_size: int, numbers: int, device: torch.device, dtype: torch.dtype):
        self._page_size, self._last = page_size, pages * page_size
        self.rows = torch.zeros(self._last + 1, numbers, device=device, dtype=dtype)
        """The last one is for padding."""

    def _cells(self, slots: Tensor) -> Tensor:
        return torch.where(slots < 0, self._last, slots)

    def write(self, states: Tensor, slots: Tensor) -> None:
        """states [T, F] of tokens whose keys and values go to `slots` [T]."""
        self.rows.index_copy_(0, self._cells(slots), states)

    def read(self, slots: Tensor) -> Tensor:
        """[T] -> [T, F]."""
        return self.rows[self._cells(slots)]

    def carry(self, streams: Tensor, batch: Batch) -> None:
        """For tokens that are sampled from: store the head's own streams [T, F] as the states of the next positions."""
        rows, cu_q = batch.logits_rows, batch.cu_q[1:].long()
        owner = torch.searchsorted(cu_q, rows, right=True)
        position = batch.positions[rows] + 1
        width = batch.block_table.shape[1]
        page = torch.div(position, self._page_size, rounding_mode="floor")
        cell = batch.block_table[owner, page.clamp_max(width - 1)].long() * self._page_size + position % self._page_size
        nowhere = (batch.slots[rows] < 0) | (page >= width)
        self.rows.index_copy_(0, torch.where(nowhere, self._last, cell), streams[rows])

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, as a cache does."""
        pages = self.rows[: self._last].view(-1, self._page_size, self.rows.shape[1])
        pages.index_copy_(0, targets, pages.index_select(0, sources))


class CacheWithStates:
    """A model's cache together with the states: copying pages copies both."""

    def __init__(self, cache: KVCache | LatentCache, states: KeptStates):
        self._cache, self._states = cache, states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def copy_pages(self, sources: Tensor, targets: Tensor, *, windowed: bool = False) -> None:
        """As the cache's; the states belong to the pages of layers without a window."""
        if windowed:
            self._cache.copy_pages(sources, targets, windowed=True)
            return
        self._cache.copy_pages(sources, targets)
        self._states.copy_pages(sources, targets)


class DraftHead(nn.Module):
    """A head as a separate model: its cache has the same page numbers, and `attach` connects it to the states.

    It is called with the tokens *after* the positions of the batch, and its output is for the token after those.

    tokens: [V of the head] int64, the model's ids of the head's tokens; None: the same ids.
    """

    def __init__(self, decoder: Decoder, join: Join, *, numbers: int, tokens: Tensor | None = None):
        super().__init__()
        self.decoder, self.join, self.kept_numbers = decoder, join, numbers
        self.config = decoder.config
        self.tokens: Tensor | None
        self.register_buffer("tokens", tokens, persistent=False)
        self._states: KeptStates | None = None
        self._seen: dict[int, Tensor] = {}

    @property
    def embed(self) -> nn.Module:
        """The embedding, which may be the model's."""
        return self.decoder.embed

    @property
    def blocks(self) -> nn.ModuleList:
        """The head's blocks."""
        return self.decoder.blocks

    def attach(self, model: Decoder, cache: KVCache | LatentCache, states: KeptStates) -> "CacheWithStates":
        """Store the states of tokens in `cache` in all later passes of `model`, for this head. The model must then run with the
        cache that this returns."""
        self._states = states
        beside = CacheWithStates(cache, states)
        for layer in self.join.layers or ():
            model.blocks[layer].register_forward_pre_hook(self._see(layer))

        def keep(module: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> None:
            if inputs[2] is beside:
                found = hidden if self.join.layers is None else torch.cat([self._seen[i] for i in self.join.layers], -1)
                states.write(self.join.kept(found), inputs[1].slots)
            self._seen.clear()

        model.register_forward_hook(keep)
        return beside

    def _see(self, layer: int) -> Any:
        def see(block: nn.Module, inputs: tuple[Any, ...]) -> None:
            h, residual = inputs[:2]
            self._seen[layer] = h if residual is None else h + residual

        return see

    def empty_cache(self, pages: int, page_size: int, dtype: torch.dtype | None = None) -> KVCache | LatentCache:
        """As a decoder's."""
        return self.decoder.empty_cache(pages, page_size, dtype)

    def forward(self, token_ids: Tensor, batch: Batch, cache: KVCache | LatentCache) -> Tensor:
        """token_ids [T] int64 -> streams [T, E]; those that are sampled from are stored as the next states."""
        assert self._states is not None
        h, residual = self.join(self.embed(token_ids), self._states.read(batch.slots))
        for index, block in enumerate(self.blocks):
            h, residual = block(h, residual, batch, cache.layer(index))
        stream = h if residual is None else h + residual
        self._states.carry(stream, batch)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of streams [R, E] -> [R, V of the model]; -inf for tokens that the head does not know."""
        logits = self.decoder.head(self.decoder.norm.add(hidden, None)[0])
        if self.tokens is None:
            return logits
        wide = logits.new_full((logits.shape[0], self.config.vocab_size), float("-inf"))
        return wide.index_copy_(1, self.tokens, logits)
