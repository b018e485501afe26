"""Decode steps captured as CUDA graphs: the launches of a whole step cost the host one call.

A graph is made for a number of rows; a step with fewer runs in the next larger one, with padding rows that write nowhere
and attend to nothing. Graphs share one memory pool, for they run one after the other on one stream.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.batch import Inputs, Layout

__all__ = ["DecodeGraph", "DecodeGraphs", "graph_sizes", "rehearse"]


def graph_sizes(max_seqs: int) -> list[int]:
    """Numbers of rows to capture, ascending, the last one `max_seqs`: close together where a step is short."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_seqs + 1, 16)]
    return sorted({size for size in sizes if size < max_seqs} | {max_seqs})


class DecodeGraph:
    """One captured step. After `replay`, `hidden` [rows, E] and `tokens` [rows] hold its results, until the next replay."""

    def __init__(
        self,
        rows: int,
        max_pages: int,
        forward: Callable[[Inputs], tuple[Tensor, Tensor]],
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
            forward(inputs)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self.hidden, self.tokens = forward(inputs)
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self, packed: Tensor, block_table: Tensor) -> None:
        """Run a step: `packed` [layout.nbytes] uint8 and `block_table` [B, W] int32, on the device."""
        self._buffer.copy_(packed)
        self._table[: block_table.shape[0], : block_table.shape[1]].copy_(block_table)
        self._graph.replay()


def _padding(layout: Layout, buffer: Tensor, table: Tensor) -> Inputs:
    """Rows that are all padding: slot -1 writes nothing, and the sample goes to the row past the last slot."""
    inputs = layout.device(buffer, table, 1)
    inputs.feed.fill_(-1)
    inputs.batch.slots.fill_(-1)
    return inputs


def rehearse(forward: Callable[[Inputs], tuple[Tensor, Tensor]], *, max_seqs: int, max_pages: int) -> None:
    """Run every step that would be captured, on meta tensors: launches what a capture launches, captures nothing."""
    for rows in graph_sizes(max_seqs):
        layout = Layout(rows, rows, rows)
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="meta")
        forward(_padding(layout, buffer, torch.zeros(rows, max_pages, dtype=torch.int32, device="meta")))


class DecodeGraphs:
    """The captured sizes of one model. `forward` maps inputs to (hidden, tokens) without waiting for the device."""

    def __init__(
        self,
        forward: Callable[[Inputs], tuple[Tensor, Tensor]],
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
            self._graphs[rows] = DecodeGraph(rows, max_pages, forward, device=device, stream=stream, pool=pool)

    def for_rows(self, rows: int) -> DecodeGraph:
        """The smallest graph that holds so many rows; there is one for every number up to max_seqs."""
        return self._graphs[self._sizes[bisect_left(self._sizes, rows)]]
