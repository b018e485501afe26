"""When waiting requests start: at once if there is room for them, in groups if the engine is full.

A step that computes a prompt costs more than one in which every row decodes. On a GPU it does not replay a captured graph. On a
CPU, attention makes one call for each length, and requests that started together have the same length. In a full engine a slot
becomes free after nearly every step; if each were filled at once, nearly every step would compute a prompt.

So while requests are left waiting for a slot or pages, the next ones start together, up to `STEPS` steps after the last start.
In these cases a request is not delayed:

    - it arrives when there is no queue, or when no request was left waiting after the last start;
    - it precedes those that were left waiting, because of a higher priority or after a preemption;
    - the step computes a prompt anyway;
    - one in `SHARE` of the requests that ran after the last start has ended, because empty slots then cost more than prompts.

The order of starts does not change. Pure Python; the behaviour depends only on the calls.
"""

from tilewright.engine.request import Request

__all__ = ["SHARE", "STEPS", "StartGroups"]

STEPS = 4
"""A free slot stays empty for at most three steps, and one and a half on average."""
SHARE = 4
"""At most a quarter of the rows may be empty."""


class StartGroups:
    """Stores, for one engine, which request was left waiting for a slot or pages, and how many steps ago one last started."""

    def __init__(self) -> None:
        self._left: tuple[int, int] | None = None
        self._running = self._steps = 0

    def holds(self, first: Request | None, running: int, *, prompts: bool) -> bool:
        """Return whether no request may start in this step. Call it once in each step.

        Args:
            first: the request that would start next, or None if none waits.
            running: number of running requests.
            prompts: whether the step computes a prompt in any case.
        """
        self._steps += 1
        if first is None or self._left is None or prompts or first.order < self._left:
            return False
        return self._steps < STEPS and running * SHARE > self._running * (SHARE - 1)

    def started(self, count: int, running: int, left: Request | None) -> None:
        """Note that `count` requests started in this step and `running` run now.

        `left` is the first request that waits for a slot or for pages, or None.
        """
        self._left = None if left is None else left.order
        if count:
            self._steps, self._running = 0, running
