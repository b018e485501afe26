"""Replicas of one model behind a router, on simulated time: traces in, latencies out.

A replica is what an engine is to a router. It has a cache of pages (the engine's own `BlockPool`, a page a block of the trace),
computes prompts first come, first served in steps of at most `CHUNK` tokens, and adds one token to each running answer in every
step. A step takes the time of an 8-billion-parameter model on one card: its weights are read once, tokens cost FLOPs, attention
costs FLOPs by the tokens before, and decoding reads the keys and values of everything that runs.
"""

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.bench.load.schedule import BLOCK_TOKENS, Planned
from tilewright.engine.blocks import BlockPool
from tilewright.server.router import Costs, Router

__all__ = ["Fleet", "Policy", "least_work", "power_of_two", "prefix_aware", "round_robin", "simulate", "sticky"]

CHUNK = 8192
MAX_RUNNING = 256
STEP_S = 6e-3
"""Reading 16 GB of weights, and launching."""
TOKEN_S, ATTENTION_S = 4e-5, 1.3e-9
KV_TOKEN_S = 4e-8
"""Reading 131 KB."""
PAGES = 1600
"""Blocks of 512 tokens in the cache of a card with 80 GB: 8-bit keys and values."""


@dataclass(eq=False, slots=True)
class _Request:
    name: str
    planned: Planned
    arrival_s: float
    digests: list[bytes]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    left: int = 0
    context: int = 0
    first_s: float | None = None
    end_s: float | None = None


