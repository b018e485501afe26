"""Pages that requests share: which of them continue what a request has computed, and which become known to others.

Pure Python. `StepPlan` is the step that the scheduler is making: pages that it fills may be read by its later rows.
"""

from collections.abc import Sequence
from hashlib import sha256

from tilewright.engine.blocks import BlockPool, page_digest, page_digests
from tilewright.engine.request import Request
from tilewright.engine.step import Row
from tilewright.engine.windows import Windows

__all__ = ["Prefixes", "StepPlan"]


ON_HOST = -1
"""Instead of a page: its content is in host memory."""


class StepPlan:
    """A step in the making."""

    __slots__ = ("budget", "copies", "first", "fresh", "others", "prefill", "promised", "promised_windows", "sources")

    def __init__(self, budget: int):
        self.budget = budget  # tokens that may still be added
        self.first: Request | None = None  # the oldest whose prompt is computed
        self.others: list[Request] = []  # the others, by age
        self.prefill: list[Row] = []
        self.copies: list[tuple[int, int]] = []
        self.sources: list[int] = []  # pages to copy from; owned while the step is made, so that none is given away in it
        self.fresh: set[int] = set()  # pages that this step fills: to be read in it, but not to be copied before it
        self.promised = self.promised_windows = 0  # pages that prompts already started will still need
        # Windowed pages stand as ~page in these.


class Prefixes:
    """The prefix cache, as requests see it. `windows`: the pages of windowed layers, where these have their own."""

    def __init__(self, blocks: BlockPool, windows: Windows | None = None):
        self.blocks, self.windows = blocks, windows

    def hits(self, request: Request, plan: StepPlan) -> list[int]:
        """Pages of the prefix cache that continue what the request has computed, `ON_HOST` for those that must be fetched.
        Owns nothing yet."""
        size = self.blocks.page_size
        first = len(request.pages)
        hits: list[int] = []
        if request.computed != first * size or request.params.prompt_logprobs is not None:
            return hits
        spare = self.blocks.available
        for index in range(first, len(request) // size):
            digest = self._digest(request, index)
            page = self.blocks.find(digest)
            if page is None and self.blocks.host.ready(digest):
                page = ON_HOST
            if page is None:
                break
            if page == ON_HOST or self.blocks.owners(page) == 0:
                if not spare:
                    break
                spare -= 1
            hits.append(page)
        everything = hits and (first + len(hits)) * size == len(request)
        # The last page is to be copied. If it is filled in this very step, or there is no page for the copy, it is computed.
        if everything and (hits[-1] in plan.fresh or hits[-1] == ON_HOST or not spare):
            hits.pop()
        if hits and self.windows is not None:
            del hits[self.windows.covered(request, len(hits), plan.fresh) :]
        return hits

    def unowned(self, pages: list[int]) -> int:
        """How many of these hits take a page that nobody owns."""
        return sum(page == ON_HOST or self.blocks.owners(page) == 0 for page in pages)

    def take(self, request: Request, hits: list[int], plan: StepPlan) -> int:
        """Put pages that `hits` found at the end of the request's block table; returns how many tokens they hold for it."""
        if not hits:
            return 0
        blocks, before = self.blocks, request.computed
        for page in hits:
            if page != ON_HOST:
                blocks.share(page)
        copied = None if self.windows is None else self.windows.take(request, len(hits))
        request.pages += self._fetched(request, hits, plan)
        request.registered = len(request.pages)
        request.computed = len(request.pages) * blocks.page_size
        if request.computed == len(request):
            plan.sources.append(hits[-1])
            request.pages[-1] = blocks.allocate()
            plan.copies.append((hits[-1], request.pages[-1]))
            request.computed -= 1
        if copied is not None:
            plan.sources.append(~copied[0])
            plan.copies.append((~copied[0], ~copied[1]))
        return request.computed - before

    def _fetched(self, request: Request, hits: list[int], plan: StepPlan) -> list[int]:
        """The hits, with new pages for those on the host, which the step fills before anything else."""
        first, blocks = len(request.pages), self.blocks
        wanted = {i: self._digest(request, first + i) for i, page in enumerate(hits) if page == ON_HOST}
        blocks.host.pin(wanted.values())
        pages = list(hits)
        for i, digest in wanted.items():
            pages[i] = blocks.allocate()
            blocks.host.fetch(digest, pages[i])
            blocks.register(pages[i], digest)
            plan.fresh.add(pages[i])
        return pages

    def _digest(self, request: Request, index: int) -> bytes:
        """Of the request's page `index`, whose tokens are all known. Digests are kept, and made only when first needed."""
        digests, size = request.digests, self.blocks.page_size
        while len(digests) <= index:
            start = len(digests) * size
            digests.append(page_digest(digests[-1] if digests else request.salt, request.tokens(start, start + size)))
        return digests[index]

    def register_next(self, requests: Sequence[Request], tokens: bytes | None) -> None:
        """Make known the first page of each decoding request that is not known yet, and is full.

        tokens: those of all these pages as int64 of the machine, of which `page_digest` makes the digests; None: they are the
            requests' to tell.
        """
        pages, known, end, size = list[int](), list[bytes](), 0, 8 * self.blocks.page_size
        for request in requests:  # one of sixteen that decode, in every step: one loop
            index, digests, begin = request.registered, request.digests, end
            end += size
            if tokens is None:
                known.append(self._digest(request, index))
            elif len(digests) > index:
                known.append(digests[index])
            else:
                digest = sha256((digests[-1] if index else request.salt) + tokens[begin:end]).digest()
                digests.append(digest)
                known.append(digest)
            pages.append(request.pages[index])
            request.registered = index + 1
        self.blocks.register_many(pages, known)
        if self.windows is not None:
            for request in requests:
                self.windows.register(request, (request.registered - 1,))

    def register(self, request: Request) -> list[int]:
        """Make known to the prefix cache the pages that are full and whose tokens are known; returns them, windowed
        ones as ~page."""
        full = request.computed // self.blocks.page_size  # no token before `computed` is pending here
        if full <= request.registered or not self.blocks.prefix_cache:
            return []
        pages, digests = request.pages[request.registered : full], request.digests
        if len(digests) < full:
            tokens = request.tokens(len(digests) * self.blocks.page_size, full * self.blocks.page_size)
            digests += page_digests(digests[-1] if digests else request.salt, tokens, self.blocks.page_size)
        self.blocks.register_many(pages, digests[request.registered : full])
        if self.windows is not None:
            pages = [*pages, *self.windows.register(request, range(request.registered, full))]
        request.registered = full
        return pages
