"""Combines the gradients of all ranks for the optimizers, distributes the updated weights, and computes the global norm.

leaves    the parameters of a rank's model; each has one gradient per micro-batch
sums      the gradients summed over the micro-batches of an update: first those of this replica, then those of all replicas,
          in the order of the tree (reduce.py)
uses      if a parameter is used in several places, the sums of all its uses are added, also in the order of the tree
shards    with ZeRO: this replica's rows of the sums
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.parallel.context import chunk_of, loss_by_chunks
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.pieces import Part, Piece
from tilewright.parallel.pipeline import Pipeline
from tilewright.parallel.plan import Plan
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.reduce import RunningSum, TreeSum, row_squares, tree
from tilewright.parallel.replicate import RowShards, all_reduced, over_chunks

__all__ = ["Spread"]


class Spread:
    """A rank's share of a run: its part of the model, and the way in which it combines its results with those of other ranks.

    Args:
        plan, mesh: how the run is distributed, and the groups of this rank.
        part: the part of the model on this rank.
        order: names of the whole model's parameters, in the same order on every rank.
        invariant: sum in the order of the tree; otherwise in the order of arrival.
        pipeline: the pipeline of this rank's layers, if pp is greater than 1.
    """

    def __init__(
        self, plan: Plan, mesh: Mesh, part: Part, order: Sequence[str], *, invariant: bool, pipeline: Pipeline | None = None
    ):
        self.pipeline = pipeline
        self.plan, self.mesh, self.part, self.invariant = plan, mesh, part, invariant
        self.leaves: dict[str, nn.Parameter] = {n: p for n, p in part.model.named_parameters() if p.requires_grad}
        rows = {id(row) for fetched in part.fetched for row in fetched.rows}
        self._whole = [name for name, leaf in self.leaves.items() if id(leaf) not in rows]
        dealt = [name for name in self._whole if name in part.dealt]
        self._groups = [([name for name in self._whole if name not in part.dealt], RowShards(mesh.dp))]
        self._groups += [(dealt, RowShards(mesh.same))] if dealt else []
        self._shards = {name: shards for names, shards in self._groups for name in names}
        self.pieces = dict(part.pieces)
        """The piece of each parameter that this rank's optimizer updates."""
        for name in part.pieces if plan.zero else ():
            if name in self._whole:
                self.pieces[name] = part.pieces[name].narrowed(*self._shards[name].span(self.leaves[name].shape[0]))
        self.held: dict[str, Tensor] = {}
        """The last result of `weights`: this rank's pieces, in the optimizer's memory."""
        self._norm = _Norm(self.pieces, order, self._gathering(), next(iter(self.leaves.values())).device)

    # ---- weights

    def weights(self) -> dict[str, Tensor]:
        """The weights for an optimizer, which may replace their memory. Call `share` after each update."""
        own = {name: self.leaves[name] for name in self.part.pieces}
        for name in self._whole if self.plan.zero else ():
            if name in own:
                own[name] = nn.Parameter(self._shards[name].own(own[name].detach()).clone())
        self.held = dict(own)
        return dict(own)

    @torch.no_grad()
    def share(self) -> None:
        """Copy the updated weights into the model: gather them from all replicas, and set them in all places of use."""
        for group, shards in self._groups if self.plan.zero else ():
            names = [name for name in group if name in self.part.pieces]
            shards.all_gather([self.held[n].detach() for n in names], [self.leaves[n].detach() for n in names])
        for name, uses in self.part.uses.items():
            for use in uses:
                self.leaves[use].data = self.leaves[name].data

    # ---- gradients

    def owns(self, micro_batch: int, micro_batches: int) -> bool:
        """Whether this replica computes a micro-batch of an update."""
        return self.plan.owner(micro_batch, micro_batches) == self.mesh.dp.rank

    def gradients(
        self, batches: Sequence[Any], loss_of: Callable[[Any, Any], Tensor], keys_values: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """(loss, gradient of each of `weights`), summed over all micro-batches of an update.

        batches: the micro-batches of this replica. loss_of: (model, micro-batch) -> the micro-batch's part of the loss.
        keys_values: the value that `loss_of` passes to attention layers.
        """
        chunks = self.mesh.cp
        if chunks.size > 1:
            batches = [chunk_of(batch, chunks.rank, chunks.size) for batch in batches]
        if self.pipeline is not None:
            loss, found = self.pipeline.sums(batches, loss_of, keys_values, self.invariant, chunks)
            return self._finished([loss, *(found[leaf] for leaf in self.leaves.values())])
        total = TreeSum() if self.invariant else RunningSum()
        for batch in batches:
            loss = self._loss(batch, loss_of)
            found = torch.autograd.grad(loss, list(self.leaves.values()), allow_unused=bool(self.part.fetched))
            grads = [loss.detach(), *found]
            if chunks.size > 1:
                sums = iter(over_chunks([grad for grad in grads if grad is not None], chunks))
                grads = [None if grad is None else next(sums) for grad in grads]
            # Only the parameters of `Fetched` modules have no gradient here. With such modules, `plan.dealt` is always true.
            total.add(self._over_replicas(grads) if self.plan.dealt else [grad for grad in grads if grad is not None])
        return self._finished(total.result())

    def _loss(self, batch: Any, loss_of: Callable[[Any, Any], Tensor]) -> Tensor:
        if self.plan.chunks > self.plan.cp:
            return loss_by_chunks(self.part.model, batch, loss_of, self.plan.chunks)
        return loss_of(self.part.model, batch)

    def _over_replicas(self, part: Sequence[Tensor | None]) -> list[Tensor]:
        """Sum (loss, gradients of the leaves) over replicas. Returns whole gradients, or with ZeRO this replica's rows."""
        loss, *grads = part
        assert loss is not None
        by_leaf = dict(zip(self.leaves, grads, strict=True))
        found: dict[str, Tensor] = {}
        for names, shards in self._groups:
            whole = [grad.float() for name in names if (grad := by_leaf[name]) is not None]
            sums = shards.reduce_scatter(whole) if self.plan.zero else all_reduced(whole, shards.ranks)
            found |= zip(names, sums, strict=True)
        fetched = iter([rows for fetched in self.part.fetched for rows in fetched.sums])
        return [self.mesh.dp.all_reduce(loss.float()), *(found[n] if n in found else next(fetched) for n in self.leaves)]

    def _finished(self, sums: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, gradient of each of `weights`), from the sums over the micro-batches of a replica."""
        loss, *grads = sums if self.plan.dealt else self._over_replicas(sums)
        by_leaf = dict(zip(self.leaves, grads, strict=True))
        found: dict[str, Tensor] = {}
        for name in self.part.pieces:
            used = [by_leaf[name], *(by_leaf[use] for use in self.part.uses.get(name, ()))]
            total = tree(used)
            total = self.mesh.tp.all_reduce(total) if name in self.part.summed else total
            found[name] = self.mesh.pair.all_reduce(total) if name in self.part.tied else total
        return self.mesh.pp.all_reduce(loss), found

    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The sum of squares of each gradient row of the whole model, in a fixed order, for the norm of the optimizer."""
        return self._norm(grads)

    def _gathering(self) -> list[Ranks]:
        """The dimensions along which the ranks hold different pieces."""
        mesh = self.mesh
        return [ranks for ranks in (mesh.dp if self.plan.zero else mesh.ep, mesh.tp, mesh.pp) if ranks.size > 1]


class _Norm:
    """Gathers the rows' sums of squares from all ranks, into one list whose order does not depend on the plan."""

    def __init__(self, pieces: Mapping[str, Piece], order: Sequence[str], dimensions: Sequence[Ranks], device: torch.device):
        self._dimensions = dimensions
        sizes = {piece.of: _ranges(piece) for piece in pieces.values()}
        starts, total = self._starts(sizes, order)
        places = [piece.places() + starts[piece.of] for piece in pieces.values()]
        self._total, self._pads = total, []
        at = torch.cat(places).to(device)
        for ranks in dimensions:
            most = max(int(text) for text in ranks.texts(str(at.numel())))
            self._pads.append(most)
            at = ranks.all_gather(torch.nn.functional.pad(at, (0, most - at.numel()), value=-1))
        self._kept = (at >= 0).nonzero()[:, 0]
        self._at = at[self._kept]

    def _starts(self, sizes: dict[str, int], order: Sequence[str]) -> tuple[dict[str, int], int]:
        """The index of each parameter's first row, and the number of rows. Ranks exchange the sizes of their parameters,
        because a rank does not know all of them."""
        for ranks in self._dimensions:
            for text in ranks.texts("\n".join(f"{name} {size}" for name, size in sizes.items())):
                for line in text.splitlines():
                    name, size = line.rsplit(" ", 1)
                    sizes[name] = max(int(size), sizes.get(name, 0))
        starts, at = {}, 0
        for name in order:
            starts[name] = at
            at += sizes.get(name, 0)
        return starts, at

    def __call__(self, grads: Mapping[str, Tensor]) -> Tensor:
        own = torch.cat([row_squares(grad) for grad in grads.values()])
        for ranks, most in zip(self._dimensions, self._pads):
            own = ranks.all_gather(torch.nn.functional.pad(own, (0, most - own.numel())))
        return own.new_zeros(self._total).index_copy_(0, self._at, own[self._kept])


def _ranges(piece: Piece) -> int:
    """The number of sums in the norm's list for a parameter: one for each row, or if its columns are divided, one for each row
    and each column range."""
    width = piece.columns[1] - piece.columns[0]
    return piece.shape[0] * (piece.shape[1] // width if len(piece.shape) > 1 and width else 1)
