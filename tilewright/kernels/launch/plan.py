"""Launch plans: the launches of an earlier call, repeated on other memory (`Impl.plan`).

Where the host side of an implementation would take as long as a small kernel, the implementation has three parts: a key, with
everything except addresses in which two of its calls may differ; a first launch, which does all the host work and returns a
`Plan`; and a `Planned`, which stores the plans under their keys. `Op.run` calls it like any launcher. A caller that knows more
than the op does can get the plan and run it directly.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.launch.replay import Held, Prepared

__all__ = ["Plan", "Planned"]

Memory = Callable[[torch.device], tuple[Tensor | None, ...]]


class Plan:
    """The launches of one call. A plan keeps no tensor alive.

    Args:
        launches: run one after the other. All number their operands in the same way.
        memory: (device) -> further tensors for each run, such as scratch memory and tickets. They follow the operands.
    """

    __slots__ = ("_copied", "_only", "_parts")

    def __init__(self, *launches: Prepared, memory: Memory | None = None):
        self._parts = ((launches, memory),)
        self._only = launches[0] if len(launches) == 1 and memory is None else None
        """The launch, if the plan consists of a single launch without extra memory. Most plans do; `run_on` is faster then."""
        self._copied: Callable[..., tuple[Tensor | None, ...]] | None = None

    def behind(self, copied: Callable[..., tuple[Tensor | None, ...]]) -> "Plan":
        """This plan, changed to copy the operands first: `copied(*operands)` returns the tensors that the launches use.

        `copied` may read more than the operands' addresses.
        """
        self._copied, self._only = copied, None
        return self

    @property
    def copies(self) -> bool:
        """Whether the operands are copied before the launches."""
        return self._copied is not None

    @classmethod
    def joined(cls, plans: Iterable["Plan"]) -> "Plan":
        """A plan that runs the given plans one after the other, on the same operands."""
        whole = cls()
        whole._parts = tuple(part for plan in plans for part in plan._parts)
        return whole

    def run(self, *operands: Tensor | None) -> None:
        """Launch on these operands; the first must not be None. Only addresses are read: all else is as in the first call."""
        self.run_on(operands)

    def run_on(self, operands: tuple[Tensor | None, ...]) -> None:
        """`run`, with the operands as a tuple."""
        if self._copied is not None:
            operands = self._copied(*operands)
        starts = [0 if t is None else t.data_ptr() for t in operands]
        if self._only is not None:
            self._only(starts)
            return
        for launches, memory in self._parts:
            given, held = starts, ()
            if memory is not None:
                held = memory(operands[0].device)  # pyright: ignore[reportOptionalMemberAccess]
                given = [*starts, *[0 if t is None else t.data_ptr() for t in held]]
            for launch in launches:
                launch(given)


class Planned:
    """The plans of an implementation.

    Args:
        key: (config, *args) -> everything in which launches may differ, except addresses.
        first: makes the launches of a call: (config, result, *args) -> the plan that repeats them.
    """

    def __init__(self, key: Callable[..., Hashable], first: Callable[..., Plan]):
        held = Held()
        self._key, self._first, self._get, self._keep = key, first, held.get, held.keep

    def plan(self, config: Any, *args: Any) -> Plan | None:
        """The plan of an earlier call with these arguments that ran on a card, or None."""
        return self._get(self._key(config, *args))

    def fill(self, config: Any, result: Any, args: tuple[Any, ...], operands: tuple[Tensor | None, ...]) -> None:
        """Compute `result`: with the stored plan on these operands if there is one, else with a first launch."""
        key = self._key(config, *args)
        plan: Plan | None = self._get(key)
        if plan is not None:
            plan.run_on(operands)
            return
        plan = self._first(config, result, *args)
        if args[0].is_cuda:  # on meta tensors, launches are only recorded for an absent card: their plan cannot run
            self._keep(key, plan)
