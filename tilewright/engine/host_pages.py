"""The second tier of the prefix cache: pages of host memory with content that was evicted from the device.

Pure Python: here, too, a page is a number; `engine/tier.py` moves the bytes. A page that the device's pool evicts moves to the
host if its content has a digest. If the host is full, its least recently used page is dropped. A request whose tokens are found
here gets device pages, and the next step begins by filling them. The content also stays here, so it need not be written again.

A step first copies pages out, then copies pages in, then runs its rows. So a step may not read a host page that it writes. The
device runs steps in order.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["HostPages", "Moves"]

Moves = tuple[tuple[int, int], ...]
"""(from, to) pages."""


class HostPages:
    """`num_pages` pages. `gone` is called with each digest that can no longer be found here."""

    def __init__(self, num_pages: int, gone: Callable[[bytes], None] = lambda digest: None):
        self.num_pages = num_pages
        self._gone = gone
        self.pages_out = self.pages_in = 0
        """Counters: pages copied to the host, and copied back."""
        self.reset()

    def reset(self) -> None:
        """Drop all pages and all planned moves."""
        self._page: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._out: dict[int, int] = {}  # host page -> the device page to copy there
        self._in: dict[int, int] = {}  # device page -> the host page to copy there
        self._pinned: set[int] = set()  # host pages that the step being made reads or writes

    def __len__(self) -> int:
        return len(self._page)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the content with this digest is here, or will be after the next step."""
        return digest in self._page

    def ready(self, digest: bytes) -> bool:
        """Whether the next step can read the content with this digest."""
        return digest in self._page and self._page[digest] not in self._out

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these pages, because the next step will read them."""
        for digest in digests:
            self._pinned.add(self._page[digest])
            self._page.move_to_end(digest)

    def keep(self, page: int, digest: bytes) -> None:
        """The device evicts a page with this content: copy it to the host if there is room."""
        if digest in self._page:
            self._page.move_to_end(digest)
            return
        host = self._room()
        if host is not None:
            self._page[digest] = host
            self._out[host] = page
            self._pinned.add(host)
            self.pages_out += 1

    def fetch(self, digest: bytes, page: int) -> None:
        """Copy this content, which is `ready`, to a page of the device."""
        host = self._page[digest]
        self._in[page] = host
        self._pinned.add(host)
        self.pages_in += 1

    def moves(self) -> tuple[Moves, Moves]:
        """Remove and return the moves for the next step: (device, host) pages out and (host, device) pages in."""
        if not (self._out or self._in or self._pinned):
            return (), ()
        # Sorted by host page, because neighbours are copied together.
        out = tuple((page, host) for host, page in sorted(self._out.items()))
        back = tuple(sorted((host, page) for page, host in self._in.items()))
        self._out, self._in, self._pinned = {}, {}, set()
        return out, back

    def give_back(self, out: Moves, back: Moves) -> None:
        """Add the moves of a step that was not launched to those of the next step."""
        self._out |= {host: page for page, host in out}
        self._in = {page: host for host, page in back} | self._in
        self._pinned.update(self._out, self._in.values())

    def forget(self, hosts: Iterable[int]) -> None:
        """Drop these pages, because their content is wrong."""
        wrong = set(hosts)
        for digest in [digest for digest, host in self._page.items() if host in wrong] if wrong else ():
            self._drop(digest)

    def _room(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((digest for digest, host in self._page.items() if host not in self._pinned), None)
        if oldest is None:
            return None
        self._drop(oldest)
        return self._free.pop()

    def _drop(self, digest: bytes) -> None:
        self._free.append(self._page.pop(digest))
        self._gone(digest)
