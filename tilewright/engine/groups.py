"""When waiting requests start: at once where there is room for them, and in groups where there is never enough.

A step that computes a prompt costs more than one in which every request decodes: on a GPU it is not a captured graph, and on a
CPU attention is computed once for each length, which requests that started together share. An engine that is full has a place
free after nearly every step. Filled one by one, nearly every step would compute a prompt.

So while requests are left waiting for a slot or for pages, the next ones start together, up to `STEPS` steps after the last
that started. Nobody is held back

    - who finds no queue, or a queue that the last start did not leave behind;
    - who comes before those that were left waiting: of a higher priority, or preempted;
    - in a step that computes a prompt anyway;
    - once one request of `SHARE` that ran after the last start has ended: idle places cost more than prompts.

The order of starts stays as it is. Pure Python, and a function of its calls.
"""

from tilewright.engine.request import Request

__all__ = ["SHARE", "STEPS", "StartGroups"]

STEPS = 4
"""The loss is bounded: a request starts three steps later at most, one and a half on average. Two steps bring half as much."""
SHARE = 4


class StartGroups:
    """Of one engine's queue: who is left waiting for a place, and for how many steps nobody has started."""

    def __init__(self) -> None:
        self._left: tuple[int, int] | None = None
        self._running = self._steps = 0

    def holds(self, first: Request | None, running: int, *, prompts: bool) -> bool:
        """Whether nobody starts in this step. Asked once a step.

        Args:
            first: who would start next, if anybody waits.
            running: requests that run.
            prompts: the step computes a prompt in any case.
        """
        self._steps += 1
        if first is None or self._left is None or prompts or first.order < self._left:
            return False
        return self._steps < STEPS and running * SHARE > self._running * (SHARE - 1)

    def started(self, count: int, running: int, left: Request | None) -> None:
        """So many have started in this step, and so many run now. `left`: the first who waits for a slot or for pages."""
        self._left = None if left is None else left.order
        if count:
            self._steps, self._running = 0, running
