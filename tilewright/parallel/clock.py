"""Idle time of a pipeline's schedule: by a formula, and by a simulated clock over the order of passes that is really used.

    gpipe, 1f1b   idle share = (p - 1) / (m + p - 1)              p ranks, m micro-batches, v parts of the layers per rank
    interleaved                (p - 1) / (v m + p - 1)
    zero-bubble                (p - 1) / (3 v m + p - 1)

The clock counts a forward pass of a part of the layers as 1, a backward pass as 2: 1 for inputs, 1 for weights. Transfers take
no time.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from tilewright.parallel.plan import Plan

__all__ = ["Clock", "bubble", "order", "simulated"]

Pass = tuple[int, str, int]
"""(part of the layers, F forward, B backward, I backward for inputs or W for weights, micro-batch)."""

_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_TAKES = {"F": 1, "B": 2, "I": 1, "W": 1}


def bubble(plan: Plan, micro_batches: int) -> float:
    """The share of an update's time in which a rank waits, by the formula; micro-batches are those of a replica."""
    passes = {"interleaved": plan.virtual, "zero-bubble": 3 * plan.virtual}.get(plan.schedule, 1) * micro_batches
    return (plan.pp - 1) / (passes + plan.pp - 1)


def order(plan: Plan, micro_batches: int) -> list[list[Pass]]:
    """The passes of each rank, in order."""
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
    """Result of the simulation: the idle share over all ranks, and for each rank the most activations of passes that it
    holds."""

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
            raise RuntimeError(f"schedule {plan.schedule} waits for itself")
    busy = sum(_TAKES[kind] for row in rows for _, kind, _ in row)
    return Clock(1 - busy / (max(now) * plan.pp), tuple(most))


def _ready(what: Pass, ends: dict[Pass, int], parts: int) -> int | None:
    """When the inputs of a pass are available; None if they are not yet."""
    part, kind, batch = what
    needs: list[Pass] = []
    if kind == "F":
        needs = [(part - 1, "F", batch)] if part else []
    elif kind == "W":
        needs = [(part, "B", batch)]
    else:
        needs = [(part, "F", batch)] + ([(part + 1, "B", batch)] if part + 1 < parts else [])
    return max((ends[need] for need in needs), default=0) if all(need in ends for need in needs) else None
