"""Pages of layers with a sliding window. A running request releases them as soon as no later token can attend to them.

A model may have two kinds of layers: layers with full attention, and layers that attend to the last `window` tokens. Each kind
has its own pool of pages. A request has a block table for each pool, both of the same length: entry i covers positions
[i * page_size, ...) in both. An entry before the window is `GONE`: another request may own its page, or the page is cached. A
released page stays in the prefix cache like any other. A prefix can be shared if the full pool knows all of its pages, and the
windowed pool knows those that are in the window of its last token.

Pure Python: no tensors. In lists or sets with pages of both kinds (`Step.copies`, `Step.fills`), a windowed page w is written
as ~w, which is negative.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilewright.engine.blocks import BlockPool
from tilewright.engine.request import Request

__all__ = ["GONE", "Windows", "page_pools"]

GONE = 0
"""Stands for a page before the window. It is a valid page number, because a kernel may load this page and ignore the values."""


def page_pools(plan: Any, *, prefix_cache: bool = True) -> dict[str, Any]:
    """The pools of a `MemoryPlan`, as arguments of `Scheduler`."""
    size, options = plan.page_size, {"prefix_cache": prefix_cache}
    windows = Windows(BlockPool(plan.window_pages, size, **options), plan.window) if plan.window_pages else None
    return {"blocks": BlockPool(plan.num_pages, size, host_pages=plan.host_pages, **options), "windows": windows}


class Windows:
    """The pool of the layers with a window.

    Args:
        pool: its page size equals that of the full pool; its host memory is not used.
        window: most tokens that a token attends to, including itself.

    Raises:
        ValueError: the pages are too few for one request.
    """

    def __init__(self, pool: BlockPool, window: int):
        self.pool, self.window, self._size = pool, window, pool.page_size
        self.most = self.pages_seen(window, pool.page_size) + 2
        """Pages that a request needs to continue from any position: its window, a copy of the last page, and a new page."""
        if pool.num_pages < self.most:
            raise ValueError(f"{pool.num_pages} pages for windows of {window} tokens, wanted {self.most} or more")
        self.returned = 0
        """Number of pages that running requests have released."""

    @staticmethod
    def pages_seen(window: int, page_size: int) -> int:
        """The largest number of pages that the window of a token can touch."""
        return -(-(window - 1) // page_size) + 1

    def first(self, position: int) -> int:
        """Index of the first block table entry in the window of a token at this position; it may be after the last entry."""
        return max(0, position - self.window + 1) // self._size

    def stats(self) -> dict[str, int]:
        """Fields of `EngineStats`."""
        pool = self.pool
        used = pool.num_pages - pool.available
        return {"window_pages_total": pool.num_pages, "window_pages_used": used, "window_pages_returned": self.returned}

    # What a request holds --------------------------------------------------------------------------------------------

    def held(self, request: Request) -> Sequence[int]:
        """The pages that a request owns."""
        return request.window_pages[request.behind :]

    def leave_behind(self, request: Request, start: int) -> None:
        """Release the pages before the window of the request's next row, which begins at `start`."""
        first, behind = min(self.first(start), len(request.window_pages)), request.behind
        if first > behind:
            self.pool.release(request.window_pages[behind:first])
            request.window_pages[behind:first] = [GONE] * (first - behind)
            self.returned += first - behind
            request.behind = first

    def leave(self, request: Request) -> None:
        """Release all pages of a request."""
        self.pool.release(self.held(request))
        request.window_pages, request.behind = [], 0

    def written(self, request: Request, start: int) -> Iterator[int]:
        """The pages, as ~w, that a row beginning at `start` writes to."""
        return (~page for page in request.window_pages[max(request.behind, start // self._size) :])

    def shares(self, request: Request, pages: set[int]) -> bool:
        """Whether a request owns any of these pages, which are written as ~w."""
        return any(~page in pages for page in self.held(request))

    # The prefix cache ------------------------------------------------------------------------------------------------

    def covered(self, request: Request, count: int, fresh: set[int]) -> int:
        """How many of the next `count` pages of a request the windowed pool allows to share.

        fresh: pages, as ~w, that the step being made fills. If all tokens of the request are covered, its last page is copied,
        and may not be one of these.
        """
        first, size, digests = len(request.pages), self._size, request.digests
        pages = [self.pool.find(digests[first + i]) for i in range(count)]
        run, runs = 0, list[int]()
        for page in pages:
            run = 0 if page is None else run + 1
            runs.append(run)
        for taken in range(count, 0, -1):
            whole = (first + taken) * size == len(request)
            at = max(first, self.first((first + taken) * size - whole)) - first
            if runs[taken - 1] >= taken - at:
                seen = pages[at:taken]
                copied = whole and bool(seen)
                room = sum(self.pool.owners(page) == 0 for page in seen if page is not None) + copied <= self.pool.available
                if room and not (copied and seen[-1] is not None and ~seen[-1] in fresh):
                    return taken
        return 0

    def take(self, request: Request, count: int) -> tuple[int, int] | None:
        """Append `count` pages, which must be `covered`, to the block table for windowed layers.

        If this covers all tokens of the request, the last page is replaced by a new page, into which it must be copied: returns
        (shared page, new page). Otherwise returns None.
        """
        table, first, size = request.window_pages, len(request.window_pages), self._size
        end = first + count
        whole = end * size == len(request)
        start = end * size - whole
        self.leave_behind(request, start)
        if (at := self.first(start)) > first:
            table += [GONE] * (at - first)
            request.behind = at
        for index in range(len(table), end):
            page = self.pool.find(request.digests[index])
            assert page is not None, "only what is covered is taken"
            self.pool.share(page)
            table.append(page)
        if not whole:
            return None
        source, table[-1] = table[-1], self.pool.allocate()
        return source, table[-1]

    def register(self, request: Request, indices: Iterable[int]) -> list[int]:
        """Register the pages at these entries, whose digests exist already; returns them, as ~w."""
        found = [(request.window_pages[i], request.digests[i]) for i in indices if i >= request.behind]
        self.pool.register_many([page for page, _ in found], [digest for _, digest in found])
        return [~page for page, _ in found]
