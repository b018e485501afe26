"""Decides which tensors each block keeps, so that the memory fits a budget and recomputing the rest takes the least time.

A block is either left alone (autograd keeps what it needs), or checkpointed with a set of calls whose results are kept. If it
is checkpointed, its inputs and these results are kept, and every other call runs again. Both bytes and seconds add up over
calls. So the best sets of a block are the Pareto front of a knapsack problem, and the best plans of a model are the Pareto
front of sums over its blocks. Both fronts are exact for the memory at the start of the backward pass. (Herrmann et al.,
"Optimal checkpointing for heterogeneous chains", 2019, plan whole layers in this way; Zhao et al., "Rockmate", 2023, plan
single tensors.)

Peak memory: while block i runs again, memory holds what the blocks up to i keep, and everything that autograd saves in block i.
The chosen plan is the fastest point of the front whose peak fits. Among equal blocks, those that keep more come later in the
model, because their memory is freed first. Not counted: gradients, and temporary memory within a single call.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewright.train.recompute.profile import BlockProfile, Profile

__all__ = ["Choice", "Plan", "full", "none", "pareto", "planned", "selective"]

_MOST_ITEMS = 60
"""The greatest number of calls of a block that are considered; the slowest calls are chosen. The limit exists because a set of
calls is stored in a 64-bit number."""
_PRODUCTS = ("linear", "attention", "matmul", "mm", "conv", "scaled_dot_product")


@dataclass(frozen=True)
class Choice:
    """What one block keeps."""

    kept: frozenset[int] | None
    """Indices of the calls whose results are kept; None: the block is not checkpointed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice for each block, and its costs."""

    choices: tuple[Choice, ...]
    held_bytes: int
    """Bytes kept at the start of the backward pass."""
    peak_bytes: int
    """The greatest number of bytes kept at any time, including those of the block that is being recomputed."""
    recompute_seconds: float
    step_seconds: float


def none(profile: Profile) -> Plan:
    """Keep everything that autograd keeps."""
    return _plan(profile, [Choice(None)] * len(profile.blocks))


def full(profile: Profile) -> Plan:
    """Keep only the inputs of the blocks."""
    return _plan(profile, [Choice(frozenset())] * len(profile.blocks))


def selective(profile: Profile) -> Plan:
    """Keep the results of matrix products and of attention, and recompute the rest (Korthikanti et al., 2022)."""
    choices = []
    for block in profile.blocks:
        kept = {j for j, c in enumerate(block.calls) if _choosable(block, j) and any(word in c.name for word in _PRODUCTS)}
        choices.append(Choice(frozenset(kept)))
    return _plan(profile, choices)


def planned(profile: Profile, budget_bytes: int) -> Plan:
    """The fastest plan whose peak is at most `budget_bytes`.

    Raises:
        ValueError: every plan needs more. The message states how much the smallest plan needs.
    """
    candidates = [none(profile), full(profile), selective(profile)]
    for choices in _fastest_first(profile, budget_bytes):
        plans = (_plan(profile, choices), _plan(profile, _arranged(profile, choices)))
        best = min(plans, key=lambda plan: plan.peak_bytes)
        if best.peak_bytes <= budget_bytes:
            candidates.append(best)
            break
    fitting = [plan for plan in candidates if plan.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(plan.peak_bytes for plan in candidates)
        raise ValueError(
            f"a budget of {budget_bytes} bytes for activations is too small; the plan with the least memory needs {least}"
        )
    return min(fitting, key=lambda plan: (plan.recompute_seconds, plan.peak_bytes))


def pareto(profile: Profile, count: int = 10) -> list[tuple[int, Plan]]:
    """(budget, plan) for `count` budgets in equal steps: from the peak with only inputs kept to the peak with everything
    kept."""
    low, high = full(profile).peak_bytes, none(profile).peak_bytes
    low, high = min(low, high), max(low, high)
    budgets = [low + (high - low) * i // (count - 1) for i in range(count)]
    return [(budget, planned(profile, budget)) for budget in budgets]


# ---- costs of one plan


def _choosable(block: BlockProfile, j: int) -> bool:
    """Whether keeping the result of call j can save time."""
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
    """The plan with these choices, and its costs. Each storage is counted once."""
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
    """The same choices in another order: among equal blocks, those that keep more are placed later."""
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
    """The bytes and seconds of choices, in ascending order of bytes. No point is both smaller and faster than another."""

    bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    tags: NDArray[np.uint64]
    """The choice that a point stands for. For a block: its set of calls. For a model: the points from which it was built, see
    `_Sums`."""


_EMPTY = _Front(np.empty(0, np.int64), np.empty(0), np.empty(0, np.uint64))


def _pruned(parts: Sequence[_Front]) -> _Front:
    """The points of these fronts, without those that another point beats in both bytes and seconds."""
    size, seconds, tags = (np.concatenate(column) for column in zip(*parts))
    order = np.lexsort((seconds, size))
    size, seconds, tags = size[order], seconds[order], tags[order]
    best = np.minimum.accumulate(seconds)
    kept = np.ones(len(size), bool)
    kept[1:] = seconds[1:] < best[:-1]
    return _Front(size[kept], seconds[kept], tags[kept])


def _items(block: BlockProfile) -> list[int]:
    """The calls that are considered for keeping, by index."""
    places = [j for j in range(len(block.calls)) if _choosable(block, j)]
    return sorted(sorted(places, key=lambda j: -block.calls[j].seconds)[:_MOST_ITEMS])


def _size(storages: Mapping[int, int], counted: Collection[int]) -> int:
    return sum(size for key, size in storages.items() if key not in counted)


def _checkpointed(block: BlockProfile, counted: Collection[int], limit: int) -> _Front:
    """The front of all sets of calls that may be kept. `counted`: storages that are kept in any case."""
    front = _Front(
        np.array([_size(block.inputs, counted)], np.int64),
        np.array([_seconds(block, Choice(frozenset()))]),
        np.array([0], np.uint64),
    )
    for bit, j in enumerate(_items(block)):
        size = front.bytes + _size(block.calls[j].made, counted)
        more = _Front(size, front.seconds - block.calls[j].seconds, front.tags | np.uint64(1 << bit))
        front = _pruned([front, _within(more, limit)])
    return front


def _within(front: _Front, limit: int) -> _Front:
    fits = front.bytes <= limit
    return _Front(front.bytes[fits], front.seconds[fits], front.tags[fits])


class _Sums(NamedTuple):
    """Fronts of the sums over one block and all later blocks: if this block is checkpointed, and if it is left alone.

    A tag is (whether the next block is left alone) * 2^63 + (index in that block's front) * 2^32 + (index in this block's own
    front).
    """

    checkpointed: _Front
    alone: _Front
    own: tuple[_Front, _Front]
    """This block's own fronts, over its sets of calls: if the next block is checkpointed, and if it is left alone."""


