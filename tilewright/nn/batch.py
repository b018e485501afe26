"""What the tokens of one pass are, as plain values that go to every layer: a step of the engine, or packed documents."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Batch", "Packed"]

# T tokens, B sequences, R rows to sample from, P pages, S tokens a page


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one step, sequence after sequence; every field is on the model's device but `max_q_len`.

    positions: [T] int64, each token's position in its sequence.
    slots: [T] int64, where its key and value go: page * S + offset; negative: nowhere (padding).
    block_table: [B, max_pages] int32, the pages of each sequence in order; entries past its length are not read.
    kv_lens: [B] int32, tokens in the cache once this step's are written; 0 marks a padding row.
    cu_q: [B + 1] int32, where each sequence's tokens start, and T.
    max_q_len: the most tokens any sequence has in this step; 1 says that each has exactly one.
    logits_rows: [R] int64, which of the T rows to project to logits.
    window_slots, window_table: the same as slots and block_table for layers with a window, where these have pages of their own;
        what lies behind the window is any page. None: all layers use the same.
    adapters: [2, T] int32, the tokens in the order of their adapters, and the adapter of each in that order, as a `LoraStack`
        counts them, 0 for none; None: no token has one.
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
    """Documents, or pieces of them, one after the other; a token sees those before it in its own document.

    positions: [T] int64, each token's position in its document.
    cu_q: [B + 1] int32, where each document starts, and T. Both on the model's device.
    max_q_len: the most tokens of a document, or more.
    adapters: as in `Batch`.
    """

    positions: Tensor
    cu_q: Tensor
    max_q_len: int
    adapters: Tensor | None = None
