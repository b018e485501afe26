"""Replays `loss_and_grads` as a CUDA graph: the host launches a whole forward and backward pass with one call.

Everything that differs between micro-batches is at fixed addresses that the graph reads: tokens, targets, positions, starts of
documents, and the factor 1 / targets with which the backward pass begins. A graph is captured for a fixed number of tokens and
of documents. If a micro-batch has fewer documents, empty ones are added. Only one graph is kept: if a micro-batch has more
documents than the graph has room for, the graph is freed and a larger one is captured. Every replay writes the gradients to the
same memory. If another micro-batch of the same update follows, the gradients are copied before the next replay.

The results are bitwise those of `loss_and_grads` for the batch that `padded` returns: it has the graph's number of documents,
and the graph's value for the length of the longest document. The choice of attention kernels may depend on both values. So if
all documents are much shorter than a row, the bits may differ from those without a graph.
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
"""Replays a captured function with the current contents of its inputs. Returns the same tensors at each call."""


def check_graphs(config: TrainConfig, shape: ModelConfig, device: torch.device) -> None:
    """Raise ValueError if the passes of a run cannot be captured."""
    if not config.graphs:
        return
    reasons = {
        f"a CUDA device, but the device is {device}": device.type != "cuda",
        f"one device, but parallel is {config.parallel}": config.parallel != Plan(),
        "accumulate running, but it is tree": config.accumulate != "running",
        "rows that are completely full, which those of conversations and pairs are not": config.chat
        or config.loss != "next-token",
        f"lora_dropout 0, but it is {config.lora_dropout}": config.lora_dropout > 0,
        "a model without routed experts, but this one has them": shape.experts is not None,
    }
    for wanted, wrong in reasons.items():
        if wrong:
            raise ValueError(f"graphs needs {wanted}; leave graphs out, or change that")


def documents_for(documents: int) -> int:
    """The number of documents for which to capture a graph: one of ... 16, 24, 32, 48, 64 ..., at most 1.5 times
    `documents`."""
    unit = max(1, next_pow2(documents) // 4)
    return -(-documents // unit) * unit


def padded(batch: TrainBatch, documents: int, longest: int) -> TrainBatch:
    """The batch with empty documents added, so that there are `documents` in all, and with `longest` as the longest length."""
    cu = batch.packed.cu_q
    empty = cu[-1:].expand(documents + 1 - cu.shape[0])
    return replace(batch, packed=replace(batch.packed, cu_q=torch.cat([cu, empty]), max_q_len=longest))


def as_graph(run: Callable[[], list[Tensor]]) -> Replay:
    """Capture the launches of `run` on the current device. Before the capture, `run` is called twice: compilation, the choice
    of implementations and the filling of caches must not happen during the capture."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # the graph allocates from a pool of its own, so free what these two calls used
    graph = torch.cuda.CUDAGraph()
    # Another thread may be writing a checkpoint. Its CUDA calls would end a capture that covers all threads.
    with own_tickets(device) as counters, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = run()

    def replay() -> list[Tensor]:
        assert counters is not None  # keeps the counters alive: the graph's launches write to them
        graph.replay()
        return results

    return replay


class Captured:
    """A replacement for `train.step.loss_and_grads`, which captures a graph at the first micro-batch.

    Args:
        longest: the greatest possible length of a document, in tokens: the length of a row.
        say: called with a message at each capture.
        capture: (a function that runs a pass) -> a function that replays it.
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
        """For each micro-batch: (loss, gradient of each of `trainable(model)`), as its share of the mean over `n_targets`.

        The next call overwrites the gradients of this one.

        Raises:
            ValueError: a micro-batch differs from the first one in its number of tokens, or a document is longer than
                `longest`.
        """
        for i, batch in enumerate(batches):
            replay = self._with(model, objective, batch, n_targets)
            loss, *grads = replay()
            yield [loss / n_targets, *(grads if i + 1 == len(batches) else [grad.clone() for grad in grads])]

    def _with(self, model: Model, objective: Objective, batch: TrainBatch, n_targets: int) -> Replay:
        """Copy the inputs into the memory of the graph, and return its replay. Captures a graph if necessary."""
        documents = batch.packed.cu_q.shape[0] - 1
        if batch.packed.max_q_len > self._longest:
            raise ValueError(
                f"a document has {batch.packed.max_q_len} tokens, but the captured pass allows at most {self._longest}"
            )
        if self._inputs is not None and batch.token_ids.shape != self._inputs.token_ids.shape:
            had, has = self._inputs.token_ids.numel(), batch.token_ids.numel()
            raise ValueError(f"a micro-batch has {has} tokens, but the pass was captured with {had}; turn graphs off")
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
        # The gradient of the loss, if the loss is divided by n_targets: the backward pass begins with it.
        self._factor.fill_(float(np.float32(1) / np.float32(n_targets)))

    def _pass(self, model: Model, objective: Objective, inputs: TrainBatch) -> Callable[[], list[Tensor]]:
        weights, factor = list(trainable(model).values()), self._factor

        def run() -> list[Tensor]:
            loss = objective(model, inputs)
            return [loss.detach(), *torch.autograd.grad(loss, weights, factor)]

        return run


def _own(batch: TrainBatch) -> TrainBatch:
    """A copy of the batch in newly allocated memory."""
    packed = replace(batch.packed, positions=batch.packed.positions.clone(), cu_q=batch.packed.cu_q.clone())
    return replace(batch, token_ids=batch.token_ids.clone(), targets=batch.targets.clone(), packed=packed)
