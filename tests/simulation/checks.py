"""What must be true of an engine after every step, and of every answer at its end."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tests.engine.fake_runner import FakeRunner, byte_tokenizer, draw, mix
from tests.engine.test_stops import cut
from tests.simulation.scenario import VOCAB
from tilewright.engine.blocks import BlockPool, page_digest
from tilewright.engine.core import Engine
from tilewright.engine.groups import STEPS
from tilewright.engine.request import Delta, QueueFull, Request, SamplingParams, State
from tilewright.engine.windows import Windows

__all__ = ["EOS", "TOKENIZER", "Ledger", "check_answer", "definition"]

TOKENIZER = byte_tokenizer()
EOS = (0, 7, 33, 120, 256)


def _tokens(prompt: tuple[int, ...], params: SamplingParams, seed: int) -> list[int]:
    """All tokens that a request must get if nothing disturbs it; stop strings are not looked at."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    state = folded = 1
    found: list[int] = []
    for position, token in enumerate(prompt):
        state = mix(state, token * 10_007 + position)
        folded = mix(folded, state)
    while len(found) < params.max_tokens:
        token = draw(folded, seed, VOCAB)
        state = mix(state, token * 10_007 + len(prompt) + len(found))
        folded = mix(folded, state)
        found.append(token)
        if token in stops and len(found) > params.min_tokens:
            break
    return found


Answer = tuple[list[int], str, str | None, Any]
"""Tokens, text, finish reason, stop reason."""


