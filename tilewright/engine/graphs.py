"""Decode steps captured as CUDA graphs: the launches of a whole step cost the host two calls.

Steps in which some rows have drafts are captured for few rows: there a row has room for as many tokens as it may ever bring.

The model's body and what follows it, head and sampling, are captured apart, and there are two tails: one for steps whose rows
want nothing but a sample, one for steps in which any row wants more of its logits. These graphs are made
for a number of rows; a step with fewer runs in the next larger one, with padding rows that write nowhere and attend to nothing.
Graphs share one memory pool, for they run one after the other on one stream.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.layout import Inputs, Layout
from tilewright.engine.sampler import LogprobTensors
from tilewright.engine.slots import row_inputs
from tilewright.op import early_launches

__all__ = [
    "Bodies",
    "Body",
    "DecodeGraph",
    "DecodeGraphs",
    "Derive",
    "Sampled",
    "Tail",
    "Tails",
    "graph_sizes",
    "layout_of",
    "rehearse",
]


class Sampled(NamedTuple):
    """What a step has drawn, on the device."""

    tokens: Tensor
    """[R] int64"""
    logprobs: LogprobTensors | None = None
    """None where no row asks."""


Body = Callable[[Inputs], Tensor]
"""A step's inputs -> hidden [T, E], without waiting for the device."""
Bodies = tuple[Body, Body | None]
"""For steps whose rows have no adapters, and for others where the model has room for adapters."""
Tail = Callable[[Inputs, Tensor], Sampled]
"""(inputs, hidden) -> what the sampled rows draw, without waiting for the device."""
Tails = tuple[Tail, ...]
"""For rows that want a sample, and for rows that want more; none on a rank without a head."""


class Derive(NamedTuple):
    """How the inputs of rows of one token are written on the device, and the slot of those that are padding."""

    inputs: Callable[[Inputs], None]
    padding_slot: int


def graph_sizes(max_seqs: int) -> list[int]:
    """Numbers of rows to capture, ascending, the last one `max_seqs`: close together where a step is short."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_seqs + 1, 16)]
    return sorted({size for size in sizes if size < max_seqs} | {max_seqs})


def drafted_sizes(max_seqs: int, row_tokens: int, max_samples: int) -> list[int]:
    """Numbers of rows to capture with room for `row_tokens` in each, ascending; none where a row has one token anyway."""
    return [rows for rows in (1, 2, 4, 8, 16) if row_tokens > 1 and rows <= max_seqs and rows * row_tokens <= max_samples]


def layout_of(rows: int, row_tokens: int = 1, kinds: int = 1) -> Layout:
    """The layout of a captured step."""
    tokens = rows * row_tokens
    return Layout(tokens, rows, tokens, None if row_tokens == 1 else row_tokens, kinds=kinds)


class DecodeGraph:
    """One captured step. `hidden` [rows * row_tokens, E] holds the result of `run` until the next."""

    def __init__(
        self,
        rows: int,
        row_tokens: int,
        max_pages: int,
        bodies: Bodies,
        tails: Tails,
        *,
        derive: Derive | None,
        device: torch.device,
        stream: torch.cuda.Stream,
        pool: Any,
        kinds: int = 1,
    ):
        self.layout = layout_of(rows, row_tokens, kinds)
        self._buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self._table = torch.zeros(kinds, rows, max_pages, dtype=torch.int32, device=device)
        self.inputs = _padding(self.layout, self._buffer, self._table, derive)
        self.slots: np.ndarray | None = None
        """The slots that `inputs` has, of a step that is derived."""
        self.derives = derive is not None and self.layout.each is None
        """Its rows have one token each, and their inputs are derived from the state of the slots."""
        if derive is not None and self.derives:
            bodies = _derived(bodies, derive)
        with _early(rows * row_tokens):
            self._capture(bodies, tails, device, stream, pool)

    def _capture(self, bodies: Bodies, tails: Tails, device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
        inputs = self.inputs
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for body in filter(None, bodies):
                hidden = body(inputs)
                for tail in tails:
                    tail(inputs, hidden)
        self._body = torch.cuda.CUDAGraph()
        # NCCL asks for its events from a thread of its own meanwhile, which would end a capture of all threads.
        mode: Any = "thread_local"
        with torch.cuda.graph(self._body, pool=pool, stream=stream, capture_error_mode=mode):
            self.hidden = bodies[0](inputs)
        self._adapted = self._body
        if bodies[1] is not None:
            self._adapted = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._adapted, pool=pool, stream=stream, capture_error_mode=mode):
                self.hidden.copy_(bodies[1](inputs))  # where the tails read
        self._tails: list[tuple[torch.cuda.CUDAGraph, Sampled]] = []
        for tail in tails:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                sampled = tail(inputs, self.hidden)
            self._tails.append((graph, sampled))
        torch.cuda.current_stream(device).wait_stream(stream)

    def run(self, adapted: bool = False) -> None:
        """Run the body of a step that is derived; adapted: rows have adapters."""
        (self._adapted if adapted else self._body).replay()

    def take(self, packed: Tensor, block_table: Tensor) -> None:
        """The inputs of a step that is not derived: `packed` [layout.nbytes] uint8 and `block_table` [kinds, B, W] int32, on
        the device."""
        self._buffer.copy_(packed)
        self._table[:, : block_table.shape[1], : block_table.shape[2]].copy_(block_table)

    def replay(self, packed: Tensor, block_table: Tensor) -> None:
        """`take` and `run`."""
        self.take(packed, block_table)
        self.run()

    def sample(self, more: bool) -> Sampled:
        """Run head and sampling behind the body; `more`: a row wants more than a sample. The result holds until the next."""
        graph, sampled = self._tails[more]
        graph.replay()
        return sampled


EARLY_TOKENS = 1
"""The most tokens of a step whose launches start early. More than one was not measured. From 17 on products are then those of
`sm90` and not cuBLAS's, which cannot."""


