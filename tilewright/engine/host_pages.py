"""The second tier of the prefix cache: pages of host memory that keep what the device's pages had to give up.

Pure Python: a page is a number here too; `engine/tier.py` moves the bytes. A page that the device's pool pushes out goes to the
host if its content has a digest, the least recently used one there goes for good. A request whose tokens are found here gets
device pages, and the next step begins by filling them. What is copied back stays here as well, so it need not be written again.

A step moves pages in one order: out, in, then all that its rows do. So a host page may not be read in the step that
writes it, nor be written in one that reads it; between steps the device keeps the order.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["HostPages", "Moves"]

Moves = tuple[tuple[int, int], ...]
"""(from, to) pages."""


class HostPages:
    """`num_pages` pages. `gone` is told of each digest that can be found here no longer."""

    def __init__(self, num_pages: int, gone: Callable[[bytes], None] = lambda digest: None):
        self.num_pages = num_pages
        self._gone = gone
        self.pages_out = self.pages_in = 0
        """Pages that have gone to the host, and come back."""
        self.reset()

    def reset(self) -> None:
        """Nothing is kept, nothing is to be moved."""
        self._page: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._out: dict[int, int] = {}  # host page -> the device page that goes there
        self._in: dict[int, int] = {}  # device page -> the host page that comes there
        self._pinned: set[int] = set()  # host pages that the step in the making reads or writes

    def __len__(self) -> int:
        return len(self._page)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the content of this digest is here, or on its way."""
        return digest in self._page

    def ready(self, digest: bytes) -> bool:
        """Whether the next step can read it."""
        return digest in self._page and self._page[digest] not in self._out

    def pin(self, digests: Iterable[bytes]) -> None:
        """The next step will read these: they stay."""
        for digest in digests:
            self._pinned.add(self._page[digest])
            self._page.move_to_end(digest)

    def keep(self, page: int, digest: bytes) -> None:
        """The device gives up a page with this content, which goes to the host if there is room."""
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
        """This content, which is `ready`, is to come to a page of the device."""
        host = self._page[digest]
        self._in[page] = host
        self._pinned.add(host)
        self.pages_in += 1

    def moves(self) -> tuple[Moves, Moves]:
        """What the next step begins with, (device, host) pages out and (host, device) pages in; these are its own then."""
        if not (self._out or self._in or self._pinned):
            return (), ()
        # By host pages: neighbours are copied at once.
        out = tuple((page, host) for host, page in sorted(self._out.items()))
        back = tuple(sorted((host, page) for page, host in self._in.items()))
        self._out, self._in, self._pinned = {}, {}, set()
        return out, back

    def give_back(self, out: Moves, back: Moves) -> None:
        """The moves of a step that was not launched: those of the next."""
        self._out |= {host: page for page, host in out}
        self._in = {page: host for host, page in back} | self._in
        self._pinned.update(self._out, self._in.values())

    def forget(self, hosts: Iterable[int]) -> None:
        """These pages do not hold what they should."""
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
