"""Positions and sequence boundaries of the tokens of one forward pass: a step of the engine (`Batch`), or packed documents."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Batch", "Packed"]

# T tokens, B sequences, R rows to sample from, P pages, S tokens per page


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one step, sequence after sequence. All tensors are on the model's device.

    positions: [T] int64, each token's position in its sequence.
    slots: [T] int64, the cache slot for each token's key and value: page * S + offset; negative: none (padding).
    block_table: [B, max_pages] int32, the pages of each sequence in order; entries beyond its length are not read.
    kv_lens: [B] int32, the number of cached tokens of each sequence, including those of this step; 0 marks a padding row.
    cu_q: [B + 1] int32, where each sequence's tokens start, and finally T.
    max_q_len: the largest number of tokens of a sequence in this step; 1 means that each has exactly one.
    logits_rows: [R] int64, the rows (of T) to project to logits.
    window_slots, window_table: slots and block_table of layers with a sliding window, if these have separate pages. Entries
        for tokens that have left the window may be any page. None: all layers use the same pages.
    adapters: [4, T] int32, as `ops.adapter_order` returns it. Row 0: the tokens sorted by adapter. Row 1: the adapters of these
        tokens, in that order, numbered as in `LoraStack` (0: no adapter). Rows 2 and 3: where each tile of at most 16 tokens
        with the same adapter starts in that order, and its adapter. None: no token has an adapter.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    kv_lens: Tensor
    cu_q: Tensor
    max_q_len: int
    logits_rows: Tensor
    window_slots: Tensor | None = None
    window_table: Tensor | None = None
    adapters: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Documents, or parts of documents, one after the other; a token sees the tokens before it in its own document.

    positions: [T] int64, each token's position in its document.
    cu_q: [B + 1] int32, where each document starts, and finally T. Both tensors are on the model's device.
    max_q_len: an upper bound of the number of tokens of a document.
    adapters: as in `Batch`.
    """

    positions: Tensor
    cu_q: Tensor
    max_q_len: int
    adapters: Tensor | None = None
