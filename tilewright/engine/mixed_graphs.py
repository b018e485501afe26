"""Steps that contain prompts and decoding rows, captured as CUDA graphs.

For a step with few tokens, the launches on the host take longer than the kernels on the device, with and without prompts. So
the model's pass is captured for some numbers of tokens and rows. A step runs in the smallest graph with enough of both. The
rest is padding: tokens that are not written, in rows that attend to nothing. A step of more than `MOST_TOKENS` tokens runs
eagerly, because there the device takes longer than the host. Steps with both drafts and prompts, and steps of models on several
ranks, also run eagerly.

Head and sampling are launched eagerly after the graph, on the sampled rows, while the device still runs the graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.graphs import Bodies
from tilewright.engine.layout import Layout

__all__ = ["MOST_TOKENS", "MixedGraph", "MixedGraphs", "mixed_layout", "mixed_sizes"]

MOST_TOKENS = 1024
"""For a model of 0.6 billion parameters on an H100, a pass of this many tokens takes some 2 ms, and its launches as long."""


def mixed_sizes(max_seqs: int, max_tokens: int) -> list[tuple[int, int]]:
    """(tokens, rows) to capture, ascending. The token counts exceed the limit of the attention kernels for few queries. There
    is always one row more than a step may have, for the padding."""
    steps = (32, 64, 128, 192, 256, 384, 512, 768, MOST_TOKENS)
    counts = [tokens for tokens in steps if tokens <= max_tokens]
    return sorted({(tokens, 1 + rows) for tokens in counts for rows in (min(max_seqs, tokens, 64), min(max_seqs, tokens))})


def mixed_layout(tokens: int, rows: int, kinds: int = 1) -> Layout:
    """The layout of a captured step; each row may sample."""
    return Layout(tokens, rows, rows, kinds=kinds)


class MixedGraph:
    """One captured pass of the model. `hidden` [tokens, E] contains the result of `run` until the next call.

    `max_q_len` is the number of all tokens. Attention uses it only to choose its kernel.
    """

    derives = False

    def __init__(
        self, tokens: int, rows: int, max_pages: int, bodies: Bodies, *, device: torch.device, stream: torch.cuda.Stream,
        pool: Any, kinds: int = 1,
    ):  # fmt: skip
        self.layout = mixed_layout(tokens, rows, kinds)
        self._buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self._table = torch.zeros(kinds, rows, max_pages, dtype=torch.int32, device=device)
        inputs = self.layout.device(self._buffer, self._table, tokens)
        inputs.padded()
        stream.wait_stream(torch.cuda.current_stream(device))
        self._graphs: list[torch.cuda.CUDAGraph] = []
        mode: Any = "thread_local"  # as in DecodeGraph
        for body in filter(None, bodies):
            with torch.cuda.stream(stream):
                body(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                hidden = body(inputs)
                if self._graphs:
                    self.hidden.copy_(hidden)
            if not self._graphs:
                self.hidden: Tensor = hidden
            self._graphs.append(graph)
        torch.cuda.current_stream(device).wait_stream(stream)

    def take(self, packed: Tensor, block_table: Tensor) -> None:
        """Copy the inputs of a step: `packed` [layout.nbytes] uint8 and `block_table` [kinds, B, W] int32, on the device."""
        self._buffer.copy_(packed)
        self._table[:, : block_table.shape[1], : block_table.shape[2]].copy_(block_table)

    def run(self, adapted: bool = False) -> None:
        """Run the pass; adapted: rows have adapters."""
        self._graphs[-1 if adapted else 0].replay()


class MixedGraphs:
    """The captured sizes of one model."""

    def __init__(
        self, bodies: Bodies, *, device: torch.device, max_seqs: int, max_pages: int, max_tokens: int, pool: Any,
        progress: Callable[[str], None], kinds: int = 1,
    ):  # fmt: skip
        sizes = mixed_sizes(max_seqs, max_tokens)
        stream = torch.cuda.Stream(device)
        self._graphs: dict[tuple[int, int], MixedGraph] = {}
        for i, (tokens, rows) in enumerate(reversed(sizes)):  # largest first: the smaller graphs then reuse memory of the pool
            progress(f"capturing graphs of steps with prompts {i + 1}/{len(sizes)}")
            self._graphs[tokens, rows] = MixedGraph(
                tokens, rows, max_pages, bodies, device=device, stream=stream, pool=pool, kinds=kinds
            )
        self._sizes = sizes

    def of_step(self, tokens: int, rows: int) -> MixedGraph | None:
        """The smallest graph with room for a step, or None."""
        return next((self._graphs[size] for size in self._sizes if tokens <= size[0] and rows < size[1]), None)
