"""Decode steps captured as CUDA graphs: the host launches a whole step with two calls.

Steps in which some rows have drafts are captured only for small numbers of rows. In these graphs each row has room for the
largest number of tokens that a row may have.

The model's body and the tail (head and sampling) are captured separately. The tail has several variants (`head.py`). For steps
with masks, the head is a graph of its own, so that the device computes the logits while the host fills the masks. Each graph is
made for a number of rows. A step with fewer rows runs in the next larger graph, with padding rows that write nothing and attend
to nothing. The graphs share one memory pool, because they run one after the other on one stream.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.layout import Inputs, Layout
from tilewright.engine.sampler import LogprobTensors, Mask
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

T = TypeVar("T")


class Sampled(NamedTuple):
    """The samples of a step, on the device."""

    tokens: Tensor
    """[R] int64"""
    logprobs: LogprobTensors | None = None
    """None if no row requests them."""


Body = Callable[[Inputs], Tensor]
"""A step's inputs -> hidden [T, E], without waiting for the device."""
Bodies = tuple[Body, Body | None]
"""The body for steps without adapters, and the one for steps with adapters (None if the model has no room for adapters)."""
Tail = Callable[..., Sampled]
"""(inputs, hidden[, mask, logits]) -> samples of the sampled rows, without waiting for the device."""


class Tails(NamedTuple):
    """Head and sampling."""

    logits: Callable[[Inputs, Tensor], Tensor]
    """(inputs, hidden) -> logits of the sampled rows"""
    variants: tuple[Tail, ...]
    """`Head.tails`"""
    mask: Callable[[int], Mask] | None
    """Number of rows of logits -> their mask, at the same place each time; None: no step has masks."""

    def run_all(self, inputs: Inputs, hidden: Tensor) -> None:
        """Run all variants."""
        for tail in self.variants:
            tail(inputs, hidden)
        if self.mask is not None:
            mask = self.mask(inputs.sampled_slots.numel())
            for tail in self.variants:
                tail(inputs, hidden, mask, self.logits(inputs, hidden))


class Derive(NamedTuple):
    """A function that writes the inputs of one-token rows on the device, and the slot of padding rows."""

    inputs: Callable[[Inputs], None]
    padding_slot: int


