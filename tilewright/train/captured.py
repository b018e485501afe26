"""`loss_and_grads` of micro-batches as a CUDA graph: the host launches a whole forward and backward pass with one call.

Everything that differs between micro-batches is in fixed memory that the graph reads: tokens, targets, positions, starts of
documents, and the factor 1 / targets with which the backward pass begins. A graph is made for a number of tokens and a number
of documents; if a micro-batch has fewer documents, empty ones are added. Only one graph is kept: for more documents than it has
room for, it is freed and a larger one is captured. Gradients are in the same memory each time. If more micro-batches follow in
the same update, they are copied before the next replay.

The bits are those of `loss_and_grads` for the same batch with the graph's number of documents and length of the longest
(`padded`). The choice of attention kernels may depend on both, so if all documents are far shorter than a row, the bits may
differ from those without a graph.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tilewright.kernels.launch.counters import own_tickets
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.models import Model, ModelConfig
from tilewright.parallel.plan import Plan
from tilewright.train.batch import TrainBatch
from tilewright.train.config import TrainConfig
from tilewright.train.step import Objective, trainable

__all__ = ["Captured", "as_graph", "check_graphs", "documents_for", "padded"]

Replay = Callable[[], list[Tensor]]
"""Runs what was captured, on the present content of its inputs; returns the same tensors each time."""


def check_graphs(config: TrainConfig, shape: ModelConfig, device: torch.device) -> None:
    """Raise ValueError if the passes of a run cannot be captured."""
    if not config.graphs:
        return
    reasons = {
        f"a CUDA device, and this is {device}": device.type != "cuda",
        f"one device, and parallel is {config.parallel}": config.parallel != Plan(),
        "accumulate running, and it is tree": config.accumulate != "running",
        "rows that are all full, and those of chats and pairs are not": config.chat or config.loss != "next-token",
        "lora_dropout 0": config.lora_dropout > 0,
        "a model without routed experts": shape.experts is not None,
    }
    for wanted, wrong in reasons.items():
        if wrong:
            raise ValueError(f"graphs wants {wanted}; leave it out, or change that")


def documents_for(documents: int) -> int:
    """Room for this number of documents: at most half as many more, from a small set of sizes: ... 16, 24, 32, 48, 64 ..."""
    unit = max(1, next_pow2(documents) // 4)
    return -(-documents // unit) * unit


def padded(batch: TrainBatch, documents: int, longest: int) -> TrainBatch:
    """The batch with empty documents added, up to `documents` in all, and `longest` as the length of the longest."""
    cu = batch.packed.cu_q
    empty = cu[-1:].expand(documents + 1 - cu.shape[0])
    return replace(batch, packed=replace(batch.packed, cu_q=torch.cat([cu, empty]), max_q_len=longest))


def as_graph(run: Callable[[], list[Tensor]]) -> Replay:
    """Capture the launches of `run` on the current device. It runs twice before, so that compiling, choosing implementations
    and filling caches are not part of the graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # the graph takes the memory of these runs in a pool of its own
    graph = torch.cuda.CUDAGraph()
    # Another thread may be writing a checkpoint; its calls would end a capture that covers all threads.
    with own_tickets(device) as counters, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = run()

    def replay() -> list[Tensor]:
        assert counters is not None  # the graph's launches write them
        graph.replay()
        return results

    return replay


class Captured:
    """`train.step.loss_and_grads`, captured at the first micro-batch.

    Args:
        longest: tokens of the longest possible document: those of a row.
        say: called with a message at each capture.
        capture: makes a replay of a pass.
    """

    def __init__(
        self, longest: int, *, say: Callable[[str], None] = lambda words: None, capture: Callable[..., Replay] = as_graph
    ) -> None:  # fmt: skip
        self._longest, self._say, self._capture = longest, say, capture
        self._inputs: TrainBatch | None = None
        self._factor = torch.ones(())
        self._replay: Replay | None = None

    def __call__(
        self, model: Model, objective: Objective, batches: Sequence[TrainBatch], n_targets: int
    ) -> Iterator[list[Tensor]]:  # fmt: skip
        """(loss, gradient of each of `trainable(model)`) for each micro-batch, as parts of the mean over `n_targets`.

        The next call overwrites the gradients of the last one.

        Raises:
            ValueError: a micro-batch has another number of tokens than the first, or a document is longer than `longest`.
        """
        for i, batch in enumerate(batches):
            replay = self._with(model, objective, batch, n_targets)
            loss, *grads = replay()
            yield [loss / n_targets, *(grads if i + 1 == len(batches) else [grad.clone() for grad in grads])]

    def _with(self, model: Model, objective: Objective, batch: TrainBatch, n_targets: int) -> Replay:
        """The replay of a pass, with these inputs filled in."""
        documents = batch.packed.cu_q.shape[0] - 1
        if batch.packed.max_q_len > self._longest:
            raise ValueError(f"a document has {batch.packed.max_q_len} tokens, wanted at most {self._longest}")
        if self._inputs is not None and batch.token_ids.shape != self._inputs.token_ids.shape:
            had, has = self._inputs.token_ids.numel(), batch.token_ids.numel()
            raise ValueError(f"a micro-batch has {has} tokens, and the captured pass {had}: turn graphs off")
        if self._inputs is None or documents >= self._inputs.packed.cu_q.shape[0]:
            self._replay = None  # free its memory before another one is captured
            room = documents_for(documents)
            self._inputs = _own(padded(batch, room, self._longest))
            self._factor = torch.empty((), dtype=torch.float32, device=batch.token_ids.device)
            self._fill(batch, n_targets)
            self._say(f"capturing a pass of {batch.token_ids.numel():,} tokens in up to {room} documents")
            self._replay = self._capture(self._pass(model, objective, self._inputs))
        else:
            self._fill(batch, n_targets)
        assert self._replay is not None
        return self._replay

    def _fill(self, batch: TrainBatch, n_targets: int) -> None:
        assert self._inputs is not None
        here, there = self._inputs, batch
        here.token_ids.copy_(there.token_ids)
        here.targets.copy_(there.targets)
        here.packed.positions.copy_(there.packed.positions)
        count = there.packed.cu_q.shape[0]
        here.packed.cu_q[:count].copy_(there.packed.cu_q)
        here.packed.cu_q[count:].fill_(there.token_ids.numel())
        # The gradient with which the backward pass of a division by n_targets begins.
        self._factor.fill_(float(np.float32(1) / np.float32(n_targets)))

    def _pass(self, model: Model, objective: Objective, inputs: TrainBatch) -> Callable[[], list[Tensor]]:
        weights, factor = list(trainable(model).values()), self._factor

        def run() -> list[Tensor]:
            loss = objective(model, inputs)
            return [loss.detach(), *torch.autograd.grad(loss, weights, factor)]

        return run


def _own(batch: TrainBatch) -> TrainBatch:
    """The batch in newly allocated memory."""
    packed = replace(batch.packed, positions=batch.packed.positions.clone(), cu_q=batch.packed.cu_q.clone())
    return replace(batch, token_ids=batch.token_ids.clone(), targets=batch.targets.clone(), packed=packed)