class _Replica:
    def __init__(self, index: int, pages: int, fleet: "Fleet"):
        self.index, self.fleet = index, fleet
        self.pool = BlockPool(pages, 1)
        self.waiting: deque[_Request] = deque()
        self.prefilling: list[_Request] = []
        self.running: list[_Request] = []
        self.step_ends_s: float | None = None
        self.work: list[tuple[_Request, int]] = []
        self.decoded: list[_Request] = []
        self.steps = 1
        self.hits = self.asked = 0

    def arrive(self, request: _Request, now_s: float) -> None:
        self.waiting.append(request)
        if self.step_ends_s is None:
            self.launch(now_s)

    def _admit(self) -> None:
        while self.waiting and len(self.prefilling) + len(self.running) < MAX_RUNNING:
            request = self.waiting[0]
            size = len(request.digests) + 1 + request.planned.output_tokens // BLOCK_TOKENS + 1
            hits = []
            for digest in request.digests:
                page = self.pool.find(digest)
                if page is None:
                    break
                hits.append(page)
            unowned = sum(self.pool.owners(page) == 0 for page in hits)
            if self.pool.available - unowned < size - len(hits):
                if not self.prefilling and not self.running:
                    raise AssertionError("a request is larger than the whole cache")
                return
            self.waiting.popleft()
            for page in hits:
                self.pool.share(page)
            request.pages = hits + [self.pool.allocate() for _ in range(size - len(hits))]
            request.computed = min(len(hits) * BLOCK_TOKENS, request.planned.prompt_tokens - 1)
            self.hits += request.computed
            self.asked += request.planned.prompt_tokens
            self.prefilling.append(request)

    def launch(self, now_s: float) -> None:
        """Begin a step, or several equal ones where only answers are written and nothing changes before the first ends."""
        self._admit()
        self.work, seconds = self._share_out(), STEP_S
        for request, take in self.work:
            seconds += take * (TOKEN_S + ATTENTION_S * (request.computed + take / 2))
        self.decoded = list(self.running)
        seconds += sum(request.context for request in self.decoded) * KV_TOKEN_S + len(self.decoded) * TOKEN_S
        if not self.work and not self.decoded:
            self.step_ends_s = None
            return
        self.steps = 1
        if not self.work:
            most = min(request.left for request in self.decoded)
            until = self.fleet.next_arrival_s - now_s
            self.steps = max(1, min(most, int(until / seconds) + 1 if until < 1e6 else most))
        self.step_ends_s = now_s + seconds * self.steps
        heapq.heappush(self.fleet.events, (self.step_ends_s, next(self.fleet.count), self))

    def _share_out(self) -> list[tuple[_Request, int]]:
        """Tokens of a step by prompt, as the engine's scheduler deals them: half to the oldest, the rest to the shortest."""
        if not self.prefilling:
            return []
        oldest, *others = self.prefilling
        left = {request: request.planned.prompt_tokens - request.computed for request in self.prefilling}
        first = min(left[oldest], CHUNK // 2 if others else CHUNK)
        budget, work = CHUNK - first, []
        for request in sorted(others, key=left.__getitem__):
            take = min(budget, left[request])
            if not take:
                break
            work.append((request, take))
            budget -= take
        return [(oldest, first + min(budget, left[oldest] - first)), *work]

    def complete(self, now_s: float) -> None:
        for request in self.decoded:
            request.left -= self.steps
            request.context += self.steps
            if request.left <= 0:
                self._finish(request, now_s)
        for request, take in self.work:
            request.computed += take
            for index in range(request.computed // BLOCK_TOKENS):
                if index < len(request.digests):
                    self.pool.register(request.pages[index], request.digests[index])
            if request.computed >= request.planned.prompt_tokens:
                self.prefilling.remove(request)
                request.first_s, request.context = now_s, request.planned.prompt_tokens
                request.left = request.planned.output_tokens - 1
                self.running.append(request)
                self.fleet.first(request)
                if request.left <= 0:
                    self._finish(request, now_s)
        self.step_ends_s = None
        self.launch(now_s)

    def _finish(self, request: _Request, now_s: float) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        request.end_s = now_s
        self.fleet.done(request, now_s)


Policy = Callable[["Fleet", _Request], int]


def round_robin(fleet: "Fleet", request: _Request) -> int:
    return int(request.name) % len(fleet.replicas)


def power_of_two(fleet: "Fleet", request: _Request) -> int:
    one, other = fleet.rng.sample(range(len(fleet.replicas)), 2)
    return min((one, other), key=lambda index: load_s(fleet.router, index))


def load_s(router: Router, index: int) -> float:
    prefill_s, decoding = router.load_of(index)
    return prefill_s + decoding * router.costs.decode_row_s


def least_work(fleet: "Fleet", request: _Request) -> int:
    """What no router knows: the tokens that are really left."""

    def left_s(replica: _Replica) -> float:
        prompts = sum(one.planned.prompt_tokens - one.computed for one in (*replica.waiting, *replica.prefilling))
        return prompts * TOKEN_S + len(replica.running) * Costs().decode_row_s

    return min(range(len(fleet.replicas)), key=lambda index: left_s(fleet.replicas[index]))


def sticky(fleet: "Fleet", request: _Request) -> int:
    """By a hash of the prompt's beginning: who begins alike always goes to the same."""
    return (
        request.digests[min(1, len(request.digests) - 1)][0] % len(fleet.replicas)
        if request.digests
        else round_robin(fleet, request)
    )


def prefix_aware(fleet: "Fleet", request: _Request) -> int:
    return fleet.router.choose(request.digests, request.planned.prompt_tokens, range(len(fleet.replicas))).replica


class Fleet:
    """Replicas and the router in front of them. Every policy's requests are booked in the router, which sees the load."""

    def __init__(self, policy: Policy, replicas: int = 4, pages: int = PAGES, *, one_cache: bool = False):
        self.policy = policy
        self.router = Router(replicas, BLOCK_TOKENS, Costs())
        self.replicas = [_Replica(index, pages, self) for index in range(replicas)]
        self.rng = random.Random(0)
        self.events: list[tuple[float, int, _Replica]] = []
        self.count = iter(range(1 << 60))
        self.next_arrival_s = float("inf")
        self.finished: list[_Request] = []
        self.on_done: Callable[[float], None] = lambda now_s: None
        if one_cache:
            pool = BlockPool(replicas * pages, 1)
            for replica in self.replicas:
                replica.pool = pool
        for replica in self.replicas:
            self._watch(replica)

    def _watch(self, replica: _Replica) -> None:
        """The mirror hears what the pool says."""

        def listener(digest: bytes, known: bool) -> None:
            (self.router.known if known else self.router.forgotten)(replica.index, [digest])

        replica.pool.listener = listener

    def first(self, request: _Request) -> None:
        self.router.first_token(request.name)

    def done(self, request: _Request, now_s: float) -> None:
        self.router.finished(request.name)
        self.finished.append(request)
        self.on_done(now_s)

    def submit(self, number: int, planned: Planned, now_s: float) -> None:
        request = _Request(str(number), planned, now_s, chain(planned))
        index = self.policy(self, request)
        among = [index]
        decision = self.router.choose(request.digests, planned.prompt_tokens, among)
        self.router.started(request.name, decision, request.digests)
        self.replicas[index].arrive(request, now_s)

    def next_event(self) -> None:
        now_s, _, replica = heapq.heappop(self.events)
        replica.complete(now_s)

    @property
    def hit_share(self) -> float:
        return sum(r.hits for r in self.replicas) / max(1, sum(r.asked for r in self.replicas))


def chain(planned: Planned) -> list[bytes]:
    """Digests of the whole blocks of a prompt; without hash ids a prompt shares nothing."""
    whole = planned.prompt_tokens // BLOCK_TOKENS
    if not planned.blocks:
        return []
    found, digest = [], b""
    for block in planned.blocks[:whole]:
        digest = hashlib.blake2b(digest + block.to_bytes(8, "little"), digest_size=8).digest()
        found.append(digest)
    return found


@dataclass(frozen=True)
class Outcome:
    """Seconds, and requests a second."""

    ttft_p50: float
    ttft_p99: float
    throughput: float
    hit_share: float


def simulate(
    requests: Sequence[Planned],
    policy: Policy,
    *,
    speed: float = 1.0,
    users: int | None = None,
    pages: int = PAGES,
    one_cache: bool = False,
) -> Outcome:
    """Replay a trace, `speed` times as fast; or, with `users`, as fast as so many users that wait for their answers can.

    `one_cache`: what one replica has computed all have, in a cache as large as theirs together; no router can find more.
    """
    fleet = Fleet(policy, pages=pages, one_cache=one_cache)
    if users is None:
        for number, planned in enumerate(requests):
            at_s = planned.at_s / speed
            while fleet.events and fleet.events[0][0] <= at_s:
                fleet.next_event()
            fleet.next_arrival_s = requests[number + 1].at_s / speed if number + 1 < len(requests) else float("inf")
            fleet.submit(number, planned, at_s)
    else:
        fleet.next_arrival_s = 0.0  # an arrival may follow any end
        left = iter(enumerate(requests))

        def again(now_s: float) -> None:
            found = next(left, None)
            if found is not None:
                arrivals.append((now_s, *found))

        arrivals: deque[tuple[float, int, Planned]] = deque()
        fleet.on_done = again
        for _ in range(users):
            again(0.0)
        while arrivals or fleet.events:
            while arrivals:
                now_s, number, planned = arrivals.popleft()
                fleet.submit(number, planned, now_s)
            if fleet.events:
                fleet.next_event()
    while fleet.events:
        fleet.next_event()
    assert len(fleet.finished) == len(requests), "requests were lost"
    first = [(request.first_s or 0.0) - request.arrival_s for request in fleet.finished]
    last_s = max(request.end_s or 0.0 for request in fleet.finished)
    return Outcome(float(np.percentile(first, 50)), float(np.percentile(first, 99)), len(requests) / last_s, fleet.hit_share)