def graph_sizes(max_seqs: int) -> list[int]:
    """Numbers of rows to capture, ascending up to `max_seqs`; they are closer together where a step is short."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_seqs + 1, 16)]
    return sorted({size for size in sizes if size < max_seqs} | {max_seqs})


def drafted_sizes(max_seqs: int, row_tokens: int, max_samples: int) -> list[int]:
    """Numbers of rows to capture with room for `row_tokens` in each, ascending; none if rows have only one token."""
    return [rows for rows in (1, 2, 4, 8, 16) if row_tokens > 1 and rows <= max_seqs and rows * row_tokens <= max_samples]


def layout_of(rows: int, row_tokens: int = 1, kinds: int = 1) -> Layout:
    """The layout of a captured step."""
    tokens = rows * row_tokens
    return Layout(tokens, rows, tokens, None if row_tokens == 1 else row_tokens, kinds=kinds)


class DecodeGraph:
    """One captured step. `hidden` [rows * row_tokens, E] contains the result of `run` until the next call."""

    def __init__(
        self,
        rows: int,
        row_tokens: int,
        max_pages: int,
        bodies: Bodies,
        tails: Tails | None,
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
        """The slots that `inputs` contains, for a step whose inputs are derived."""
        self.derives = derive is not None and self.layout.each is None
        """Whether the rows have one token each and their inputs are derived from the state of the slots."""
        if derive is not None and self.derives:
            bodies = _derived(bodies, derive)
        self._logits: torch.cuda.CUDAGraph | None = None
        self._tails: list[tuple[torch.cuda.CUDAGraph, Sampled]] = []
        self._masked: list[tuple[torch.cuda.CUDAGraph, Sampled]] = []
        with _early(rows * row_tokens):
            self._capture(bodies, tails, device, stream, pool)

    def _capture(self, bodies: Bodies, tails: Tails | None, device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
        inputs, capture = self.inputs, partial(_captured, stream, pool)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for body in filter(None, bodies):
                hidden = body(inputs)
                if tails is not None:
                    tails.run_all(inputs, hidden)
        self._body, hidden = capture(bodies[0], inputs)
        self.hidden, self._adapted = hidden, self._body
        if bodies[1] is not None:
            adapted = bodies[1]
            self._adapted, _ = capture(lambda: hidden.copy_(adapted(inputs)))  # the tails read from here
        if tails is not None:
            self._tails = [capture(tail, inputs, hidden) for tail in tails.variants]
            if tails.mask is not None:
                mask = tails.mask(inputs.sampled_slots.numel())
                # The pool gives the memory of these logits to graphs that are captured later.
                self._logits, logits = capture(tails.logits, inputs, hidden)
                self._masked = [capture(tail, inputs, hidden, mask, logits) for tail in tails.variants]
        torch.cuda.current_stream(device).wait_stream(stream)

    def run(self, adapted: bool = False) -> None:
        """Run the body. It derives its inputs if `derives`; otherwise call `take` first. adapted: rows have adapters."""
        (self._adapted if adapted else self._body).replay()

    def take(self, packed: Tensor, block_table: Tensor) -> None:
        """Copy inputs that are not derived: `packed` [layout.nbytes] uint8 and `block_table` [kinds, B, W] int32, on the
        device."""
        self._buffer.copy_(packed)
        self._table[:, : block_table.shape[1], : block_table.shape[2]].copy_(block_table)

    def replay(self, packed: Tensor, block_table: Tensor) -> None:
        """`take`, then `run`."""
        self.take(packed, block_table)
        self.run()

    def sample(self, tail: int) -> Sampled:
        """Run head and sampling after the body. `tail`: the index of the variant. The next call overwrites the result."""
        return _replayed(self._tails[tail])

    def logits(self) -> None:
        """Run the head after the body. `sample_masked` must follow, with no other graph between them: it may use the memory."""
        assert self._logits is not None
        self._logits.replay()

    def sample_masked(self, tail: int) -> Sampled:
        """Apply the masks of `Tails.mask` to the logits, and sample. Otherwise like `sample`."""
        return _replayed(self._masked[tail])


def _captured(stream: torch.cuda.Stream, pool: Any, launch: Callable[..., T], *args: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """(a graph of the launches of a function, its result)"""
    graph = torch.cuda.CUDAGraph()
    # Meanwhile NCCL queries its events from its own thread, which would invalidate a capture with global error mode.
    mode: Any = "thread_local"
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        result = launch(*args)
    return graph, result


def _replayed(captured: tuple[torch.cuda.CUDAGraph, Sampled]) -> Sampled:
    graph, sampled = captured
    graph.replay()
    return sampled


def _early(tokens: int) -> AbstractContextManager[Any]:
    """The context for the capture of a step: in a step of one token, launches start before the preceding launch has ended.

    No launch of a step writes parameters. Steps of more tokens gain nothing from it (docs/experiments/overlapping-launches.md).
    """
    return early_launches() if tokens == 1 else nullcontext()


def _padding(layout: Layout, buffer: Tensor, table: Tensor, derive: Derive | None) -> Inputs:
    """Inputs whose rows are all padding: slot -1 writes nothing, and the sample goes to the row after the last slot."""
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
    bodies: Bodies, tails: Tails | None, derive: Derive | None, *, max_seqs: int, max_pages: int, row_tokens: int,
    max_samples: int, kinds: int = 1,
) -> None:  # fmt: skip
    """Run every decode step that would be captured, on meta tensors: same launches as a capture, but without capturing."""
    layouts = [layout_of(rows, kinds=kinds) for rows in graph_sizes(max_seqs)]
    layouts += [layout_of(rows, row_tokens, kinds) for rows in drafted_sizes(max_seqs, row_tokens, max_samples)]
    for layout in layouts:
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="meta")
        table = torch.zeros(kinds, layout.seqs, max_pages, dtype=torch.int32, device="meta")
        inputs = _padding(layout, buffer, table, derive)
        with _early(layout.seqs * (layout.each or 1)):
            for body in filter(None, _derived(bodies, derive) if derive is not None and layout.each is None else bodies):
                hidden = body(inputs)
                if tails is not None:
                    tails.run_all(inputs, hidden)


class DecodeGraphs:
    """The captured sizes of one model."""

    def __init__(
        self,
        bodies: Bodies,
        tails: Tails | None,
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
        # Largest first: the smaller graphs then reuse memory of the pool.
        for i, (rows, tokens) in enumerate(sorted(sizes, key=lambda size: -size[0] * size[1])):
            progress(f"capturing decode graphs {i + 1}/{len(sizes)}")
            self._graphs[rows, tokens] = DecodeGraph(
                rows, tokens, max_pages, bodies, tails, derive=derive, device=device, stream=stream, pool=pool,
                kinds=kinds,
            )  # fmt: skip

    def of(self, rows: int, row_tokens: int) -> DecodeGraph:
        """The graph that was captured for exactly `rows` rows, with room for `row_tokens` tokens in each."""
        return self._graphs[rows, row_tokens]

    def for_rows(self, rows: int) -> DecodeGraph:
        """The smallest graph with room for `rows` rows; there is one for every number up to max_seqs."""
        return self._graphs[self._sizes[bisect_left(self._sizes, rows)], 1]

    def for_drafts(self, rows: int) -> DecodeGraph | None:
        """The smallest graph with room for `rows` rows with drafts, or None."""
        at = bisect_left(self._drafted_sizes, rows)
        return None if at == len(self._drafted_sizes) else self._graphs[self._drafted_sizes[at], self._row_tokens]
