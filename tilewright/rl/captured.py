"""The policy's passes as a CUDA graph: the host launches the forward and backward pass of a part, and the sum of its gradients,
with one call.

Everything that differs between parts is in fixed memory that the graph reads: the tensors of the batch, its totals, and the
coefficient of the entropy bonus. A graph has room for a number of tokens, a number of sequences, and a longest sequence. If a
part has fewer tokens, the rest becomes further sequences without chosen tokens, which add 0 to loss and gradients. If it has
fewer sequences, empty ones are added. One graph with gradients is kept, and one without. A graph is captured again if a part
does not fit, or if it has far more room than is needed.

In the invariant scope a token's log-probability has the bits that it has without a graph. Gradients may differ by rounding.
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
"""(part, coefficient of the entropy bonus or None, whether the part's log-probabilities are also the old ones) -> (loss,
log-probabilities [T])."""

_WASTE = 1.5
"""A graph that has room for more than this many times the tokens of the longest part is captured again."""


def check_graphs(model: Model) -> None:
    """Raise ValueError if the passes of this policy cannot be captured."""
    device = next(model.parameters()).device
    reasons = {
        f"a CUDA device, and this is {device}": device.type != "cuda",
        "a model without routed experts": model.config.experts is not None,
    }
    for wanted, wrong in reasons.items():
        if wrong:
            raise ValueError(f"graphs wants {wanted}; leave it out, or change that")


def even_limit(sizes: Sequence[int], most: int) -> int:
    """The least limit with which `split` makes no more parts than with `most`: the parts are then about equally long."""
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
    """What fits into a graph: tokens, sequences, and tokens of one sequence."""

    tokens: int
    sequences: int
    longest: int

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]]) -> "Room":
        """Room for parts with sequences of these lengths, from a small set of sizes, so that one graph serves many steps."""
        most = max(map(sum, parts))
        unit = max(1, next_pow2(most) // 16)
        tokens = -(-most // unit) * unit
        found = cls(tokens, 0, min(tokens, documents_for(max(map(max, parts)))))
        return replace(found, sequences=documents_for(max(map(found.count, parts))))

    def serves(self, parts: Sequence[Sequence[int]]) -> bool:
        """Whether all parts fit, and at least one of them does not leave too much to be filled up."""
        most = max(map(sum, parts))
        fits = most <= self.tokens and max(map(max, parts)) <= self.longest and max(map(self.count, parts)) <= self.sequences
        return fits and self.tokens <= _WASTE * most

    def count(self, sizes: Sequence[int]) -> int:
        """How many sequences there are if tokens are filled up."""
        return len(sizes) + -(-(self.tokens - sum(sizes)) // self.longest)

    def lengths(self, sizes: Sequence[int]) -> list[int]:
        """The lengths of this many sequences: the given ones, those that fill up the tokens, and empty ones."""
        found, left = list(sizes), self.tokens - sum(sizes)
        while left:
            found.append(min(left, self.longest))
            left -= found[-1]
        return found + [0] * (self.sequences - len(found))


@dataclass(frozen=True)
class _Graph:
    """A captured pass. kind: what else it depends on. inputs, bonus: the memory that it reads."""

    room: Room
    kind: tuple[object, ...]
    inputs: Batch
    bonus: Tensor
    replay: Replay

    def serves(self, kind: tuple[object, ...], batch: Batch, parts: Sequence[Sequence[int]]) -> bool:
        """Whether it can run these parts of a batch."""
        return self.kind == kind and _width(batch) <= _width(self.inputs) and self.room.serves(parts)


class _Runner:
    """Runs the parts of batches by one graph. run: (part, coefficient of the entropy bonus or None, whether the part's
    log-probabilities are also the old ones) -> log-probabilities [T]."""

    def __init__(self, run: Callable[[Batch, float | Tensor | None, bool], Tensor], most: int, capture: Capture) -> None:
        self._run, self._most, self._capture = run, most, capture
        self._bonus, self._on_policy = 0.0, False
        self._graph: _Graph | None = None
        self.captures = 0

    def begin(self, batch: Batch, bonus: float, on_policy: bool) -> list[Batch]:
        """The parts of a batch. If no graph serves them, one is captured, which runs a pass without chosen tokens."""
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
        """Run one of the parts. Returns its log-probabilities [T]."""
        if self._graph is None or not self._fits(part):
            return self._run(part, self._bonus or None, self._on_policy)
        _fill(self._graph.inputs, part, self._graph.room)
        return self._graph.replay()[0][: len(part.tokens)].clone()

    def _fits(self, part: Batch) -> bool:
        return sum(part.sizes) <= self._most


class CapturedPasses:
    """The policy's passes over the parts of a batch, by replays of graphs: one of passes with gradients, one of others.

    Args:
        model: the policy; its trainable parameters stay in the same memory.
        pass_of: loss and log-probabilities of a part.
        most: most tokens of a part; a longer sequence is a part of its own, and is not captured.
        capture: makes a replay of a pass.
    """

    def __init__(self, model: Model, pass_of: PassOf, most: int, *, capture: Capture = as_graph) -> None:
        self._model, self._pass_of, self._weights = model, pass_of, list(trainable(model).values())
        self._sums: list[Tensor] = []
        self._learning, self._scoring = (_Runner(run, most, capture) for run in (self._add, self._score))

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return self._learning.captures + self._scoring.captures

    def gradients(self, batch: Batch, bonus: float, seen: list[Tensor], on_policy: bool) -> list[Tensor]:
        """[loss, gradient of each trainable parameter], summed over the parts in float32. The next call overwrites them.

        bonus: coefficient of the entropy bonus. seen: collects the log-probabilities. on_policy: these are also the old ones.
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
    """Columns of the sets of tokens that were drawn from."""
    return 0 if batch.support is None else batch.support.shape[1]


def _empty(batch: Batch, room: Room) -> Batch:
    """A batch that fills the room, in newly allocated memory. With filters it has room for larger sets of tokens."""
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
    """Copy a part into the memory of a graph; the rest are tokens that nobody chose. Nothing waits for the device."""
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
