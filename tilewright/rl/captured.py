"""Replays the policy's passes as a CUDA graph: with one call, the host launches the forward and backward pass of a part of a
batch and adds its gradients to the sums.

Everything that differs between parts is at fixed addresses that the graph reads: the tensors of the batch, its totals, and the
coefficient of the entropy bonus. A graph has room for a number of tokens, a number of sequences, and a greatest sequence
length. If a part has fewer tokens, the rest is filled up with further sequences without chosen tokens, which add 0 to the loss
and the gradients. If a part has fewer sequences, empty ones are added. One graph with gradients is kept, and one without. A
graph is captured again if a part does not fit, or if the graph has far more room than is needed.

In the invariant scope, the log-probability of a token has the same bits as without a graph. Gradients may differ by rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.kernels.launch.shapes import next_pow2
from tilewright.models import Model
from tilewright.rl.batch import BY_SEQUENCE, Batch, Totals, parts_of, sent, split, tensors_of
from tilewright.rl.policy import logprobs_of
from tilewright.train.captured import Replay, as_graph, documents_for
from tilewright.train.step import trainable

__all__ = ["CapturedPasses", "Room", "check_graphs", "even_limit"]

Capture = Callable[[Callable[[], list[Tensor]]], Replay]
PassOf = Callable[[Batch, float | Tensor | None, bool], tuple[Tensor, Tensor]]
"""(part, coefficient of the entropy bonus or None, whether the old log-probabilities are those of this pass) -> (loss,
log-probabilities [T])."""

_WASTE = 1.5
"""A graph is captured again if it has room for more than this many times the tokens of the longest part."""


def check_graphs(model: Model) -> None:
    """Raise ValueError if the passes of this policy cannot be captured."""
    device = next(model.parameters()).device
    reasons = {
        f"a CUDA device, but the device is {device}": device.type != "cuda",
        "a model without routed experts, but this one has them": model.config.experts is not None,
    }
    for wanted, wrong in reasons.items():
        if wrong:
            raise ValueError(f"graphs needs {wanted}; leave graphs out, or change that")


def even_limit(sizes: Sequence[int], most: int) -> int:
    """The least limit with which `split` makes no more parts than with `most`. With it, the parts have about the same
    length."""
    low, high = max((size for size in sizes if size <= most), default=most), most
    wanted = len(parts_of(sizes, most))
    while low < high:
        middle = (low + high) // 2
        if len(parts_of(sizes, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True)
class Room:
    """What fits into a graph: the number of tokens, the number of sequences, and the length of the longest sequence."""

    tokens: int
    sequences: int
    longest: int

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]]) -> "Room":
        """Room for parts with sequences of these lengths. The sizes are rounded up to a small set, so that one graph serves
        many steps."""
        most = max(map(sum, parts))
        unit = max(1, next_pow2(most) // 16)
        tokens = -(-most // unit) * unit
        found = cls(tokens, 0, min(tokens, documents_for(max(map(max, parts)))))
        return replace(found, sequences=documents_for(max(map(found.count, parts))))

    def serves(self, parts: Sequence[Sequence[int]]) -> bool:
        """Whether all parts fit, and the longest part does not leave too much of the room unused."""
        most = max(map(sum, parts))
        fits = most <= self.tokens and max(map(max, parts)) <= self.longest and max(map(self.count, parts)) <= self.sequences
        return fits and self.tokens <= _WASTE * most

    def count(self, sizes: Sequence[int]) -> int:
        """The number of sequences after the unused tokens are filled up with further sequences."""
        return len(sizes) + -(-(self.tokens - sum(sizes)) // self.longest)

    def lengths(self, sizes: Sequence[int]) -> list[int]:
        """`self.sequences` lengths: the given ones, then those of the sequences that fill up the tokens, then zeros."""
        found, left = list(sizes), self.tokens - sum(sizes)
        while left:
            found.append(min(left, self.longest))
            left -= found[-1]
        return found + [0] * (self.sequences - len(found))


@dataclass(frozen=True)
class _Graph:
    """A captured pass. kind: the other properties that it was captured for. inputs, bonus: the memory that it reads."""

    room: Room
    kind: tuple[object, ...]
    inputs: Batch
    bonus: Tensor
    replay: Replay

    def serves(self, kind: tuple[object, ...], batch: Batch, parts: Sequence[Sequence[int]]) -> bool:
        """Whether this graph can run these parts of a batch."""
        return self.kind == kind and _width(batch) <= _width(self.inputs) and self.room.serves(parts)


class _Runner:
    """Runs the parts of batches with one graph.

    run: (part, coefficient of the entropy bonus or None, whether the old log-probabilities are those of this pass) ->
    log-probabilities [T].
    """

    def __init__(self, run: Callable[[Batch, float | Tensor | None, bool], Tensor], most: int, capture: Capture) -> None:
        self._run, self._most, self._capture = run, most, capture
        self._bonus, self._on_policy = 0.0, False
        self._graph: _Graph | None = None
        self.captures = 0

    def begin(self, batch: Batch, bonus: float, on_policy: bool) -> list[Batch]:
        """Divide a batch into parts. If the graph does not serve them, capture a new one, with inputs that have no chosen
        tokens."""
        parts = split(batch, even_limit(batch.sizes, self._most))
        self._bonus, self._on_policy = bonus, on_policy
        fitting = [part.sizes for part in parts if self._fits(part)]
        if not fitting:
            return parts
        fields = ((name, x.dtype) for name, x in tensors_of(batch).items())
        kind, graph = (bool(bonus), on_policy, batch.temperature, *fields), self._graph
        if graph is None or not graph.serves(kind, batch, fitting):
            graph = self._graph = None  # free its memory before another one is captured
            room = Room.of(fitting)
            inputs, held = _empty(batch, room), torch.zeros_like(batch.sampled[:1])[0]
            replay = self._capture(lambda: [self._run(inputs, held if bonus else None, on_policy)])
            graph = self._graph = _Graph(room, kind, inputs, held, replay)
            self.captures += 1
        graph.bonus.fill_(bonus)
        return parts

    def logprobs(self, part: Batch) -> Tensor:
        """Run a part. Returns its log-probabilities [T]."""
        if self._graph is None or not self._fits(part):
            return self._run(part, self._bonus or None, self._on_policy)
        _fill(self._graph.inputs, part, self._graph.room)
        return self._graph.replay()[0][: len(part.tokens)].clone()

    def _fits(self, part: Batch) -> bool:
        return sum(part.sizes) <= self._most


class CapturedPasses:
    """The policy's passes over the parts of a batch, as replays of two graphs: one with gradients, one without.

    Args:
        model: the policy. The memory of its trainable parameters must not change.
        pass_of: computes the loss and the log-probabilities of a part.
        most: greatest number of tokens in a part. A longer sequence becomes a part of its own, which is run without a graph.
        capture: (a function that runs a pass) -> a function that replays it.
    """

    def __init__(self, model: Model, pass_of: PassOf, most: int, *, capture: Capture = as_graph) -> None:
        self._model, self._pass_of, self._weights = model, pass_of, list(trainable(model).values())
        self._sums: list[Tensor] = []
        self._learning, self._scoring = (_Runner(run, most, capture) for run in (self._add, self._score))

    @property
    def captures(self) -> int:
        """The number of graphs captured so far."""
        return self._learning.captures + self._scoring.captures

    def gradients(self, batch: Batch, bonus: float, seen: list[Tensor], on_policy: bool) -> list[Tensor]:
        """[loss, gradient of each trainable parameter], summed over the parts in float32. The next call overwrites the
        gradients.

        bonus: coefficient of the entropy bonus. seen: a list to which the log-probabilities of the parts are appended.
        on_policy: whether the old log-probabilities are those of this pass.
        """
        if not self._sums:
            self._sums = [torch.zeros((), device=batch.tokens.device)]
            self._sums += [torch.zeros_like(weight, dtype=torch.float32) for weight in self._weights]
        parts = self._learning.begin(batch, bonus, on_policy)
        for total in self._sums:
            total.zero_()
        seen += [self._learning.logprobs(part) for part in parts]
        return [self._sums[0].clone(), *self._sums[1:]]

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """[T]: the log-probabilities of all tokens, without gradients."""
        bare = replace(batch, kept=None, advantages=None, returns=None, values=None, reference=None)
        return torch.cat([self._scoring.logprobs(part) for part in self._scoring.begin(bare, 0.0, False)])

    def _add(self, part: Batch, bonus: float | Tensor | None, on_policy: bool) -> Tensor:
        """Add the part's loss and gradients to the sums."""
        loss, logprobs = self._pass_of(part, bonus, on_policy)
        grads = torch.autograd.grad(loss, self._weights)
        for total, found in zip(self._sums, (loss.detach(), *grads), strict=True):
            total += found
        return logprobs.detach()

    def _score(self, part: Batch, bonus: float | Tensor | None, on_policy: bool) -> Tensor:
        return logprobs_of(self._model, part)


