"""The ranks of a run: joining them, and the groups of each dimension of a plan. Over gloo on CPUs, NCCL on cards."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tilewright.parallel.plan import Plan
from tilewright.parallel.ranks import ALONE, Ranks

__all__ = ["Mesh", "abort", "join", "leave"]

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where a rank stands.

    pair: the first and the last part of the layers, for those two; alone elsewhere.
    ep, same: of the replicas, those that share a set of experts, and those that have the same ones of them.
    """

    rank: int = 0
    world: Ranks = ALONE
    dp: Ranks = ALONE
    tp: Ranks = ALONE
    pp: Ranks = ALONE
    cp: Ranks = ALONE
    pair: Ranks = ALONE
    ep: Ranks = ALONE
    same: Ranks = ALONE


def join(plan: Plan, *, rank: int, device: torch.device, store: Store, invariant: bool) -> Mesh:
    """Meet the other ranks at `store` and form the groups. Ends with `leave`."""
    if plan.ranks == 1:
        return Mesh()
    cards = device.type == "cuda"
    if cards:
        torch.cuda.set_device(device)
    # No `device_id`: with it groups are split off the first communicator, which ends in a segmentation fault where the
    # process had a group before, or where autograd's thread uses such a communicator.
    dist.init_process_group("nccl" if cards else "gloo", store=store, rank=rank, world_size=plan.ranks, timeout=_TIMEOUT)
    groups = _Groups(rank, plan.ranks, invariant)
    found = {name: groups.of(_along(plan, name)) for name in ("pp", "dp", "cp", "tp")}
    found["pair"] = groups.of([(line[0], line[-1]) for line in _along(plan, "pp")] if plan.pp > 1 else [])
    found |= {"ep": ALONE, "same": found["dp"]}
    if plan.ep > 1:
        replicas, same = _along(plan, "dp"), plan.expert_replicas
        found["same"] = groups.of([line[at : at + same] for line in replicas for at in range(0, plan.dp, same)])
        found["ep"] = groups.of([line[at::same] for line in replicas for at in range(same)])
    if cards:
        groups.connect(device)
    return Mesh(rank=rank, world=groups.of([tuple(range(plan.ranks))]), **found)


def _along(plan: Plan, name: str) -> list[tuple[int, ...]]:
    """The ranks that differ in their place along one dimension alone: a list for each place in the others."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.ranks):
        others = tuple(at for other, at in plan.place(rank).items() if other != name)
        lines.setdefault(others, []).append(rank)
    return [tuple(line) for line in lines.values()]


class _Groups:
    """The groups of torch.distributed that a rank is in: one for each set of ranks, whatever it is used for."""

    def __init__(self, rank: int, world: int, invariant: bool):
        self._rank, self._invariant = rank, invariant
        self._made: dict[tuple[int, ...], Any] = {tuple(range(world)): dist.group.WORLD}

    def of(self, sets: Sequence[tuple[int, ...]]) -> Ranks:
        """The set that this rank is in. Each rank forms all groups in the same order, as torch wants it."""
        own = ALONE
        for members in sets:
            if len(members) > 1 and members not in self._made:
                self._made[members] = dist.new_group(list(members))
            if len(members) > 1 and self._rank in members:
                own = Ranks(self._made[members], members.index(self._rank), len(members), self._invariant)
        return own

    def connect(self, device: torch.device) -> None:
        """Make the communicators now, one after the other: NCCL makes one in a group's first exchange, which waits for all its
        ranks, and may come in an order of its own on each, in autograd's thread, or while a graph is captured."""
        for members, group in self._made.items():
            if self._rank in members:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)


def leave() -> None:
    """Part from the other ranks, if there are any: all of them at the same point, when what they exchange has arrived."""
    if dist.is_initialized():
        if dist.get_backend() == "nccl":
            torch.cuda.synchronize()
        dist.destroy_process_group()


def abort() -> None:
    """End exchanges that are under way on the device, from another thread: a rank is gone."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