def definition(prompt: tuple[int, ...], params: SamplingParams, seed: int) -> Answer:
    """What a sample must be."""
    tokens = _tokens(prompt, params, seed)
    end, stops = tokens[-1], {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    by_token = end in stops and len(tokens) > params.min_tokens
    used = tokens[:-1] if by_token else tokens
    for count in range(max(1, params.min_tokens), len(used) + 1) if params.stop else ():
        before = len(TOKENIZER.decode(used[: params.min_tokens - 1])) if params.min_tokens > 1 else 0
        text, stop = _cut_after(TOKENIZER.decode(used[:count]), params.stop, before)
        if stop is not None:
            return tokens[:count], text, "stop", stop
    reason = end if by_token and end in params.stop_token_ids else None
    return tokens, TOKENIZER.decode(used), "stop" if by_token else "length", reason


def _cut_after(text: str, stops: tuple[str, ...], exempt: int) -> tuple[str, str | None]:
    """`cut`, for stop strings that end behind the first `exempt` characters."""
    if not exempt:
        return cut(text, list(stops))
    for end in range(exempt + 1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


def check_answer(prompt: tuple[int, ...], params: SamplingParams, index: int, deltas: list[Delta], excused: set[str]) -> None:
    """Deltas of one sample against its definition; all of them where it came to its end, else the first.

    `excused`: finish reasons that something beside the request gave cause for.
    """
    ends = [delta.finish_reason is not None for delta in deltas]
    assert not any(ends[:-1]), "deltas behind the end of a sample"
    reason = deltas[-1].finish_reason if deltas else None
    tokens = [token for delta in deltas for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    assert params.seed is not None, "scenarios have seeds"
    want = definition(prompt, params, params.seed + index)
    if reason in ("stop", "length"):
        assert (tokens, text, reason, deltas[-1].stop_reason) == want, f"got {tokens} {text!r}, wanted {want}"
    else:
        assert reason is None or reason in excused, f"ended by {reason!r}, for which there was no cause"
        assert reason != "expired" or not tokens, "a sample expired that had been started"
        assert reason != "expired" or (deltas[-1].retry_after_s or 0) > 0, "an expired request is not told when to try again"
        assert tokens == want[0][: len(tokens)], f"got {tokens}, wanted the beginning of {want[0]}"
        assert want[1].startswith(text), f"got {text!r}, wanted the beginning of {want[1]!r}"
    asked = params.logprobs is not None
    for delta in deltas:
        assert [entry.token_id for entry in delta.logprobs] == (list(delta.token_ids) if asked else []), "logprobs of others"
    if params.prompt_logprobs is not None and tokens:
        assert [entry.token_id for entry in deltas[0].prompt_logprobs or ()] == list(prompt[1:]), "prompt logprobs"


@lru_cache(maxsize=200_000)
def _digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return page_digest(parent, tokens)


class Ledger:
    """Checks an engine after each of its steps.

    Args:
        engine: over a `FakeRunner`.
        clock: what the engine takes for the present.
        ordered: nothing but age and priority decides who loses its pages: no step or row fails.
        drafts: tokens that a request may have guessed in a step, at most.
    """

    def __init__(self, engine: Engine, runner: FakeRunner, clock: Callable[[], float], *, ordered: bool, drafts: int):
        self.engine, self.runner, self.clock, self.ordered, self.drafts = engine, runner, clock, ordered, drafts
        self.steps = 0
        self.arrivals: dict[Request, tuple[int, int]] = {}
        """(priority, number of its arrival) of each request."""
        self.arrived_s: dict[Request, float] = {}
        self._watch_queue()
        self.known: dict[bytes, list[int]] = {}
        """Digest of a page -> what layer 0 of it must hold."""
        self.held: tuple[Request | None, int] = None, 0
        """Who waits first although there is a place, and for how many steps."""

    def _watch_queue(self) -> None:
        """Note who is taken into the queue and when; check who is refused, and who is given up."""
        scheduler = self.engine.scheduler
        add, expire = scheduler.add, scheduler.expire

        def noted(*requests: Request) -> None:
            before = len(scheduler.waiting)
            try:
                add(*requests)
            except QueueFull:
                assert before or len(requests) > scheduler.max_waiting, "refused by an empty queue"
                raise
            for request in requests:
                self.arrivals[request] = (request.params.priority, len(self.arrivals))
                self.arrived_s[request] = self.clock()

        def expired() -> list[tuple[Request, float]]:
            late = expire()
            for request, _ in late:
                (allowed,) = {one.max_wait_s for one, _ in late if one.id == request.id} - {None}
                assert self.clock() - self.arrived_s[request] > (allowed or 0), "given up before its time"
            return late

        scheduler.add, scheduler.expire = noted, expired  # pyright: ignore[reportAttributeAccessIssue]

    def check(self) -> None:
        """After a step. Raises AssertionError."""
        self.steps += 1
        self._queues()
        self._places()
        self._pages()
        self._host_pages()
        for request in self.engine.scheduler.running:
            self._request(request)
        if not self.runner.queue:
            self._contents()

    def _queues(self) -> None:
        scheduler = self.engine.scheduler
        slots = [request.slot for request in scheduler.running if request.slot is not None]
        assert sorted([*slots, *scheduler._slots]) == list(range(scheduler.max_seqs)), "a slot is lost or taken twice"
        for request in scheduler.running:
            assert request.state is State.RUNNING, "a request runs that is not RUNNING"
        for request in scheduler.waiting:
            found = (request.state, request.pages, request.slot, request.computed, request.pending)
            assert found == (State.WAITING, [], None, 0, 0), f"a waiting request still holds something: {found}"
        queued = Counter([*scheduler.running, *scheduler.waiting])
        listed = Counter(request for siblings in scheduler._by_id.values() for request in siblings)
        assert queued == listed, "a request is forgotten, or queued twice"
        for queue in (scheduler.running, scheduler.waiting):
            order = [self.arrivals[request] for request in queue]
            assert order == sorted(order), "requests are not in the order of priority and age"
        for priority in range(4) if self.ordered else ():
            order = [self.arrivals[request] for request in queued if request.params.priority == priority]
            assert order == sorted(order), "a younger request runs while an older one waits"
        for request in scheduler.waiting:
            waited_s = self.clock() - self.arrived_s[request]
            patient = request.max_wait_s is None or request.preemptions or waited_s <= request.max_wait_s
            assert patient, "a request waits beyond its deadline"
        assert set(queued) == set(self.engine._outputs), "the engine and its scheduler know different requests"

    def _places(self) -> None:
        """Who waits first starts within a few steps once there is a slot, and more pages than it and all others may ask for.
        Guesses may take the whole budget of a step, so that nobody can start in it."""
        scheduler, windows = self.engine.scheduler, self.engine.scheduler.windows
        first = scheduler.waiting.first if scheduler.waiting and scheduler._slots and not scheduler._prompts else None
        if first is not None:
            pages = scheduler.blocks.pages_for(len(first)) + 2 + 2 * len(scheduler.running)
            windowed = windows is None or windows.pool.available >= min(pages, windows.most) + 2 * len(scheduler.running)
            if self.drafts or scheduler.blocks.available < pages or not windowed:
                first = None
        before, steps = self.held
        self.held = first, 0 if first is None else 1 if first is not before else steps + 1
        assert self.held[1] <= STEPS, f"a request waits for {self.held[1]} steps, and there is a place"

    def _pages(self) -> None:
        running, windows = self.engine.scheduler.running, self.engine.scheduler.windows
        self._pool(self.engine.scheduler.blocks, Counter(page for request in running for page in request.pages))
        if windows is not None:
            self._pool(windows.pool, Counter(page for request in running for page in request.window_pages[request.behind :]))
        assert not self.runner.broken, self.runner.broken[0]

    @staticmethod
    def _pool(blocks: BlockPool, tables: Counter[int]) -> None:
        assert blocks._owners == [tables[page] for page in range(blocks.num_pages)], "a page is lost or owned twice"
        free, cached = blocks._free, list(blocks._cached)
        assert sorted([*free, *cached, *tables]) == list(range(blocks.num_pages)), "a page is in two states, or in none"
        named = {page: digest for page, digest in enumerate(blocks._digest) if digest is not None}
        assert named == {page: digest for digest, page in blocks._page.items()}, "the prefix cache names a page twice"
        assert named.keys() >= set(cached), "a cached page has no content to be found by"
        assert named.keys().isdisjoint(free), "a free page can still be found"

    def _host_pages(self) -> None:
        host = self.engine.scheduler.blocks.host
        assert sorted([*host._free, *host._page.values()]) == list(range(host.num_pages)), "a page of the host is lost"
        assert host._out.keys() <= set(host._page.values()), "something goes to a page of the host that nobody can find"
        if not self.runner.queue and not self.engine._in_flight:
            for digest, page in host._page.items():
                if digest in self.known and page not in host._out:
                    assert self.runner.host[page][0] == self.known[digest], f"page {page} of the host holds something else"

    def _request(self, request: Request) -> None:
        blocks = self.engine.scheduler.blocks
        assert len(set(request.pages)) == len(request.pages) >= blocks.pages_for(request.computed), "too few pages"
        assert 0 <= request.pending <= 2, f"{request.pending} samples are pending"
        if self.engine.scheduler.windows is not None:
            self._window(request, self.engine.scheduler.windows)
        assert request.computed < request.total, "more is computed than is known"
        assert request.accepted <= request.drafted, "more was right than was guessed"
        self._arrays(request)
        size, digest = blocks.page_size, b""
        for index in range(min(request.registered, len(request.pages))):
            tokens = tuple(request.tokens(index * size, index * size + size))
            digest = _digest(digest, tokens)
            assert request.digests[index] == digest, "a page's digest is not that of its tokens"
            self.known[digest] = [token * 10_007 + index * size + i for i, token in enumerate(tokens)]

    def _window(self, request: Request, windows: Windows) -> None:
        """It holds what its next token sees, and after each step little else."""
        assert len(request.window_pages) == len(request.pages), "block tables of different lengths"
        assert request.behind <= windows.first(request.computed), "a page that is seen was given back"
        held, size = len(request.window_pages) - request.behind, windows.pool.page_size
        row = max(self.engine.scheduler.max_tokens_per_step, 1 + self.drafts)  # pages are there before a step cuts its drafts
        longest = windows.window + row + 2 * size
        assert held <= windows.pages_seen(longest, size) + 1, f"{held} pages are held behind a window of {windows.window}"

    def _arrays(self, request: Request) -> None:
        """What stands in the arrays by slot is what the request says."""
        decoders, slot = self.engine.scheduler.decoders, request.slot
        assert decoders.lease[slot] == request.lease, "somebody else's number is in the slot"
        assert (request.decoders is None) == (request in self.engine.scheduler._prompts), (
            "it decodes, or its prompt is computed"
        )
        if request.decoders is not None:
            assert request in decoders.members()[0], "it decodes, and has no turn"
            found = (decoders.known[slot], decoders.left[slot], decoders.cells[slot])
            left = request.max_tokens - len(request.output_ids) - request.pending
            assert found == (len(request), left, len(request.pages) * self.engine.scheduler.blocks.page_size), "stale arrays"

    def _contents(self) -> None:
        """Pages that can be found hold what their digest says. Once everything launched has run."""
        if self.engine._in_flight:
            return
        for digest, page in self.engine.scheduler.blocks._page.items():
            if digest in self.known and page not in self.engine.scheduler.blocks.host._in:
                assert self.runner.layers[0][page] == self.known[digest], f"page {page} does not hold what its digest says"

    def idle(self) -> None:
        """At the end of an episode: nothing is held, nothing is forgotten."""
        stats = self.engine.stats()
        assert not self.engine.has_work, "the engine still has work"
        assert stats.running == stats.waiting == stats.pages_used == 0, f"something is still held: {stats}"
        assert self.engine.scheduler.blocks.available == stats.pages_total, "pages are lost"
        windows = self.engine.scheduler.windows
        assert windows is None or windows.pool.available == windows.pool.num_pages, "windowed pages are lost"
