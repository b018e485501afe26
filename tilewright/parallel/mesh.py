"""The ranks of a run and their groups along each dimension of a plan. Backend: gloo on CPUs, NCCL on GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tilewright.parallel.plan import Plan
from tilewright.parallel.ranks import ALONE, Ranks

__all__ = ["Mesh", "abort", "join", "leave", "lines"]

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The groups that one rank belongs to.

    pair: the rank with the first part of the layers and the rank with the last part; on all other ranks, only the rank itself.
    ep: the replicas that together hold one set of experts, including this rank.
    same: the replicas that hold the same experts as this rank.
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
    """Connect to the other ranks through `store` and form the groups. Call `leave` at the end."""
    if plan.ranks == 1:
        return Mesh()
    cards = device.type == "cuda"
    if cards:
        torch.cuda.set_device(device)
    # Without `device_id`: with it, torch splits the groups off the first communicator. This causes a segmentation fault if the
    # process had a group before, or if autograd's thread uses such a communicator.
    dist.init_process_group("nccl" if cards else "gloo", store=store, rank=rank, world_size=plan.ranks, timeout=_TIMEOUT)
    groups = _Groups(rank, plan.ranks, invariant)
    found = {name: groups.of(lines(plan, name)) for name in ("pp", "dp", "cp", "tp")}
    found["pair"] = groups.of([(line[0], line[-1]) for line in lines(plan, "pp")] if plan.pp > 1 else [])
    found |= {"ep": ALONE, "same": found["dp"]}
    if plan.ep > 1:
        replicas, same = lines(plan, "dp"), plan.expert_replicas
        found["same"] = groups.of([line[at : at + same] for line in replicas for at in range(0, plan.dp, same)])
        found["ep"] = groups.of([line[at::same] for line in replicas for at in range(same)])
    if cards:
        groups.connect(device)
    return Mesh(rank=rank, world=groups.of([tuple(range(plan.ranks))]), **found)


def lines(plan: Plan, name: str) -> list[tuple[int, ...]]:
    """The groups of ranks that differ only in their place along the dimension `name`."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.ranks):
        others = tuple(at for other, at in plan.place(rank).items() if other != name)
        lines.setdefault(others, []).append(rank)
    return [tuple(line) for line in lines.values()]


class _Groups:
    """The torch.distributed groups of a rank: one for each set of ranks. A set that is used several times has one group."""

    def __init__(self, rank: int, world: int, invariant: bool):
        self._rank, self._invariant = rank, invariant
        self._made: dict[tuple[int, ...], Any] = {tuple(range(world)): dist.group.WORLD}

    def of(self, sets: Sequence[tuple[int, ...]]) -> Ranks:
        """The group for the set that contains this rank. All ranks create all groups in the same order, as torch requires."""
        own = ALONE
        for members in sets:
            if len(members) > 1 and members not in self._made:
                self._made[members] = dist.new_group(list(members))
            if len(members) > 1 and self._rank in members:
                own = Ranks(self._made[members], members.index(self._rank), len(members), self._invariant)
        return own

    def connect(self, device: torch.device) -> None:
        """Create the communicators now, one after the other. Otherwise NCCL creates each one in the first exchange of its
        group, which waits for all ranks of the group. These first exchanges may come in a different order on each rank, in
        autograd's thread, or while a graph is captured."""
        for members, group in self._made.items():
            if self._rank in members:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)


def leave() -> None:
    """Disconnect from the other ranks, if there are any. All ranks must call this at the same point, when their exchanges are
    complete."""
    if dist.is_initialized():
        if dist.get_backend() == "nccl":
            torch.cuda.synchronize()
        dist.destroy_process_group()


def abort() -> None:
    """Abort exchanges in progress on the device, from another thread, because a rank is gone."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