def _early(tokens: int) -> AbstractContextManager[Any]:
    """A step of few tokens is captured with launches that start early: none of its launches writes parameters."""
    return early_launches(EARLY_TOKENS) if tokens <= EARLY_TOKENS else nullcontext()


def _padding(layout: Layout, buffer: Tensor, table: Tensor, derive: Derive | None) -> Inputs:
    """Rows that are all padding: slot -1 writes nothing, and the sample goes to the row past the last slot."""
    if derive is not None and layout.each is None:
        inputs = row_inputs(layout.seqs, buffer, table, derive.padding_slot)
    else:
        inputs = layout.device(buffer, table, layout.each or 1)
        assert inputs.feed is not None
        inputs.feed.fill_(-1)
    inputs.batch.slots.fill_(-1)
    if inputs.batch.window_slots is not None:
        inputs.batch.window_slots.fill_(-1)
    return inputs


def _derived(bodies: Bodies, derive: Derive) -> Bodies:
    """Bodies that derive their inputs first."""

    def behind(body: Body) -> Body:
        return lambda inputs: (derive.inputs(inputs), body(inputs))[1]

    return behind(bodies[0]), bodies[1] and behind(bodies[1])


def rehearse(
    bodies: Bodies, tails: Tails, derive: Derive | None, *, max_seqs: int, max_pages: int, row_tokens: int, max_samples: int,
    kinds: int = 1,
) -> None:  # fmt: skip
    """Run every decode step that would be captured, on meta tensors: launches what a capture launches, captures nothing."""
    layouts = [layout_of(rows, kinds=kinds) for rows in graph_sizes(max_seqs)]
    layouts += [layout_of(rows, row_tokens, kinds) for rows in drafted_sizes(max_seqs, row_tokens, max_samples)]
    for layout in layouts:
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="meta")
        table = torch.zeros(kinds, layout.seqs, max_pages, dtype=torch.int32, device="meta")
        inputs = _padding(layout, buffer, table, derive)
        with _early(layout.seqs * (layout.each or 1)):
            for body in filter(None, _derived(bodies, derive) if derive is not None and layout.each is None else bodies):
                hidden = body(inputs)
                for tail in tails:
                    tail(inputs, hidden)


class DecodeGraphs:
    """The captured sizes of one model."""

    def __init__(
        self,
        bodies: Bodies,
        tails: Tails,
        derive: Derive | None = None,
        *,
        device: torch.device,
        max_seqs: int,
        max_pages: int,
        row_tokens: int,
        max_samples: int,
        progress: Callable[[str], None],
        kinds: int = 1,
    ):
        stream = torch.cuda.Stream(device)
        self.pool = pool = torch.cuda.graph_pool_handle()
        self._sizes = graph_sizes(max_seqs)
        self._drafted_sizes = drafted_sizes(max_seqs, row_tokens, max_samples)
        self._row_tokens = row_tokens
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        sizes = [(rows, 1) for rows in self._sizes] + [(rows, row_tokens) for rows in self._drafted_sizes]
        # Largest first: the smaller ones then live in memory that the pool has already.
        for i, (rows, tokens) in enumerate(sorted(sizes, key=lambda size: -size[0] * size[1])):
            progress(f"capturing decode graphs {i + 1}/{len(sizes)}")
            self._graphs[rows, tokens] = DecodeGraph(
                rows, tokens, max_pages, bodies, tails, derive=derive, device=device, stream=stream, pool=pool,
                kinds=kinds,
            )  # fmt: skip

    def of(self, rows: int, row_tokens: int) -> DecodeGraph:
        """The graph that was captured for so many rows, with room for so many tokens in each."""
        return self._graphs[rows, row_tokens]

    def for_rows(self, rows: int) -> DecodeGraph:
        """The smallest graph that holds so many rows; there is one for every number up to max_seqs."""
        return self._graphs[self._sizes[bisect_left(self._sizes, rows)], 1]

    def for_drafts(self, rows: int) -> DecodeGraph | None:
        """The smallest graph that holds so many rows with all their drafts, if there is one."""
        at = bisect_left(self._drafted_sizes, rows)
        return None if at == len(self._drafted_sizes) else self._graphs[self._drafted_sizes[at], self._row_tokens]
