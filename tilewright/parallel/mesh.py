"""The ranks of a run: joining them, and the groups of each dimension of a plan. Over gloo on CPUs, NCCL on cards."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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
    dist.init_process_group(
        "nccl" if cards else "gloo", store=store, rank=rank, world_size=plan.ranks, timeout=_TIMEOUT,
        device_id=device if cards else None,
    )  # fmt: skip
    names = ("pp", "dp", "cp", "tp")
    mesh = init_device_mesh(device.type, tuple(getattr(plan, name) for name in names), mesh_dim_names=names)
    groups = {name: mesh.get_group(name) for name in names}
    found = {
        name: Ranks(group, dist.get_rank(group), dist.get_world_size(group), invariant) if getattr(plan, name) > 1 else ALONE
        for name, group in groups.items()
    }
    return Mesh(
        rank=rank, world=Ranks(dist.group.WORLD, rank, plan.ranks, invariant), pair=_pair(plan, rank, invariant), **found,
        **_experts(plan, rank, invariant, found["dp"]),
    )  # fmt: skip


def _pair(plan: Plan, rank: int, invariant: bool) -> Ranks:
    """The group of this rank's first and last part of the layers. Each rank forms all groups, as torch wants it."""
    own = ALONE
    stride = plan.ranks // plan.pp
    for first in range(stride if plan.pp > 1 else 0):
        pair = [first, first + (plan.pp - 1) * stride]
        group = dist.new_group(pair)
        if rank in pair:
            own = Ranks(group, pair.index(rank), 2, invariant)
    return own


def _experts(plan: Plan, rank: int, invariant: bool, dp: Ranks) -> dict[str, Ranks]:
    """The groups of ranks with different experts, and with the same. Each rank forms all groups, as torch wants it."""
    if plan.ep == 1:
        return {"ep": ALONE, "same": dp}
    own: dict[str, Ranks] = {}
    same, step = plan.expert_replicas, plan.cp * plan.tp
    for first in range(plan.ranks // plan.dp):
        begin = first // step * step * plan.dp + first % step
        replicas = [begin + place * step for place in range(plan.dp)]
        groups = [("same", replicas[at : at + same]) for at in range(0, plan.dp, same)]
        groups += [("ep", replicas[at::same]) for at in range(same)]
        for name, members in groups:
            group = dist.new_group(members)
            if rank in members:
                own[name] = ALONE if len(members) == 1 else Ranks(group, members.index(rank), len(members), invariant)
    return own


def leave() -> None:
    """Part from the other ranks, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """End exchanges that are under way on the device, from another thread: a rank is gone."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
