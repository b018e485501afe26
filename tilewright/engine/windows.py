"""Pages of layers that see a window: given back while a request runs, as soon as no later token of it can see them.

Layers of a model are of two kinds, those that see everything and those that see the last `window` tokens. Each kind has a pool
of pages, and a request a block table in each, of the same length: entry i holds positions [i * page_size, ...) in both. An
entry that lies behind the window is `GONE`: its page is somebody else's, or cached. A page that is given back stays in the
prefix cache as any other. A prefix can be shared where the one pool knows all of its pages, and the other those that its last
token still sees.

Pure Python: no tensors. Where one list or set speaks of pages of both kinds (`Step.copies`, `Step.fills`), a page w of this one
is written ~w, a number below zero.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilewright.engine.blocks import BlockPool
from tilewright.engine.request import Request

__all__ = ["GONE", "Windows", "page_pools"]

GONE = 0
"""Instead of a page behind the window. A kernel may read it, and drops what it has read: so it is the number of a page."""


def page_pools(plan: Any, *, prefix_cache: bool = True) -> dict[str, Any]:
    """Arguments of `Scheduler`: the pools of a `MemoryPlan`."""
    size, options = plan.page_size, {"prefix_cache": prefix_cache}
    windows = Windows(BlockPool(plan.window_pages, size, **options), plan.window) if plan.window_pages else None
    return {"blocks": BlockPool(plan.num_pages, size, host_pages=plan.host_pages, **options), "windows": windows}


class Windows:
    """The pool of the windowed kind.

    Args:
        pool: pages of as many tokens as those of the other kind; its host memory is not used.
        window: tokens that a token sees at most, itself included.

    Raises:
        ValueError: not even one request can go on with so few pages.
    """

    def __init__(self, pool: BlockPool, window: int):
        self.pool, self.window, self._size = pool, window, pool.page_size
        self.most = self.pages_seen(window, pool.page_size) + 2
        """Pages that a request needs in order to begin anywhere: what it sees, a copy of the last one, and a new one."""
        if pool.num_pages < self.most:
            raise ValueError(f"{pool.num_pages} pages for windows of {window} tokens, wanted {self.most} or more")
        self.returned = 0
        """Pages that requests have given back while they ran."""

    @staticmethod
    def pages_seen(window: int, page_size: int) -> int:
        """The most pages that a token's window lies in."""
        return -(-(window - 1) // page_size) + 1

    def first(self, position: int) -> int:
        """The first entry of a block table that a token at this position sees, or one behind it."""
        return max(0, position - self.window + 1) // self._size

    def stats(self) -> dict[str, int]:
        """Of `EngineStats`."""
        pool = self.pool
        used = pool.num_pages - pool.available
        return {"window_pages_total": pool.num_pages, "window_pages_used": used, "window_pages_returned": self.returned}

    # What a request holds --------------------------------------------------------------------------------------------

    def held(self, request: Request) -> Sequence[int]:
        """The pages that a request owns."""
        return request.window_pages[request.behind :]

    def leave_behind(self, request: Request, start: int) -> None:
        """The request's next row begins at `start`: give back what it does not see."""
        first, behind = min(self.first(start), len(request.window_pages)), request.behind
        if first > behind:
            self.pool.release(request.window_pages[behind:first])
            request.window_pages[behind:first] = [GONE] * (first - behind)
            self.returned += first - behind
            request.behind = first

    def leave(self, request: Request) -> None:
        """Give back everything."""
        self.pool.release(self.held(request))
        request.window_pages, request.behind = [], 0

    def written(self, request: Request, start: int) -> Iterator[int]:
        """The pages, as ~w, that a row which begins at `start` writes to."""
        return (~page for page in request.window_pages[max(request.behind, start // self._size) :])

    def shares(self, request: Request, pages: set[int]) -> bool:
        """Whether a request owns any of these, which are written as ~w."""
        return any(~page in pages for page in self.held(request))

    # The prefix cache ------------------------------------------------------------------------------------------------

    def covered(self, request: Request, count: int, fresh: set[int]) -> int:
        """How many of the `count` pages that continue a request can be shared, as far as it is up to windows.

        fresh: pages that are filled in the step in the making, as ~w: the last page of all is copied, so it may be none.
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
        """Put `count` pages that are `covered` at the end of the block table, whose other half has them already.

        Where that is everything, the last page is shared for a copy of it: returns (it, the copy), which it stands for.
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
        """Make known the pages at these entries, whose digests are made; returns them, as ~w."""
        found = [(request.window_pages[i], request.digests[i]) for i in indices if i >= request.behind]
        self.pool.register_many([page for page, _ in found], [digest for _, digest in found])
        return [~page for page, _ in found]
