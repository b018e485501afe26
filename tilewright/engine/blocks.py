"""Pages of the KV cache: which have owners, which are free, and which contain a prefix that another request may share.

Pure Python: a page is a number; the runner stores its keys and values. A page is in one of three states:
    used     `owners(page)` > 0 requests have it in their block tables
    cached   no request owns it, but its content has a digest and can be shared again; the least recently used is evicted first
    free     it has no content to keep

With `host_pages`, the content of an evicted page moves to host memory and can be found there.

Only full pages have a digest: sha256 over the digest of the page before and the token ids of this page. So equal digests mean
equal tokens from the first token on. (A short hash would be faster, but a collision would show one user's text to another.) The
scheduler must respect how a page may be used; nothing here prevents a write to a shared page.
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
    """The chain hash of a page. `parent`: the digest of the page before it; for the first page, the request's salt."""
    return sha256(parent + _packer(len(token_ids))(*token_ids)).digest()


def page_digests(parent: bytes, token_ids: Sequence[int], size: int) -> list[bytes]:
    """The chain hashes of consecutive pages of `size` tokens; an incomplete page at the end is ignored."""
    data, width = array("q", token_ids).tobytes(), 8 * size
    chain = [parent]
    for begin in range(0, len(data) - width + 1, width):
        chain.append(sha256(chain[-1] + data[begin : begin + width]).digest())
    return chain[1:]


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"={count}q").pack  # takes a third of the time of `array`


class BlockPool:
    """`num_pages` pages of `page_size` tokens with reference counts. Without `prefix_cache` no page is ever shared."""

    listener: Callable[[bytes, bool], None] | None = None
    """Called with each digest that can be found from now on (True) or no longer (False); b"" means all. Must not raise."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True, host_pages: int = 0):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens, wanted at least one of each")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.host = HostPages(host_pages if prefix_cache else 0, self._gone_from_host)
        self.reset()

    def reset(self) -> None:
        """Make every page free, whether it has owners or not."""
        self._owners = [0] * self.num_pages
        self._digest: list[bytes | None] = [None] * self.num_pages
        self._page: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._free = list(range(self.num_pages - 1, -1, -1))  # a stack, so that recently used pages are reused first
        self.host.reset()
        self._tell(b"", known=False)

    def forget(self, pages: Iterable[int]) -> None:
        """Remove the digests of pages with wrong content. Owned pages stay with their owners; cached pages become free."""
        for page in pages:
            self._forget(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    @property
    def available(self) -> int:
        """Number of pages that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of pages without owners whose content may still be shared."""
        return len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """How many pages this many tokens need."""
        return -(-tokens // self.page_size)

    def owners(self, page: int) -> int:
        """How many times the page has been allocated or shared and not yet released."""
        return self._owners[page]

    def allocate(self) -> int:
        """A page with one owner and no content: a free page, or else the least recently used cached page.

        Raises IndexError if `available` is 0.
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
        """`count` pages, the same as from repeated calls of `allocate`."""
        left = max(0, len(self._free) - count)
        pages = self._free[left:][::-1]
        del self._free[left:]
        owners, digests = self._owners, self._digest
        for page in pages:
            owners[page] = 1
        if self.listener is None and not self.host.num_pages:
            for _ in range(min(count - len(pages), len(self._cached))):  # like `allocate`, with no listener and no host memory
                page, _ = self._cached.popitem(last=False)
                digest, digests[page], owners[page] = digests[page], None, 1
                if digest is not None:
                    del self._page[digest]
                pages.append(page)
        while len(pages) < count:
            pages.append(self.allocate())
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a page that `find` returned."""
        if self._owners[page] == 0:
            del self._cached[page]
        self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner from each page of a block table, which is given in order.

        The pages at the end of the table are evicted before those at its beginning: a prefix is still useful without its end,
        but not without its beginning.
        """
        for page in reversed(list(pages)):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if self._digest[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def find(self, digest: bytes) -> int | None:
        """The page with this content, or None. Pass it to `share` before anything is allocated."""
        return self._page.get(digest)

    def register(self, page: int, digest: bytes) -> None:
        """Note that an owned page is full and has this content. If another page already has this digest, keep that one."""
        self.register_many([page], [digest])

    def register_many(self, pages: Iterable[int], digests: Iterable[bytes]) -> None:
        """`register` for several pages."""
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
        """The pool as cells of `per_cell` pages: (state, owners) of the page with the most owners in each cell.

        `tables` contains pairs (name, block table). The state is the name of the first table that contains the page. If no page
        of a cell has owners, the state is "cached" if one of them is cached, otherwise "free".
        """
        cells: list[tuple[str | int, int]] = []
        shown: dict[int, int] = {}  # page -> the cell that it stands for
        # Slices and sets, not a loop over pages: 100000 pages, all in use, take 5 ms in 2000 cells instead of 60 ms.
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
