"""Pages of the KV cache: who owns them, which are free, and which hold a prefix that another request may share.

Pure Python: a page is a number, its keys and values live with the runner. A page is in one of three states:
    used     `owners(page)` > 0 requests have it in their block tables
    cached   nobody owns it, but its content is known by its digest and can be shared again; least recently used goes first
    free     nothing to keep

With `host_pages` the content of a cached page that somebody else gets goes to host memory, where it can be found.

Only full pages have a digest: sha256 over the digest of the page before and the token ids of this one, so that equal
digests mean equal tokens from the first on. (A short hash would do for speed, but a collision hands one user's text to
another.) What a page may be used for is the scheduler's to know; nothing here refuses a write to a shared page.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from hashlib import sha256
from struct import Struct

from tilewright.engine.host_pages import HostPages

__all__ = ["BlockPool", "page_digest", "page_digests"]


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The chain hash of a page: `parent` is the digest of the page before it, for a request's first its salt."""
    return sha256(parent + _packer(len(token_ids))(*token_ids)).digest()


def page_digests(parent: bytes, token_ids: Sequence[int], size: int) -> list[bytes]:
    """The chain hashes of pages of `size` tokens that follow each other; what is left over at the end is no page."""
    data, width = array("q", token_ids).tobytes(), 8 * size
    chain = [parent]
    for begin in range(0, len(data) - width + 1, width):
        chain.append(sha256(chain[-1] + data[begin : begin + width]).digest())
    return chain[1:]


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"={count}q").pack  # a third of the time of an array


class BlockPool:
    """`num_pages` pages of `page_size` tokens with reference counts. Without `prefix_cache` no page is ever shared."""

    listener: Callable[[bytes, bool], None] | None = None
    """Told of each digest that can be found from now on (True) or no longer (False); b"" stands for all. Must not raise."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True, host_pages: int = 0):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens, wanted at least one of each")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.host = HostPages(host_pages if prefix_cache else 0, self._gone_from_host)
        self.reset()

    def reset(self) -> None:
        """Every page is free, whoever owned it."""
        self._owners = [0] * self.num_pages
        self._digest: list[bytes | None] = [None] * self.num_pages
        self._page: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._free = list(range(self.num_pages - 1, -1, -1))  # a stack, so that hot pages are used again
        self.host.reset()
        self._tell(b"", known=False)

    def forget(self, pages: Iterable[int]) -> None:
        """These pages do not hold what their digests say: owned ones stay with their owners, cached ones become free."""
        for page in pages:
            self._forget(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody owns and whose content may still be shared."""
        return len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def owners(self, page: int) -> int:
        """How many times the page has been allocated or shared and not yet released."""
        return self._owners[page]

    def allocate(self) -> int:
        """A page with one owner and no content: a free one, else the least recently used cached one.

        Raises IndexError when `available` is 0.
        """
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            digest = self._digest[page]
            if self.host.num_pages and digest is not None:
                self.host.keep(page, digest)
            self._forget(page)
        else:
            raise IndexError(f"all {self.num_pages} pages have owners; look at `available` first")
        self._owners[page] = 1
        return page

    def allocate_many(self, count: int) -> list[int]:
        """So many pages, as `allocate` gives them one after the other."""
        left = max(0, len(self._free) - count)
        pages = self._free[left:][::-1]
        del self._free[left:]
        owners, digests = self._owners, self._digest
        for page in pages:
            owners[page] = 1
        if self.listener is None and not self.host.num_pages:
            for _ in range(min(count - len(pages), len(self._cached))):  # as `allocate`, where nobody wants to hear of it
                page, _ = self._cached.popitem(last=False)
                digest, digests[page], owners[page] = digests[page], None, 1
                if digest is not None:
                    del self._page[digest]
                pages.append(page)
        while len(pages) < count:
            pages.append(self.allocate())
        return pages

    def share(self, page: int) -> None:
        """One more owner for a page that `find` gave."""
        if self._owners[page] == 0:
            del self._cached[page]
        self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page of a block table, in its order.

        The end of a table becomes evictable before its beginning: a prefix without its end is still of use, and not the
        other way round.
        """
        for page in reversed(list(pages)):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if self._digest[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def find(self, digest: bytes) -> int | None:
        """The page with this content, to be passed to `share` before anything is allocated."""
        return self._page.get(digest)

    def register(self, page: int, digest: bytes) -> None:
        """An owned page is full and has this content from now on. Where another page has it already, that one stays known."""
        self.register_many([page], [digest])

    def register_many(self, pages: Iterable[int], digests: Iterable[bytes]) -> None:
        """`register` for each of them."""
        if not self.prefix_cache:
            return
        known, named, listener = self._page, self._digest, self.listener
        count = len(known)
        for page, digest in zip(pages, digests):
            known.setdefault(digest, page)
            if len(known) > count:
                count, named[page] = count + 1, digest
                if listener is not None:
                    listener(digest, True)

    def page_map(self, tables: Iterable[tuple[int | None, Sequence[int]]], per_cell: int = 1) -> list[tuple[str | int, int]]:
        """The pool as cells of `per_cell` pages: (state, owners) of the page with most owners in each.

        State is the name of the first of the (name, block table) that has the page; where no page of a cell has owners,
        "cached" if one of them is, else "free".
        """
        cells: list[tuple[str | int, int]] = []
        shown: dict[int, int] = {}  # page -> the cell that it stands for
        # Slices and sets, not a loop over pages: 100000 of them, all in use, cost 5 ms in 2000 cells instead of 60.
        for first in range(0, self.num_pages, per_cell):
            owners = self._owners[first : first + per_cell]
            most = max(owners)
            if most:
                shown[first + owners.index(most)] = len(cells)
                cells.append(("used", most))
            else:
                unknown = self._digest[first : first + per_cell].count(None)
                cells.append(("free" if unknown == len(owners) else "cached", 0))
        for name, pages in tables:
            assert name is not None
            for page in shown.keys() & pages:
                cell = shown.pop(page)
                cells[cell] = (name, cells[cell][1])
        return cells

    def _forget(self, page: int) -> None:
        digest = self._digest[page]
        if digest is not None:
            del self._page[digest]
            self._digest[page] = None
            if digest not in self.host:
                self._tell(digest, known=False)

    def _gone_from_host(self, digest: bytes) -> None:
        if digest not in self._page:
            self._tell(digest, known=False)

    def _tell(self, digest: bytes, *, known: bool) -> None:
        if self.listener is not None:
            self.listener(digest, known)
