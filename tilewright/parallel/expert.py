"""Expert parallelism: the experts of a mixture are distributed over ranks. Tokens are sent to the ranks of their experts, and
the results are sent back.

Lepikhin et al., "GShard", 2020; Fedus et al., "Switch Transformers", 2021. The ranks are data-parallel replicas: each has its
own micro-batches, and holds all other parts of the model completely.

    rows by expert -> all-to-all -> products with the experts here -> all-to-all -> rows by expert -> weighted sums

If sums follow the order of the tree (reduce.py), the rows from each replica are multiplied separately, with the same shapes as
in a single process. A weight then has a separate gradient for each replica that sent tokens to it. So the summands and their
order are the same as in a single process. Otherwise, all rows of an expert are multiplied together. Once per layer and pass,
the host reads from the device how many rows go to which rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn import Linear, MoE
from tilewright.nn.moe import with_shared
from tilewright.ops.experts import ByExpert
from tilewright.parallel.pieces import Piece
from tilewright.parallel.ranks import Ranks

__all__ = ["DealtExperts", "expert_pieces"]

# T tokens, E features, X experts


class _Sent(torch.autograd.Function):
    """Exchange rows: the rows for each rank -> the rows from each rank. The backward pass sends gradients the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks.exchange(grad_outputs[0], ctx.received, ctx.sent), None, None, None


class DealtExperts(nn.Module):
    """A mixture (`nn.MoE`) of which this rank holds some of the experts, the whole router, and the shared experts.

    Args:
        whole: the complete mixture; its router, shared experts and activation are reused.
        ranks: the ranks among which the experts are divided, each with an equal, contiguous range of experts.
        apart: whether the rows from each rank are multiplied separately. There is then one weight parameter for each rank;
            these parameters share memory.
    """

    def __init__(self, whole: MoE, ranks: Ranks, apart: bool):
        super().__init__()
        self.router, self.shared, self.activation = whole.router, whole.shared, whole.activation
        self.shared_gate = whole.shared_gate
        self._ranks, self._count = ranks, whole.experts_down.experts
        weights: tuple[Any, ...] = (whole.experts_gate_up.weight, whole.experts_down.weight)
        self.gate_up, self.down = (
            nn.ParameterList([nn.Parameter(part) for _ in range(ranks.size if apart else 1)])
            for part in (ranks.own(weight.data).clone() for weight in weights)
        )

    @property
    def reader(self) -> Linear | None:
        """As `MoE.reader`."""
        return None

    def forward(self, x_TE: Tensor, adapters: Tensor | None = None) -> Tensor:
        """As `MoE.forward`."""
        weights, experts = self.router(x_TE)
        order = ops.sort_by_expert(experts, self._count)
        sizes = order.offsets.diff().view(self._ranks.size, -1)
        theirs = self._ranks.all_to_all(sizes)
        sent, received = (torch.stack((sizes.sum(1), theirs.sum(1)))).tolist()
        rows: Any = _Sent.apply(ops.permute_tokens(x_TE, order), self._ranks, sent, received)
        made = self._apart(rows, theirs, received) if len(self.down) > 1 else self._together(rows, theirs)
        back: Any = _Sent.apply(made, self._ranks, received, sent)
        routed = ops.combine_tokens(back, order, weights)
        return with_shared(self, x_TE, routed, adapters)

    def _apart(self, rows: Tensor, sizes: Tensor, received: Sequence[int]) -> Tensor:
        ends = torch.nn.functional.pad(sizes.cumsum(1, dtype=torch.int32), (1, 0))
        each = zip(rows.split(list(received)), ends, self.gate_up, self.down, strict=True)
        return torch.cat([self._products(some, _by_expert(some, offsets), a, b) for some, offsets, a, b in each])

    def _together(self, rows: Tensor, sizes: Tensor) -> Tensor:
        ranks, own = sizes.shape
        expert = torch.arange(own, dtype=torch.int32, device=rows.device).repeat(ranks)
        order = ops.sort_by_expert(expert.repeat_interleave(sizes.flatten(), output_size=rows.shape[0])[:, None], own)
        made = self._products(ops.permute_tokens(rows, order), order, self.gate_up[0], self.down[0])
        return made.index_select(0, order.places.flatten())

    def _products(self, rows: Tensor, order: ByExpert, gate_up: Tensor, down: Tensor) -> Tensor:
        own = self._count // self._ranks.size
        inner = ops.grouped_linear(rows, gate_up.unflatten(0, (own, -1)), order, activation=self.activation)
        return ops.grouped_linear(inner, down.unflatten(0, (own, -1)), order)


def _by_expert(rows: Tensor, offsets: Tensor) -> ByExpert:
    """The `ByExpert` of rows that are already sorted by expert."""
    order = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return ByExpert(offsets, order, order[:, None])


def expert_pieces(home: str, whole: MoE, ranks: Ranks) -> dict[str, Piece]:
    """The piece of the whole model's parameter for each expert weight on this rank, by name of the parameter here. Only the
    first weight parameter is listed; the others share its memory."""
    found: dict[str, Piece] = {}
    for name, own in (("experts_gate_up", "gate_up"), ("experts_down", "down")):
        rows, columns = getattr(whole, name).weight.shape
        each = rows // ranks.size
        found[f"{home}.{own}.0"] = Piece(
            of=f"{home}.{name}.weight", shape=(rows, columns), rows=((ranks.rank * each, (ranks.rank + 1) * each),),
            columns=(0, columns),
        )  # fmt: skip
    return found
