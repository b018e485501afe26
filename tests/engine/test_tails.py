"""Tokens that stay in arrays by slot until somebody reads them are the tokens that were sampled, whoever reads them when."""

import random

import numpy as np
import pytest

from tests.engine.pair import VOCAB, Pair, check_digests, request
from tilewright.engine.blocks import BlockPool, page_digest
from tilewright.engine.schedule import Scheduler
from tilewright.engine.tails import Tails


def scheduler(page_size: int, seqs: int, *, pages: int, prefix_cache: bool = True) -> Scheduler:
    return Scheduler(
        blocks=BlockPool(pages, page_size, prefix_cache=prefix_cache), max_seqs=seqs, max_tokens_per_step=64,
        max_model_len=pages * page_size, max_waiting=64,
    )  # fmt: skip


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16, 150])
def test_long_outputs(page_size: int, asynchronous: bool, prefix_cache: bool) -> None:
    """Lines are emptied several times over, between reads and aborts at random; the pages known are those that are full."""
    rng = random.Random(f"{page_size} {asynchronous} {prefix_cache}")
    pair = Pair(scheduler(page_size, 3, pages=1500 // page_size + 3, prefix_cache=prefix_cache), asynchronous=asynchronous)
    pair.add(*(request(f"r{i}", [i] * rng.randrange(1, 40), rng.choice([5, 150, 300])) for i in range(5)))
    while pair.scheduler.running or pair.scheduler.waiting or pair.in_flight:
        pair.step()
        for one in tuple(pair.scheduler.running):
            if rng.random() < 0.02:
                before, count = one.output_ids, one.generated
                assert one.output_ids is before
                assert count == len(before)
                check_digests(pair.scheduler)
            if rng.random() < 0.0005:
                pair.scheduler.abort(one.id)
    pair.check_outputs()
    assert {one.finish_reason for one in pair.arrivals} <= {"length", "abort"}


def test_a_quiet_step_foresees_its_pages() -> None:
    """Once every page of the batch is foreseen, steps are the same as when each is looked for: nobody looks any more."""
    pair = Pair(scheduler(4, 8, pages=200), asynchronous=True)
    pair.add(*(request(f"r{i}", [i] * (i + 3), 60) for i in range(8)))
    seen = 0
    for _ in range(50):
        pair.step()
        decoders = pair.scheduler.decoders
        seen += decoders._crossings is not None
        starts, cells = decoders.computed[decoders._slots], decoders.cells[decoders._slots]
        if decoders._crossings is not None:
            turn, crossing = decoders.turn()
            assert crossing.rows.tolist() == np.flatnonzero(starts >= cells).tolist()
            assert crossing.requests == [turn.requests[i] for i in crossing.rows.tolist()]
    assert seen > 30
    pair.finish()
    pair.check_outputs()


def test_the_tokens_of_a_page_hash_as_lists_do() -> None:
    known = np.array([9, 6])
    tails, owners = Tails(known, 4), [request("a", list(range(9))), request("b", list(range(40, 46)))]
    for slot, owner in enumerate(owners):
        owner.computed = len(owner.prompt_ids) - 1
        tails.begin(slot, owner)
    for token in range(20, 26):
        slots = np.array([1, 0])
        assert not tails.make_room(1)
        tails.put(tails.places(slots), np.array([token, token + 10]))
        known += 1
    data = tails.pages(np.array([0, 1]), np.array([8, 8]))
    assert data is not None
    texts = [8, 30, 31, 32], [22, 23, 24, 25]
    assert [page_digest(b"x", text) for text in texts] == [
        page_digest(b"x", np.frombuffer(part, np.int64).tolist()) for part in (data[:32], data[32:])
    ]
    assert tails.pages(np.array([0]), np.array([4])) is None, "of this page the prompt has some"
    for slot, owner in enumerate(owners):
        tails.end(slot)
        assert owner.output_ids == [token + 10 * (slot == 0) for token in range(20, 26)]
        assert all(0 <= token < VOCAB for token in owner.output_ids)
