"""Idle time of a pipeline schedule: by formula, and by simulating the order of passes that the schedule really uses.

    p ranks, m micro-batches, v parts of the layers per rank

    gpipe, 1f1b   idle share = (p - 1) / (m + p - 1)
    interleaved                (p - 1) / (v m + p - 1)
    zero-bubble                (p - 1) / (3 v m + p - 1)

In the simulation, a forward pass of one part of the layers takes 1 unit of time. A backward pass takes 2 units: 1 for the
gradients of the inputs, and 1 for those of the weights. Transfers take no time.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from tilewright.parallel.plan import Plan

__all__ = ["Clock", "bubble", "order", "simulated"]

Pass = tuple[int, str, int]
"""(part of the layers, kind, micro-batch). Kinds: F forward, B backward, I backward for inputs only, W for weights only."""

_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_TAKES = {"F": 1, "B": 2, "I": 1, "W": 1}


def bubble(plan: Plan, micro_batches: int) -> float:
    """The share of an update's time in which a rank is idle, by formula. `micro_batches`: number per replica."""
    passes = {"interleaved": plan.virtual, "zero-bubble": 3 * plan.virtual}.get(plan.schedule, 1) * micro_batches
    return (plan.pp - 1) / (passes + plan.pp - 1)


def order(plan: Plan, micro_batches: int) -> list[list[Pass]]:
    """For each rank, its passes in the order in which it runs them."""
    if plan.schedule in ("interleaved", "zero-bubble"):
        from tilewright.parallel.stages import SCHEDULES

        places = {part: part % plan.pp for part in range(plan.parts)}
        stages = [
            SimpleNamespace(
                stage_index=turn * plan.pp, num_stages=plan.parts, group_size=plan.pp, group_rank=0, has_backward=True,
                is_first=turn == 0, is_last=False, stage_index_to_group_rank=places, submod=None, device="cpu", group=None,
            )
            for turn in range(plan.virtual)
        ]  # fmt: skip
        made = SCHEDULES[plan.schedule](stages, micro_batches, loss_fn=lambda a, b: a, scale_grads=False)
        listed = ([a for a in made.pipeline_order[rank] if a is not None] for rank in range(plan.pp))
        return [[(a.stage_index, _LETTERS[a.computation_type.name], a.microbatch_index) for a in row] for row in listed]
    found: list[list[Pass]] = []
    for rank in range(plan.pp):
        ahead = micro_batches if plan.schedule == "gpipe" else min(micro_batches, plan.pp - rank)
        row: list[Pass] = [(rank, "F", m) for m in range(ahead)]
        for m in range(micro_batches):
            row.append((rank, "B", m))
            row += [(rank, "F", m + ahead)] if m + ahead < micro_batches else []
        found.append(row)
    return found


@dataclass(frozen=True)
class Clock:
    """Result of the simulation: the idle share over all ranks, and for each rank the largest number of passes whose activations
    it stores at the same time."""

    bubble: float
    held: tuple[int, ...]


def simulated(plan: Plan, micro_batches: int) -> Clock:
    """Simulate the schedule. Raises RuntimeError if it deadlocks."""
    rows = order(plan, micro_batches)
    ends: dict[Pass, int] = {}
    at, now, held, most = [0] * plan.pp, [0] * plan.pp, [0] * plan.pp, [0] * plan.pp
    while any(a < len(row) for a, row in zip(at, rows)):
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and (ready := _ready(row[at[rank]], ends, plan.parts)) is not None:
                part, kind, batch = row[at[rank]]
                now[rank] = max(now[rank], ready) + _TAKES[kind]
                ends[part, "B" if kind in "BI" else kind, batch] = now[rank]
                held[rank] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
                most[rank] = max(most[rank], held[rank])
                at[rank], moved = at[rank] + 1, True
        if not moved:
            raise RuntimeError(f"schedule {plan.schedule} cannot finish: its passes wait for each other")
    busy = sum(_TAKES[kind] for row in rows for _, kind, _ in row)
    return Clock(1 - busy / (max(now) * plan.pp), tuple(most))


def _ready(what: Pass, ends: dict[Pass, int], parts: int) -> int | None:
    """The time at which the inputs of a pass are available; None if they are not available yet."""
    part, kind, batch = what
    needs: list[Pass] = []
    if kind == "F":
        needs = [(part - 1, "F", batch)] if part else []
    elif kind == "W":
        needs = [(part, "B", batch)]
    else:
        needs = [(part, "F", batch)] + ([(part + 1, "B", batch)] if part + 1 < parts else [])
    return max((ends[need] for need in needs), default=0) if all(need in ends for need in needs) else None
