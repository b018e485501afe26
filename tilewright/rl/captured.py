"""The policy's passes as a CUDA graph: the host launches the forward and backward pass of a part, and the sum of its gradients,
with one call.

Everything that differs between parts is in fixed memory that the graph reads: the tensors of the batch, its totals, and the
coefficient of the entropy bonus. A graph has room for a number of tokens, a number of sequences, and a longest sequence. If a
part has fewer tokens, the rest becomes further sequences without chosen tokens, which add 0 to loss and gradients. If it has
fewer sequences, empty ones are added. One graph is kept. It is captured again if a part does not fit, or if it has far more
room than is needed.

In the invariant scope a token's log-probability has the bits that it has without a graph. Gradients may differ by rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.kernels.launch.shapes import next_pow2
from tilewright.models import Model
from tilewright.rl.batch import BY_SEQUENCE, Batch, Totals, parts_of, sent, split, tensors_of
from tilewright.train.captured import Replay, as_graph, documents_for
from tilewright.train.step import trainable

__all__ = ["CapturedPasses", "Room", "check_graphs", "even_limit"]

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


class CapturedPasses:
    """Loss and gradients of a batch, summed over its parts in float32, by replays of one graph.

    Args:
        model: the policy; its trainable parameters stay in the same memory.
        pass_of: what is captured, without the backward pass.
        most: most tokens of a part; a longer sequence is a part of its own, and is not captured.
        capture: makes a replay of a pass.
    """

    def __init__(self, model: Model, pass_of: PassOf, most: int, *, capture: Callable[..., Replay] = as_graph) -> None:
        self._weights = list(trainable(model).values())
        self._pass_of, self._most, self._capture = pass_of, most, capture
        self._graph: _Graph | None = None
        self._sums: list[Tensor] = []
        self.captures = 0
        """How many graphs were captured."""

    def __call__(self, batch: Batch, bonus: float, before: list[Tensor] | None) -> list[Tensor]:
        """[loss, gradient of each trainable parameter], float32; the next call overwrites the gradients.

        bonus: coefficient of the entropy bonus. before: collects the log-probabilities, which are also the old ones; None: the
        batch has old ones.
        """
        parts = split(batch, even_limit(batch.sizes, self._most))
        fitting = [part.sizes for part in parts if sum(part.sizes) <= self._most]
        if not self._sums:
            self._sums = [torch.zeros((), device=batch.tokens.device)]
            self._sums += [torch.zeros_like(weight, dtype=torch.float32) for weight in self._weights]
        graph = self._made(batch, fitting, bonus, before is not None) if fitting else None
        for total in self._sums:
            total.zero_()
        for part in parts:
            if graph is not None and sum(part.sizes) <= self._most:
                _fill(graph.inputs, part, graph.room)
                logprobs = graph.replay()[0][: len(part.tokens)].clone()
            else:
                logprobs = self._add(part, bonus or None, before is not None)
            if before is not None:
                before.append(logprobs)
        return [self._sums[0].clone(), *self._sums[1:]]

    def _add(self, part: Batch, bonus: float | Tensor | None, on_policy: bool) -> Tensor:
        """Add the part's loss and gradients to the sums. Returns its log-probabilities."""
        loss, logprobs = self._pass_of(part, bonus, on_policy)
        grads = torch.autograd.grad(loss, self._weights)
        for total, found in zip(self._sums, (loss.detach(), *grads), strict=True):
            total += found
        return logprobs.detach()

    def _made(self, batch: Batch, parts: Sequence[Sequence[int]], bonus: float, on_policy: bool) -> _Graph:
        """The graph, captured if there is none that serves."""
        fields = ((name, x.dtype, x.shape[1:]) for name, x in tensors_of(batch).items())
        kind, graph = (bool(bonus), on_policy, batch.temperature, *fields), self._graph
        if graph is None or graph.kind != kind or not graph.room.serves(parts):
            graph = self._graph = None  # free its memory before another one is captured
            room = Room.of(parts)
            inputs, held = _empty(batch, room), torch.zeros_like(batch.sampled[:1])[0]
            replay = self._capture(lambda: [self._add(inputs, held if bonus else None, on_policy)])
            graph = self._graph = _Graph(room, kind, inputs, held, replay)
            self.captures += 1
        graph.bonus.fill_(bonus)
        return graph


def _empty(batch: Batch, room: Room) -> Batch:
    """A batch that fills the room, in newly allocated memory."""
    device, floats = batch.tokens.device, batch.sampled.dtype
    sizes = tuple(room.lengths(()))
    changed = {
        name: x.new_zeros(room.sequences if name in BY_SEQUENCE else room.tokens, *x.shape[1:])
        for name, x in tensors_of(batch).items()
    }
    changed["lengths"] = torch.tensor(sizes, device=device)
    totals = Totals(tokens=torch.ones((), dtype=floats, device=device), sequences=torch.ones((), dtype=floats, device=device))
    return replace(batch, **changed, sizes=sizes, longest=room.longest, totals=totals)


def _fill(inputs: Batch, part: Batch, room: Room) -> None:
    """Copy a part into the memory of a graph; the rest are tokens that nobody chose. Nothing waits for the device."""
    lengths = sent(torch.tensor(room.lengths(part.sizes)), inputs.lengths.device)
    own = tensors_of(part)
    for name, x in tensors_of(inputs).items():
        if name == "lengths":
            x.copy_(lengths)
            continue
        count = len(own[name])
        x[:count].copy_(own[name])
        x[count:].fill_(-1 if name == "support" else 0)
    for name in ("tokens", "sequences"):
        total = getattr(inputs.totals, name)
        assert isinstance(total, Tensor)
        total.fill_(getattr(part.totals, f"of_{name}"))