def _sums(profile: Profile, limit: int) -> list[_Sums]:
    """For each block, the sums over it and all later blocks. The last entry is the sum over no blocks.

    A block's outputs are inputs of the next block. If the next block is checkpointed, it keeps them, whatever this block keeps.
    """
    given = [block.inputs for block in profile.blocks]
    everywhere = set.intersection(*map(set, given)) if len(given) > 1 else set()
    base = _size(profile.outside, ()) + sum(given[0][key] for key in everywhere - profile.outside.keys())
    start = _Front(np.array([base], np.int64), np.zeros(1), np.zeros(1, np.uint64))
    found = [_Sums(_EMPTY, start, (_EMPTY, _EMPTY))]
    fronts: dict[object, _Front] = {}
    behind: BlockProfile | None = None
    for block in reversed(profile.blocks):
        counted = (
            everywhere | profile.outside.keys(),
            everywhere | profile.outside.keys() | set(behind.inputs if behind else ()),
        )
        own: list[_Front] = []
        sums: tuple[list[_Front], list[_Front]] = ([_EMPTY], [_EMPTY])
        for before, known, bit in ((found[-1].checkpointed, counted[1], 0), (found[-1].alone, counted[0], 1)):
            shared = tuple(_size(call.made, known) for call in block.calls), _size(block.inputs, known)
            front = fronts.get((block.key, shared))
            if front is None:
                front = fronts[block.key, shared] = _checkpointed(block, known, limit)
            own.append(front)
            alone = _Front(np.array([_size(block.saved, known)], np.int64), np.zeros(1), np.zeros(1, np.uint64))
            for kind, mine in enumerate((front, alone)):
                sums[kind].append(_within(_added(before, mine, bit), limit))
        found.append(_Sums(_pruned(sums[0]), _pruned(sums[1]), (own[0], own[1])))
        behind = block
    return found[::-1]


def _added(before: _Front, own: _Front, bit: int) -> _Front:
    """The sums of every point of one front and every point of the other."""
    i, j = (places.ravel().astype(np.uint64) for places in np.indices((len(before.bytes), len(own.bytes))))
    tags = np.uint64(bit << 63) | i << np.uint64(32) | j
    return _Front((before.bytes[:, None] + own.bytes).ravel(), (before.seconds[:, None] + own.seconds).ravel(), tags)


def _choices(profile: Profile, sums: Sequence[_Sums], alone: bool, place: int) -> list[Choice]:
    """The choices of all blocks for one point of a front of the first block.

    alone: whether the first block is left alone, which selects one of its two fronts. place: index of the point in it.
    """
    found: list[Choice] = []
    for block, here in zip(profile.blocks, sums):
        tag = int((here.alone if alone else here.checkpointed).tags[place])
        next_alone = bool(tag >> 63)
        if alone:
            found.append(Choice(None))
        else:
            kept = int(here.own[next_alone].tags[tag & 0xFFFFFFFF])
            found.append(Choice(frozenset(j for bit, j in enumerate(_items(block)) if kept >> bit & 1)))
        alone, place = next_alone, tag >> 32 & 0x7FFFFFFF
    return found


def _fastest_first(profile: Profile, limit: int) -> Iterator[list[Choice]]:
    """Choices that keep at most `limit` bytes, fastest first. None of them is both smaller and faster than another."""
    sums = _sums(profile, limit)
    points = [
        (float(front.seconds[i]), alone, i)
        for alone, front in ((False, sums[0].checkpointed), (True, sums[0].alone))
        for i in range(len(front.seconds))
    ]
    for _, alone, i in sorted(points):
        yield _choices(profile, sums, alone, i)
