"""Tokens that stay in arrays by slot until somebody reads them are the tokens that were sampled, whoever reads them when."""

import random

import numpy as np
import pytest

from tests.engine.pair import VOCAB, Pair, check_digests, request
from tilewright.engine import tails
from tilewright.engine.blocks import BlockPool, page_digest
from tilewright.engine.core import Engine
from tilewright.engine.request import SamplingParams
from tilewright.engine.schedule import Scheduler
from tilewright.engine.step import Step, StepResult
from tilewright.engine.tails import Tails


def scheduler(page_size: int, seqs: int, *, pages: int, prefix_cache: bool = True) -> Scheduler:
    return Scheduler(
        blocks=BlockPool(pages, page_size, prefix_cache=prefix_cache), max_seqs=seqs, max_tokens_per_step=64,
        max_model_len=pages * page_size, max_waiting=64,
    )  # fmt: skip


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16, 150])
def test_long_outputs(page_size: int, asynchronous: bool, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are emptied several times over, between reads and aborts at random; the pages known are those that are full."""
    monkeypatch.setattr(tails, "_ROOM", 40)
    monkeypatch.setattr(tails, "_SPREAD", 6)
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


class Silent:
    """A runner that asks no request for its tokens: what it samples depends on the slot, its lease and the position."""

    def __init__(self, asynchronous: bool):
        self.asynchronous = asynchronous

    def launch(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        counts = np.minimum(step.samples, 1)
        tokens = (step.leases * 7919 + (step.starts + step.counts) * 104_729) % 1000
        return tokens[counts > 0], counts

    def sample(self, ticket: object, words: int, fill: object) -> None:
        raise AssertionError("no request has a grammar")

    def collect(self, ticket: tuple[np.ndarray, np.ndarray]) -> StepResult:
        return StepResult(*ticket)


@pytest.mark.parametrize("pages", [24, 200])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tokens_that_nobody_asks_for(page_size: int, asynchronous: bool, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What requests have at last, or when somebody does ask, is what was handed out; with few pages they are preempted."""
    monkeypatch.setattr(tails, "_ROOM", 40)
    monkeypatch.setattr(tails, "_SPREAD", 6)
    rng = random.Random(f"{page_size} {asynchronous} {pages}")
    made = scheduler(page_size, 4, pages=pages * 16 // page_size)
    engine = Engine(Silent(asynchronous), None, (), made, vocab_size=1000)
    told: dict[int, list[int]] = {}
    for stream in range(12):
        told[stream] = []
        params = SamplingParams(max_tokens=rng.choice([3, 100, 250]), ignore_eos=True)
        engine.submit([rng.randrange(1000) for _ in range(rng.randrange(1, 60))], params, streams=[stream])
    requests = dict(engine._streams)
    while engine.has_work:
        step = engine.advance()
        for stream, token in zip(np.repeat(step.streams, step.counts).tolist(), step.tokens.tolist()):
            told[stream].append(token)
        for stream, one in requests.items():
            if rng.random() < 0.003:
                assert one.output_ids == told[stream]
        if rng.random() < 0.003:
            check_digests(made)
    assert made.blocks.available == made.blocks.num_pages
    assert {stream: one.output_ids for stream, one in requests.items()} == told
    assert all(len(told[stream]) == one.max_tokens for stream, one in requests.items())
    assert (made.preemptions > 0) == (pages == 24)


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
    lines, owners = Tails(known, 4), [request("a", list(range(9))), request("b", list(range(40, 46)))]
    for slot, owner in enumerate(owners):
        owner.computed = len(owner.prompt_ids) - 1
        lines.begin(slot, owner)
    for token in range(20, 26):
        slots = np.array([1, 0])
        assert not lines.make_room(1)
        lines.put(lines.places(slots), np.array([token, token + 10]))
        known += 1
    data = lines.pages(np.array([0, 1]), np.array([8, 8]))
    assert data is not None
    texts = [8, 30, 31, 32], [22, 23, 24, 25]
    assert [page_digest(b"x", text) for text in texts] == [
        page_digest(b"x", np.frombuffer(part, np.int64).tolist()) for part in (data[:32], data[32:])
    ]
    assert lines.pages(np.array([0]), np.array([4])) is None, "of this page the prompt has some"
    for slot, owner in enumerate(owners):
        lines.end(slot)
        assert owner.output_ids == [token + 10 * (slot == 0) for token in range(20, 26)]
        assert all(0 <= token < VOCAB for token in owner.output_ids)
