"""Shared pages: finds cached pages that continue a request's computed tokens, and registers its full pages for others.

Pure Python. `StepPlan` is the step that the scheduler is making; later rows of the step may read pages that it fills.
"""

from collections.abc import Sequence
from hashlib import sha256

from tilewright.engine.blocks import BlockPool, page_digest, page_digests
from tilewright.engine.request import Request
from tilewright.engine.step import Row
from tilewright.engine.windows import Windows

__all__ = ["Prefixes", "StepPlan"]


ON_HOST = -1
"""Stands for a page whose content is in host memory."""


class StepPlan:
    """The step that is being made."""

    __slots__ = ("budget", "copies", "first", "fresh", "others", "prefill", "promised", "promised_windows", "sources")

    def __init__(self, budget: int):
        self.budget = budget  # tokens that may still be added
        self.first: Request | None = None  # the oldest request whose prompt is being computed
        self.others: list[Request] = []  # the other such requests, by age
        self.prefill: list[Row] = []
        self.copies: list[tuple[int, int]] = []
        self.sources: list[int] = []  # pages to copy from; owned while the step is made, so that none is reallocated in it
        self.fresh: set[int] = set()  # pages that this step fills: its rows may read them, but they cannot be copied before it
        self.promised = self.promised_windows = 0  # pages that prompts already started will still need
        # In `copies`, `sources` and `fresh`, ~page stands for a windowed page.


class Prefixes:
    """The prefix cache from the view of requests. `windows`: the pages of windowed layers, if these have pages of their own."""

    def __init__(self, blocks: BlockPool, windows: Windows | None = None):
        self.blocks, self.windows = blocks, windows

    def hits(self, request: Request, plan: StepPlan) -> list[int]:
        """Pages of the prefix cache that continue the request's computed tokens; `ON_HOST` for pages that must be copied from
        host memory. The request does not own them yet."""
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
        # If all is cached, the last page must be copied. If this step fills it, or no page is free for the copy, compute it.
        if everything and (hits[-1] in plan.fresh or hits[-1] == ON_HOST or not spare):
            hits.pop()
        if hits and self.windows is not None:
            del hits[self.windows.covered(request, len(hits), plan.fresh) :]
        return hits

    def unowned(self, pages: list[int]) -> int:
        """How many of these hits need a page that no request owns."""
        return sum(page == ON_HOST or self.blocks.owners(page) == 0 for page in pages)

    def take(self, request: Request, hits: list[int], plan: StepPlan) -> int:
        """Append the pages that `hits` found to the request's block table; returns how many tokens are thereby computed."""
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
        """The hits, with newly allocated pages for those on the host; the step fills these before anything else."""
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
        """The digest of the request's page `index`, whose tokens are all known. It is made when first needed, and kept."""
        digests, size = request.digests, self.blocks.page_size
        while len(digests) <= index:
            start = len(digests) * size
            digests.append(page_digest(digests[-1] if digests else request.salt, request.tokens(start, start + size)))
        return digests[index]

    def register_next(self, requests: Sequence[Request], tokens: bytes | None) -> None:
        """Register the next full page of each of these decoding requests.

        tokens: the tokens of all these pages as native int64, the input of `page_digest`; None: read them from the requests.
        """
        pages, known, end, size = list[int](), list[bytes](), 0, 8 * self.blocks.page_size
        for request in requests:  # with pages of 16 tokens, one in sixteen decoding requests in every step: a single loop
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
        """Register in the prefix cache the full pages whose tokens are known; returns them, windowed pages as ~page."""
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
