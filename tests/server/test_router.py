"""The router's decisions: each rule alone, its bookkeeping against random histories, and what one decision costs."""

import random
import time
from collections import Counter, deque

import pytest

from tilewright.engine.blocks import BlockPool
from tilewright.server.digests import Frames, Publisher, split
from tilewright.server.router import Costs, Router

PAGE = 16


def digests(*names: int) -> list[bytes]:
    return [name.to_bytes(8, "little") for name in names]


def test_a_prefix_is_followed_unless_that_replica_has_too_much_to_do() -> None:
    router = Router(4, PAGE)
    prompt = digests(*range(100))
    router.known(2, prompt[:90])
    found = router.choose(prompt, 1600, range(4))
    assert (found.replica, found.cached_tokens, found.reason) == (2, 1440, "prefix")
    assert found.prefill_s == pytest.approx(router.costs.prefill_s(1440, 1600))
    for number in range(12):
        other = digests(*range(1000 * number + 1000, 1000 * number + 2000))
        router.started(str(number), router.choose(other, 16_000, [2]), other)
    assert router.choose(prompt, 1600, range(4)).replica != 2, "the queue there costs more than the prompt"
    for number in range(12):
        router.finished(str(number))
    assert router.load_of(2) == (0.0, 0)
    assert router.choose(prompt, 1600, range(4)).replica == 2


def test_the_second_of_two_alike_follows_the_first_at_once() -> None:
    router = Router(4, PAGE)
    prompt = digests(*range(50))
    first = router.choose(prompt, 800, range(4))
    router.started("a", first, prompt)
    second = router.choose([*prompt[:40], *digests(99)], 700, range(4))
    assert (second.replica, second.cached_tokens) == (first.replica, 640)
    router.finished("a")  # it failed, and its pages never came
    assert router.choose(prompt, 800, range(4)).cached_tokens == 0


def test_the_last_token_is_always_computed() -> None:
    router = Router(2, PAGE)
    prompt = digests(1, 2)
    router.known(0, prompt)
    assert router.choose(prompt, 32, range(2)).cached_tokens == 31


def test_nothing_shared_is_the_cheaper_of_two() -> None:
    router = Router(8, PAGE)
    router.started("x", router.choose([], 100_000, [3]), [])
    chosen = Counter(router.choose(digests(7), 500, range(8)).replica for _ in range(4000))
    assert chosen[3] == 0, "it is the dearer one of whichever two are drawn"
    assert all(400 < chosen[index] < 750 for index in range(8) if index != 3)
    assert router.choose([], 10, [5]).reason == "only"
    with pytest.raises(ValueError, match="no replica"):
        router.choose([], 10, [])


def test_a_lost_replica_takes_everything_with_it() -> None:
    router = Router(2, PAGE)
    prompt = digests(*range(10))
    router.known(0, prompt)
    router.started("a", router.choose(prompt, 170, [0]), prompt)
    router.first_token("a")
    router.started("b", router.choose(prompt, 170, [1]), prompt)
    assert router.lost(0) == ["a"]
    assert (router.pages_known(0), router.load_of(0)) == (0, (0.0, 0))
    router.finished("a")
    router.first_token("a")
    assert router.load_of(0) == (0.0, 0)
    assert router.load_of(1)[0] > 0


@pytest.mark.parametrize("seed", range(5))
def test_a_mirror_is_the_pool_through_the_wire(seed: int) -> None:
    """A pool under random use, its events cut into random pieces on their way: the mirror ends as the pool does."""
    rng, router = random.Random(seed), Router(1, 1)
    pool = BlockPool(20, 1)
    frames, sent = Frames(), bytearray()

    class Wire:
        def sendall(self, data: bytes) -> None:
            sent.extend(data)

    publisher = Publisher.__new__(Publisher)
    publisher._events, publisher._control = deque(), Wire()  # type: ignore[assignment]
    pool.listener = publisher
    held: list[int] = []
    for step in range(400):
        if rng.random() < 0.55 and pool.available:
            page = pool.allocate()
            held.append(page)
            if rng.random() < 0.8:
                pool.register(page, rng.randrange(60).to_bytes(32, "little"))
        elif held:
            pool.release([held.pop(rng.randrange(len(held)))])
        if rng.random() < 0.05:
            pool.forget([page for page in held if rng.random() < 0.3])
        if step == 200:
            pool.reset()
            held.clear()
    publisher.flush()
    while sent:
        size = rng.randrange(1, 40)
        for kind, body in frames.feed(bytes(sent[:size])):
            if kind == b"+":
                router.known(0, split(body))
            elif kind == b"-":
                router.forgotten(0, split(body))
            else:
                router.emptied(0)
        del sent[:size]
    assert router._replicas[0].known == {digest[:8] for digest in pool._page}


def test_a_message_that_lies_about_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted 1 to"):
        list(Frames().feed(b"\xff\xff\xff\xff+"))


def test_a_decision_costs_50_microseconds() -> None:
    """Eight replicas, prompts of 12,000 tokens in pages of 16. The best of many: a busy machine does not fail it."""
    rng, router = random.Random(0), Router(8, PAGE, Costs())
    prompts = [digests(*range(1000 * n, 1000 * n + 750)) for n in range(64)]
    for prompt in prompts:
        router.known(rng.randrange(8), prompt[: rng.randrange(750)])
    best = 1.0
    for _ in range(30):
        began_s = time.thread_time()
        for prompt in prompts:
            router.choose(prompt, 12_000, range(8))
        best = min(best, (time.thread_time() - began_s) / len(prompts))
    print(f"{best * 1e6:.1f} us a decision")
    assert best < 50e-6
