"""The page pool against a model of it that keeps everything in plain lists."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tilewright.engine.blocks import BlockPool, page_digest, page_digests

PAGES = 5


def test_digest_is_of_the_whole_chain():
    first = page_digest(b"", [1, 2])
    assert first == page_digest(b"", (1, 2))
    different = {first, page_digest(b"", [2, 1]), page_digest(b"", [1, 2, 0]), page_digest(first, [1, 2]), page_digest(b"", [])}
    assert len(different) == 5
    assert page_digest(page_digest(b"", [1]), [3]) != page_digest(page_digest(b"", [2]), [3])


def test_a_table_is_evicted_from_its_end():
    pool = BlockPool(3, 4)
    table = [pool.allocate() for _ in range(3)]
    for page in table:
        pool.register(page, bytes([page]))
    pool.release(table)
    assert (pool.available, pool.cached) == (3, 3)
    assert [pool.allocate() for _ in range(3)] == table[::-1]


def test_least_recently_used_goes_first():
    pool = BlockPool(2, 4)
    a, b = pool.allocate(), pool.allocate()
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.share(a)
    pool.release([a])
    assert pool.allocate() == b
    assert pool.find(b"b") is None
    assert pool.find(b"a") == a


def test_without_a_prefix_cache_nothing_is_found():
    pool = BlockPool(2, 4, prefix_cache=False)
    page = pool.allocate()
    pool.register(page, b"a")
    assert pool.find(b"a") is None
    pool.release([page])
    assert (pool.available, pool.cached) == (2, 0)


def test_empty_pool_and_bad_sizes():
    pool = BlockPool(1, 4)
    pool.allocate()
    with pytest.raises(IndexError, match="all 1 pages have owners"):
        pool.allocate()
    with pytest.raises(ValueError, match="0 pages of 4 tokens"):
        BlockPool(0, 4)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_page_map_names_the_first_owner():
    pool = BlockPool(4, 2)
    shared, own, kept = pool.allocate(), pool.allocate(), pool.allocate()
    pool.share(shared)
    pool.register(kept, b"kept")
    pool.release([kept])
    cells = pool.page_map([(7, [shared, own]), (3, [shared])])
    assert cells[shared] == (7, 2)
    assert cells[own] == (7, 1)
    assert cells[kept] == ("cached", 0)
    assert cells.count(("free", 0)) == 1


@pytest.mark.parametrize("per_cell", [1, 2, 3, 7, 60, 100])
def test_page_map_in_cells(per_cell):
    """A cell shows its most shared page, and of those with equally many owners the first; a kept one before a free one."""
    rng = random.Random(per_cell)
    pool = BlockPool(60, 2)
    tables = [(slot, [pool.allocate() for _ in range(rng.randint(0, 12))]) for slot in range(4)]
    for _, pages in tables[1:]:
        for page in rng.sample(tables[0][1], k=len(tables[0][1]) // 2):
            pool.share(page)
            pages.insert(0, page)
    kept = [pool.allocate() for _ in range(5)]
    for page in kept:
        pool.register(page, bytes([page]))
    pool.release(kept)
    pages = pool.page_map(tables)
    for page, (state, owners) in enumerate(pages):
        holders = [slot for slot, held in tables if page in held]
        assert owners == pool.owners(page) == len(holders)
        assert state == (holders[0] if holders else "cached" if page in kept else "free")
    groups = [pages[first : first + per_cell] for first in range(0, 60, per_cell)]
    order = {"free": 0, "cached": 1}
    wanted = [max(group, key=lambda cell: (cell[1], order.get(str(cell[0]), 2))) for group in groups]
    assert pool.page_map(tables, per_cell) == wanted


class Pool(RuleBasedStateMachine):
    """Random owners; the model is a count of owners, the content of pages, and the order in which they fell idle."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(PAGES, 4)
        self.owners = [0] * PAGES
        self.content: dict[bytes, int] = {}
        self.idle: list[int] = []

    def owned(self) -> list[int]:
        return [page for page in range(PAGES) if self.owners[page]]

    @precondition(lambda self: len(self.owned()) < PAGES)
    @rule()
    def allocate(self):
        page = self.pool.allocate()
        assert self.owners[page] == 0
        if page in self.idle:
            assert len(self.idle) + len(self.owned()) == PAGES, "a cached page went while a free one was there"
            assert page == self.idle.pop(0)
            self.content = {digest: at for digest, at in self.content.items() if at != page}
        self.owners[page] = 1

    @precondition(lambda self: self.owned())
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data, digest):
        page = data.draw(st.sampled_from(self.owned()))
        if page not in self.content.values():
            self.pool.register(page, digest)
            self.content.setdefault(digest, page)

    @rule(digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def share(self, digest):
        page = self.pool.find(digest)
        assert page == self.content.get(digest)
        if page is not None:
            self.pool.share(page)
            self.owners[page] += 1
            self.idle = [other for other in self.idle if other != page]

    @precondition(lambda self: self.owned())
    @rule(data=st.data())
    def release(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.owned()), unique=True, min_size=1))
        self.pool.release(pages)
        for page in reversed(pages):
            self.owners[page] -= 1
            if not self.owners[page] and page in self.content.values():
                self.idle.append(page)

    @rule(pages=st.sets(st.integers(0, PAGES - 1), max_size=4))
    def forget(self, pages):
        self.pool.forget(pages)
        self.content = {digest: page for digest, page in self.content.items() if page not in pages}
        self.idle = [page for page in self.idle if page not in pages]

    @invariant()
    def counts(self):
        assert [self.pool.owners(page) for page in range(PAGES)] == self.owners
        assert self.pool.available == PAGES - len(self.owned())
        assert self.pool.cached == len(self.idle)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool_against_its_model = Pool.TestCase


@pytest.mark.parametrize("tokens", [0, 3, 4, 11, 40])
def test_digests_of_pages_at_once_are_those_one_after_the_other(tokens: int) -> None:
    ids = [i * 2**40 for i in range(tokens)]
    chain = [b"salt"]
    for first in range(0, tokens - 3, 4):
        chain.append(page_digest(chain[-1], ids[first : first + 4]))
    assert page_digests(b"salt", ids, 4) == chain[1:]
