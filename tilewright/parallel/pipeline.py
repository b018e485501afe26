"""Pipeline parallelism: layers are distributed over ranks, which send each other activations and gradients
(torch.distributed.pipelining).

Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021 (1F1B and
interleaved); Qi et al., "Zero Bubble Pipeline Parallelism", 2024. torch's schedules decide which rank runs which pass, and
when. This module defines what each part of the layers computes. It also takes the gradients of each micro-batch out of the
parameters; otherwise torch would add them up in the order in which they are computed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilewright.parallel.plan import Plan
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.reduce import RunningSum, TreeSum, tree_sum
from tilewright.parallel.replicate import over_chunks

__all__ = ["Batch", "Pipeline", "keep_layers"]


class Batch(Protocol):
    """A micro-batch: token ids, and where the documents begin."""

    token_ids: Tensor
    packed: Any


def keep_layers(model: Any, plan: Plan, rank: int) -> None:
    """Reduce a decoder to the modules that this rank's parts need. The names of the modules stay the same."""
    count = len(model.blocks)
    parts = [rank + turn * plan.pp for turn in range(plan.virtual)]
    kept = {str(index): model.blocks[index] for part in parts for index in plan.layers_of(part, count)}
    model.blocks = nn.ModuleDict(kept)
    if 0 not in parts:
        model.embed = None
    if plan.parts - 1 not in parts:
        model.norm = model.head = None


class _Layers(nn.Module):
    """A part of the layers. Its input is a micro-batch (first part) or the residual stream; its output is the residual stream
    or the loss (last part)."""

    def __init__(self, model: Any, layers: range, first: bool, last: bool):
        super().__init__()
        self.blocks = nn.ModuleList([model.blocks[str(index)] for index in layers])
        self.layers, self.embed = layers, model.embed if first else None
        self.norm, self.head = (model.norm, model.head) if last else (None, None)
        self.config = model.config
        self.batches: Sequence[Any] = ()
        self.loss_of: Callable[[Any, Any], Tensor] | None = None
        self.keys_values: Any = None

    def forward(self, *stream: Tensor, index: Tensor) -> tuple[Tensor, ...] | Tensor:
        batch = self.batches[int(index)]
        if self.loss_of is not None and self.head is not None:
            end = _End(self, stream)
            return end.kept(self.loss_of(end, batch)).view(1)
        return self.through(stream, batch.token_ids, batch.packed, self.keys_values)

    def through(self, stream: tuple[Tensor, ...], token_ids: Tensor, packed: Any, keys_values: Any) -> tuple[Tensor, Tensor]:
        h, residual = (self.embed(token_ids), None) if self.embed is not None else stream
        for index, block in zip(self.layers, self.blocks):
            h, residual = block(h, residual, packed, keys_values.layer(index))
        assert residual is not None
        # A schedule that splits the backward pass detaches its output in place, which is not allowed for a view.
        return h.clone() if h._is_view() else h, residual.clone() if residual._is_view() else residual


class _End:
    """What an objective receives as the model in the last part: it can be called like the model, and has the model's head.

    The gradients of the loss with respect to the hidden states (`_ends`) and to the head are computed in the forward pass and
    stored. The reason: a schedule that splits the backward pass requests these gradients twice, but a loss that computes its
    gradients together with its value can return them only once.
    """

    def __init__(self, layers: _Layers, stream: tuple[Tensor, ...]):
        self._layers, self._stream, self.head, self.config = layers, stream, layers.head, layers.config
        self._ends: list[tuple[Tensor, Tensor]] = []

    def __call__(self, token_ids: Tensor, packed: Any, keys_values: Any) -> Tensor:
        norm: Any = self._layers.norm
        hidden = norm.add(*self._layers.through(self._stream, token_ids, packed, keys_values))[0]
        leaf = hidden.detach().requires_grad_(True)
        self._ends.append((hidden, leaf))
        return leaf

    def kept(self, loss: Tensor) -> Tensor:
        """The loss, with its gradients stored."""
        head: Any = self.head
        inputs = [*(hidden for hidden, _ in self._ends), *head.parameters()]
        grads = torch.autograd.grad(loss, [*(leaf for _, leaf in self._ends), *head.parameters()])
        return _Kept.apply(loss.detach(), grads, *inputs)  # pyright: ignore[reportReturnType]


