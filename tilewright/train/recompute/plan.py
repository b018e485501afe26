"""Which tensors each block keeps, so that what is held fits a budget and the least time goes into recomputing the rest.

A block is either left alone (autograd keeps what it wants), or checkpointed with a set of calls whose results are kept: then
its inputs and those results are held, and every other call runs again. Both bytes and seconds add up over calls, so the best
sets of a block are the Pareto front of a knapsack, and those of a model the front of sums over its blocks. Both are exact for
what is held when the backward pass begins. (Herrmann et al., "Optimal checkpointing for heterogeneous chains", 2019, plan whole
layers that way; Zhao et al., "Rockmate", 2023, single tensors.)

Peak: while block i runs again, what blocks up to i hold is there, and all that block i saves. A plan is the fastest point of
the front whose peak fits. Blocks that hold more stand later, where they are gone first. Not counted: gradients, and what a
single call needs while it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewright.train.recompute.profile import BlockProfile, Profile

__all__ = ["Choice", "Plan", "full", "none", "pareto", "planned", "selective"]

_MOST_ITEMS = 60
"""Calls of a block between which is chosen, the slowest ones: a set is a number of 64 bits."""
_PRODUCTS = ("linear", "attention", "matmul", "mm", "conv", "scaled_dot_product")


@dataclass(frozen=True)
class Choice:
    """What one block keeps."""

    kept: frozenset[int] | None
    """Numbers of the calls whose results are kept; None: the block is not checkpointed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice for each block, and what it costs."""

    choices: tuple[Choice, ...]
    held_bytes: int
    """Held from the forward pass when the backward pass begins."""
    peak_bytes: int
    """The most that is held at a time, the block that is being recomputed included."""
    recompute_seconds: float
    step_seconds: float


def none(profile: Profile) -> Plan:
    """Keep all that autograd keeps."""
    return _plan(profile, [Choice(None)] * len(profile.blocks))


def full(profile: Profile) -> Plan:
    """Keep the inputs of blocks alone."""
    return _plan(profile, [Choice(frozenset())] * len(profile.blocks))


def selective(profile: Profile) -> Plan:
    """Keep the results of matrix products and of attention, recompute what lies between (Korthikanti et al., 2022)."""
    choices = []
    for block in profile.blocks:
        kept = {j for j, c in enumerate(block.calls) if _choosable(block, j) and any(word in c.name for word in _PRODUCTS)}
        choices.append(Choice(frozenset(kept)))
    return _plan(profile, choices)


def planned(profile: Profile, budget_bytes: int) -> Plan:
    """The fastest plan whose peak is at most `budget_bytes`.

    Raises:
        ValueError: no plan needs so little; the message says how much the leanest one needs.
    """
    candidates = [none(profile), full(profile), selective(profile)]
    front, sources = _model_front(profile, budget_bytes)
    for i in np.argsort(front.seconds, kind="stable"):
        plan = _plan(profile, _arranged(profile, _choices(profile, front, sources, int(i))))
        if plan.peak_bytes <= budget_bytes:
            candidates.append(plan)
            break
    fitting = [plan for plan in candidates if plan.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(plan.peak_bytes for plan in candidates)
        raise ValueError(f"a budget of {budget_bytes} bytes for activations is too small: the leanest plan needs {least}")
    return min(fitting, key=lambda plan: (plan.recompute_seconds, plan.peak_bytes))


def pareto(profile: Profile, count: int = 10) -> list[tuple[int, Plan]]:
    """(budget, plan) for budgets in equal steps from the leanest plan's peak to the peak with everything kept."""
    low, high = full(profile).peak_bytes, none(profile).peak_bytes
    low, high = min(low, high), max(low, high)
    budgets = [low + (high - low) * i // (count - 1) for i in range(count)]
    return [(budget, planned(profile, budget)) for budget in budgets]


# ---- one plan's figures


def _choosable(block: BlockProfile, j: int) -> bool:
    """Whether keeping the result of call j saves time."""
    return block.calls[j].again and block.calls[j].may_be_kept


def _held(block: BlockProfile, choice: Choice) -> dict[int, int]:
    if choice.kept is None:
        return block.saved
    kept = {key: size for j in choice.kept for key, size in block.calls[j].made.items()}
    return block.inputs | kept


def _seconds(block: BlockProfile, choice: Choice) -> float:
    if choice.kept is None:
        return 0.0
    return sum(c.seconds for j, c in enumerate(block.calls) if c.again and j not in choice.kept)


def _plan(profile: Profile, choices: Sequence[Choice]) -> Plan:
    """The figures of these choices, each storage counted once."""
    held = dict(profile.outside)
    peak = 0
    for block, choice in zip(profile.blocks, choices, strict=True):
        held |= _held(block, choice)
        if choice.kept is not None:
            peak = max(peak, sum((held | block.saved).values()))
    total = sum(held.values())
    seconds = sum(_seconds(block, choice) for block, choice in zip(profile.blocks, choices))
    return Plan(
        choices=tuple(choices), held_bytes=total, peak_bytes=max(peak, total), recompute_seconds=seconds,
        step_seconds=profile.step_seconds + seconds,
    )  # fmt: skip


def _arranged(profile: Profile, choices: Sequence[Choice]) -> list[Choice]:
    """The same choices, among blocks that do the same those that hold more behind those that hold less."""
    arranged = list(choices)
    groups: dict[object, list[int]] = {}
    for i, block in enumerate(profile.blocks):
        groups.setdefault(block.key, []).append(i)
    for places in groups.values():
        block = profile.blocks[places[0]]

        def weight(choice: Choice, block: BlockProfile = block) -> int:
            kept = choice.kept
            return sum(block.saved.values()) if kept is None else sum(block.calls[j].bytes for j in kept)

        for place, choice in zip(places, sorted((choices[i] for i in places), key=weight)):
            arranged[place] = choice
    return arranged


# ---- fronts


class _Front(NamedTuple):
    """Bytes and seconds of choices of which none is both smaller and faster than another, bytes ascending."""

    bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    tags: NDArray[np.uint64]
    """What a choice is: a set of calls; for a model, where it stands in the sums that it was chosen from."""


_ALL = np.uint64(2**64 - 1)
"""The tag of a block that is not checkpointed."""


def _pruned(size: NDArray[np.int64], seconds: NDArray[np.float64], tags: NDArray[np.uint64]) -> _Front:
    order = np.lexsort((seconds, size))
    size, seconds, tags = size[order], seconds[order], tags[order]
    best = np.minimum.accumulate(seconds)
    kept = np.ones(len(size), bool)
    kept[1:] = seconds[1:] < best[:-1]
    return _Front(size[kept], seconds[kept], tags[kept])


def _items(block: BlockProfile) -> list[int]:
    """The calls between which is chosen."""
    places = [j for j in range(len(block.calls)) if _choosable(block, j)]
    return sorted(sorted(places, key=lambda j: -block.calls[j].seconds)[:_MOST_ITEMS])


def _block_front(block: BlockProfile, limit: int) -> _Front:
    """All sets of calls that are worth keeping, and the block left alone."""
    items = _items(block)
    front = _Front(
        np.array([sum(block.inputs.values())], np.int64),
        np.array([_seconds(block, Choice(frozenset()))]),
        np.array([0], np.uint64),
    )
    for bit, j in enumerate(items):
        call = block.calls[j]
        more = front.bytes + call.bytes
        fits = more <= limit
        front = _pruned(
            np.concatenate([front.bytes, more[fits]]),
            np.concatenate([front.seconds, (front.seconds - call.seconds)[fits]]),
            np.concatenate([front.tags, front.tags[fits] | np.uint64(1 << bit)]),
        )
    alone = np.array([sum(block.saved.values())], np.int64)
    return _pruned(
        np.concatenate([front.bytes, alone]), np.concatenate([front.seconds, [0.0]]), np.concatenate([front.tags, [_ALL]])
    )  # fmt: skip


def _model_front(profile: Profile, limit: int) -> tuple[_Front, list[tuple[_Front, _Front]]]:
    """(front of sums over all blocks, for each block the front before it and its own).

    A tag of the front is (place in the front before) * 2^32 + (place in the block's front).
    """
    fronts: dict[object, _Front] = {}
    total = _Front(np.array([sum(profile.outside.values())], np.int64), np.zeros(1), np.zeros(1, np.uint64))
    sources = []
    for block in profile.blocks:
        own = fronts.get(block.key)
        if own is None:
            own = fronts[block.key] = _block_front(block, limit)
        sources.append((total, own))
        size = (total.bytes[:, None] + own.bytes).ravel()
        before, after = np.meshgrid(np.arange(len(total.bytes)), np.arange(len(own.bytes)), indexing="ij")
        tags = before.ravel().astype(np.uint64) << np.uint64(32) | after.ravel().astype(np.uint64)
        fits = size <= limit
        total = _pruned(size[fits], (total.seconds[:, None] + own.seconds).ravel()[fits], tags[fits])
        if not len(total.bytes):
            break
    return total, sources


def _choices(profile: Profile, front: _Front, sources: list[tuple[_Front, _Front]], place: int) -> list[Choice]:
    """The choices behind one point of the model's front."""
    found: list[Choice] = []
    for block, (before, own) in zip(reversed(profile.blocks), reversed(sources)):
        tag = int(front.tags[place])
        chosen = own.tags[tag & 0xFFFFFFFF]
        items = _items(block)
        kept = None if chosen == _ALL else frozenset(j for bit, j in enumerate(items) if int(chosen) >> bit & 1)
        found.append(Choice(kept))
        front, place = before, tag >> 32
    return found[::-1]
