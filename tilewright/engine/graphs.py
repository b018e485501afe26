"""Decode steps captured as CUDA graphs: the launches of a whole step cost the host two calls.

The model's body and what follows it, head and sampling, are captured apart: rows that want more of their logits than a sample
have the same head, launched eagerly behind the body's graph. A pair of graphs is made
for a number of rows; a step with fewer runs in the next larger one, with padding rows that write nowhere and attend to nothing.
Graphs share one memory pool, for they run one after the other on one stream.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.batch import Inputs, Layout

__all__ = ["Body", "DecodeGraph", "DecodeGraphs", "Tail", "graph_sizes", "rehearse"]

Body = Callable[[Inputs], Tensor]
"""A step's inputs -> hidden [T, E], without waiting for the device."""
Tail = Callable[[Inputs, Tensor], Tensor]
"""(inputs, hidden) -> the sampled rows' tokens [R], without waiting for the device."""


def graph_sizes(max_seqs: int) -> list[int]:
    """Numbers of rows to capture, ascending, the last one `max_seqs`: close together where a step is short."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_seqs + 1, 16)]
    return sorted({size for size in sizes if size < max_seqs} | {max_seqs})


class DecodeGraph:
    """One captured step. `hidden` [rows, E] holds the result of `replay`, `tokens` [rows] that of `sample`, until the next."""

    def __init__(
        self,
        rows: int,
        max_pages: int,
        body: Body,
        tail: Tail,
        *,
        device: torch.device,
        stream: torch.cuda.Stream,
        pool: Any,
    ):
        self.layout = Layout(rows, rows, rows)
        self._buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self._table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        inputs = _padding(self.layout, self._buffer, self._table)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            tail(inputs, body(inputs))
        self._body, self._tail = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._body, pool=pool, stream=stream):
            self.hidden = body(inputs)
        with torch.cuda.graph(self._tail, pool=pool, stream=stream):
            self.tokens = tail(inputs, self.hidden)
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self, packed: Tensor, block_table: Tensor) -> None:
        """Run a step's body: `packed` [layout.nbytes] uint8 and `block_table` [B, W] int32, on the device."""
        self._buffer.copy_(packed)
        self._table[: block_table.shape[0], : block_table.shape[1]].copy_(block_table)
        self._body.replay()

    def sample(self) -> None:
        """Run head and sampling behind the body."""
        self._tail.replay()


def _padding(layout: Layout, buffer: Tensor, table: Tensor) -> Inputs:
    """Rows that are all padding: slot -1 writes nothing, and the sample goes to the row past the last slot."""
    inputs = layout.device(buffer, table, 1)
    inputs.feed.fill_(-1)
    inputs.batch.slots.fill_(-1)
    return inputs


def rehearse(body: Body, tail: Tail, *, max_seqs: int, max_pages: int) -> None:
    """Run every step that would be captured, on meta tensors: launches what a capture launches, captures nothing."""
    for rows in graph_sizes(max_seqs):
        layout = Layout(rows, rows, rows)
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="meta")
        inputs = _padding(layout, buffer, torch.zeros(rows, max_pages, dtype=torch.int32, device="meta"))
        tail(inputs, body(inputs))


class DecodeGraphs:
    """The captured sizes of one model."""

    def __init__(
        self,
        body: Body,
        tail: Tail,
        *,
        device: torch.device,
        max_seqs: int,
        max_pages: int,
        progress: Callable[[str], None],
    ):
        stream = torch.cuda.Stream(device)
        pool = torch.cuda.graph_pool_handle()
        self._sizes = graph_sizes(max_seqs)
        self._graphs: dict[int, DecodeGraph] = {}
        # Largest first: the smaller ones then live in memory that the pool has already.
        for i, rows in enumerate(reversed(self._sizes)):
            progress(f"capturing decode graphs {i + 1}/{len(self._sizes)}")
            self._graphs[rows] = DecodeGraph(rows, max_pages, body, tail, device=device, stream=stream, pool=pool)

    def for_rows(self, rows: int) -> DecodeGraph:
        """The smallest graph that holds so many rows; there is one for every number up to max_seqs."""
        return self._graphs[self._sizes[bisect_left(self._sizes, rows)]]