class _Kept(torch.autograd.Function):
    """A loss whose gradients were computed earlier."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        return (None, None, *(kept * grad_outputs[0] for kept in ctx.grads))


class Pipeline:
    """This rank's parts of the layers.

    Args:
        model: a decoder that `keep_layers` has reduced.
        plan, ranks: how the layers are distributed, and over which ranks.
        layers: number of layers of the whole model.
        stream: a tensor on "meta" with the shape and dtype of the residual stream that is passed between parts.
        device: the device that computes.
    """

    def __init__(self, model: Any, plan: Plan, ranks: Ranks, layers: int, stream: Tensor, device: torch.device):
        from tilewright.parallel.stages import SCHEDULES, Stage  # imported here: it takes two seconds, and few runs need it

        last, self._device = plan.parts - 1, device
        self._parts: list[_Layers] = []
        self._stages: list[Stage] = []
        for part in (ranks.rank + turn * plan.pp for turn in range(plan.virtual)):
            module = _Layers(model, plan.layers_of(part, layers), part == 0, part == last)
            between = (stream.detach().requires_grad_(True), stream.detach().requires_grad_(True))
            stage = Stage(
                module, part, plan.parts, device, input_args=() if part == 0 else between,
                output_args=(torch.empty(1, device="meta", requires_grad=True),) if part == last else between,
                group=ranks.group,
            )  # fmt: skip
            self._parts.append(module)
            self._stages.append(stage)
        self._kind, self._one_part = SCHEDULES[plan.schedule], plan.schedule in ("gpipe", "1f1b")
        self._schedules: dict[int, Any] = {}

    def sums(
        self, batches: Sequence[Batch], loss_of: Callable[[Any, Any], Tensor], keys_values: Any, invariant: bool, chunks: Ranks
    ) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:  # fmt: skip
        """Run the forward and backward passes of all micro-batches of this replica. Returns (loss, gradients of the parameters
        of this rank's parts), summed over micro-batches.

        Args:
            loss_of: (the model as the last part sees it, batch) -> the loss.
            keys_values: the value that is passed to the attention layers.
            invariant: sum in the order of the tree (reduce.py); otherwise in the order of arrival.
            chunks: the ranks that hold the other tokens of the same micro-batches.
        """
        sums = [TreeSum() if invariant else RunningSum() for _ in self._parts]
        for stage, part, total in zip(self._stages, self._parts, sums):
            part.batches, part.loss_of, part.keys_values = batches, loss_of, keys_values
            stage.taken = partial(_take, list(part.parameters()), total, chunks)
        losses: list[Tensor] = []
        index = torch.arange(len(batches))
        ends = any(part.head is not None for part in self._parts)
        self._schedule(len(batches)).step(index=index, target=index if ends else None, losses=losses if ends else None)
        found: dict[nn.Parameter, Tensor] = {}
        for part, total in zip(self._parts, sums):
            found |= dict(zip(part.parameters(), total.result(), strict=True))
        return tree_sum([chunks.all_reduce(loss.detach().view(()))] for loss in losses)[0] if losses else torch.zeros(
            (), device=self._device
        ), found

    def _schedule(self, count: int) -> Any:
        if count not in self._schedules:
            stages: Any = self._stages[0] if self._one_part else self._stages
            self._schedules[count] = self._kind(stages, count, loss_fn=lambda loss, target: loss.sum(), scale_grads=False)
        return self._schedules[count]


def _take(parameters: Sequence[nn.Parameter], total: TreeSum | RunningSum, chunks: Ranks) -> None:
    """Add the gradients of a micro-batch to the sum, and remove them from the parameters."""
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    total.add(over_chunks([grad for grad in grads if grad is not None], chunks))
