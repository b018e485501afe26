"""Launch plans: what is left of a call that was made before, its launches on other memory (`Impl.plan`).

An implementation whose host side takes as long as a small kernel is made of three parts: a key, all by which two of its calls
may differ but addresses; a first launch, which works everything out and gives a `Plan`; and a `Planned`, which keeps plans by
their keys. `Op.run` reaches it as any launcher; callers that know more than an op does ask for the plan itself, and run it.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.launch.replay import Held, Prepared

__all__ = ["Plan", "Planned"]

Memory = Callable[[torch.device], tuple[Tensor | None, ...]]


class Plan:
    """The launches of one call. It keeps no tensor alive.

    Args:
        launches: made one after the other; all count their operands alike.
        memory: what each run has beside its operands, scratch memory and tickets: it stands behind them.
    """

    __slots__ = ("_copied", "_only", "_parts")

    def __init__(self, *launches: Prepared, memory: Memory | None = None):
        self._parts = ((launches, memory),)
        self._only = launches[0] if len(launches) == 1 and memory is None else None
        """The launch of a plan that is no more than that: most are, and go the short way."""
        self._copied: Callable[..., tuple[Tensor | None, ...]] | None = None

    def behind(self, copied: Callable[..., tuple[Tensor | None, ...]]) -> "Plan":
        """Itself, behind a copy of the operands: `copied` gives those of the launches, and reads more than addresses."""
        self._copied, self._only = copied, None
        return self

    @property
    def copies(self) -> bool:
        """Whether operands are copied first."""
        return self._copied is not None

    @classmethod
    def joined(cls, plans: Iterable["Plan"]) -> "Plan":
        """One after the other, on the same operands."""
        whole = cls()
        whole._parts = tuple(part for plan in plans for part in plan._parts)
        return whole

    def run(self, *operands: Tensor | None) -> None:
        """Launch on these operands, the first no None. Only addresses are read: all else is as in the first call."""
        self.run_on(operands)

    def run_on(self, operands: tuple[Tensor | None, ...]) -> None:
        """`run`, of a tuple."""
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
        key: (config, *args) -> all by which launches may differ, but addresses.
        first: (config, result, *args) -> the plan of a call, whose launches it has made.
    """

    def __init__(self, key: Callable[..., Hashable], first: Callable[..., Plan]):
        held = Held()
        self._key, self._first, self._get, self._keep = key, first, held.get, held.keep

    def plan(self, config: Any, *args: Any) -> Plan | None:
        """The plan of a call that a card has run with these arguments, or None."""
        return self._get(self._key(config, *args))

    def fill(self, config: Any, result: Any, args: tuple[Any, ...], operands: tuple[Tensor | None, ...]) -> None:
        """Fill the result of a call: by its plan, on these operands, or by a first launch."""
        key = self._key(config, *args)
        plan: Plan | None = self._get(key)
        if plan is not None:
            plan.run_on(operands)
            return
        plan = self._first(config, result, *args)
        if args[0].is_cuda:  # what was recorded for a card that is not here cannot run
            self._keep(key, plan)
