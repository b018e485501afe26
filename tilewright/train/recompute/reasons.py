"""Explains a plan: one sentence for every call that allocates memory, stating why its result is kept or not."""

from dataclasses import dataclass

from tilewright.train.recompute.plan import Plan
from tilewright.train.recompute.profile import Profile

__all__ = ["Reason", "reasons"]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """The reason for one call, in all blocks that do the same."""

    blocks: tuple[int, ...]
    """Indices of those blocks."""
    call: int
    """The index of the call within the block."""
    name: str
    bytes: int
    """Bytes of its result, in one block."""
    seconds: float
    """Seconds to run it again, in one block."""
    kept_in: int
    """The number of blocks that keep the result, checkpointed or not."""
    why: str


def reasons(profile: Profile, plan: Plan) -> list[Reason]:
    """A reason for every call that allocates memory, in order. Blocks that do the same are combined."""
    groups: dict[object, list[int]] = {}
    for i, block in enumerate(profile.blocks):
        groups.setdefault(block.key, []).append(i)
    found = []
    for places in groups.values():
        alone = sum(plan.choices[i].kept is None for i in places)
        for j, call in enumerate(profile.blocks[places[0]].calls):
            if not call.bytes:
                continue
            chosen = sum(j in kept for i in places if (kept := plan.choices[i].kept) is not None)
            # A block that is not checkpointed keeps what its backward pass reads.
            left = sum(bool(profile.blocks[i].calls[j].made.keys() & profile.blocks[i].saved.keys()) for i in places
                       if plan.choices[i].kept is None)  # fmt: skip
            found.append(
                Reason(
                    blocks=tuple(places), call=j, name=call.name, bytes=call.bytes, seconds=call.seconds, kept_in=chosen + left,
                    why=_why(call.again, call.may_be_kept, call.seconds / call.bytes, chosen, len(places) - alone, alone),
                )
            )  # fmt: skip
    return found


def _why(again: bool, may_be_kept: bool, seconds_a_byte: float, chosen: int, checkpointed: int, alone: int) -> str:
    price = f"{seconds_a_byte * 1e6 * 2**20:.2g} us for each MiB"
    rest = f"; {alone} blocks are not checkpointed" if alone else ""
    if not checkpointed:
        return "the budget has room for everything that autograd keeps"
    if not again:
        return f"no backward pass of its block needs it: never run again{rest}"
    if not may_be_kept:
        return f"written in place later, so it cannot be kept{rest}"
    if chosen == checkpointed:
        return f"kept: running it again costs {price}, more than for other tensors that could be dropped{rest}"
    if chosen:
        return f"kept in {chosen} of {checkpointed} checkpointed blocks: the budget ends at its price of {price}{rest}"
    return f"run again: that costs {price}, less than for other tensors that could be dropped{rest}"