def _width(batch: Batch) -> int:
    """The number of columns of `support`; 0 without filters."""
    return 0 if batch.support is None else batch.support.shape[1]


def _empty(batch: Batch, room: Room) -> Batch:
    """A batch that fills the room, in newly allocated memory. With filters, `support` has room for up to the next power of two
    columns."""
    device, floats = batch.tokens.device, batch.sampled.dtype
    sizes = tuple(room.lengths(()))
    changed = {
        name: x.new_zeros(room.sequences if name in BY_SEQUENCE else room.tokens) for name, x in tensors_of(batch).items()
    }
    changed["lengths"] = torch.tensor(sizes, device=device)
    if batch.support is not None:
        changed["support"] = batch.support.new_full((room.tokens, next_pow2(_width(batch))), -1)
    totals = Totals(tokens=torch.ones((), dtype=floats, device=device), sequences=torch.ones((), dtype=floats, device=device))
    return replace(batch, **changed, sizes=sizes, longest=room.longest, totals=totals)


def _fill(inputs: Batch, part: Batch, room: Room) -> None:
    """Copy a part into the memory of a graph. The remaining tokens are marked as not chosen. Nothing waits for the device."""
    own = tensors_of(part)
    own["lengths"] = sent(torch.tensor(room.lengths(part.sizes)), inputs.lengths.device)
    for name, x in tensors_of(inputs).items():
        if name == "support":
            x.fill_(-1)
            x[: len(own[name]), : own[name].shape[1]].copy_(own[name])
        else:
            x[: len(own[name])].copy_(own[name])
            x[len(own[name]) :].zero_()
    for name in ("tokens", "sequences"):
        total = getattr(inputs.totals, name)
        assert isinstance(total, Tensor)
        total.fill_(getattr(part.totals, f"of_{name}"))
