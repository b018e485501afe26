"""One episode: the real scheduler, engine and worker over a fake device, clients beside them, all on simulated time."""

import asyncio
import gc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from tests.engine.fake_runner import FakeRunner, Fault
from tests.engine.fake_runner import scheduler as make_scheduler
from tests.engine.guesses import Oracle
from tests.simulation.checks import EOS, TOKENIZER, Ledger, check_answer
from tests.simulation.loop import SimulatedExecutor, SimulatedLoop
from tests.simulation.scenario import VOCAB, Client, Scenario
from tilewright.engine.core import Engine
from tilewright.engine.request import Delta, QueueFull, RequestTooLong, SamplingParams
from tilewright.engine.step import RowFault, Step, StepResult
from tilewright.engine.windows import Windows
from tilewright.server import worker as worker_module
from tilewright.server.link import EngineStopped
from tilewright.server.worker import EngineWorker

__all__ = ["Outcome", "run_scenario"]

_LONGEST_S = 1e6
"""An episode that takes longer never ends: a request starves."""

MOST_BARREN = 1000
"""Steps in a row without a token or an end: an engine that makes more of them will never stop."""


class _Latencies:
    """What the worker measures, which nobody looks at here."""

    def first(self, seconds: float) -> None:
        """A first token came."""

    def following(self, seconds: float, tokens: int) -> None:
        """Further ones did."""


@dataclass
class Outcome:
    """What an episode did; counted, so that a test can tell that it was not an idle one."""

    steps: int = 0
    preemptions: int = 0
    hits: int = 0
    fetched: int = 0
    answers: int = 0
    returned: int = 0
    drafted: int = 0
    accepted: int = 0
    ends: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class _Episode:
    def __init__(self, scenario: Scenario, executor: SimulatedExecutor, clock: Callable[[], float]):
        self.scenario, self.outcome, self.executor = scenario, Outcome(), executor
        self.failed: set[tuple[str, int]] = set()
        """Samples that were in a step that failed."""
        self.faulty: set[tuple[str, int]] = set()
        """Those whose own row could not be launched."""
        self.in_flight: dict[int, Step] = {}
        s = scenario
        window = None if s.window is None else (s.window, Windows.pages_seen(s.window, s.page_size) + 2 + s.window_pages)
        self.scheduler = make_scheduler(
            s.pages, s.page_size, max_seqs=s.max_seqs, budget=s.budget, chunk=s.chunk, waiting=s.max_waiting,
            cache=s.prefix_cache, host=s.host_pages, model_len=200, window=window, clock=clock,
        )  # fmt: skip
        self.runner = FakeRunner(
            s.pages, s.page_size, vocab_size=VOCAB, asynchronous=s.asynchronous, faults=self._fault, window=window
        )  # fmt: skip
        self.scheduler.max_samples = max(self.scheduler.max_seqs, 24)
        guesses = None if s.guesses is None else Oracle(s.guesses, s.seed, free=s.silent, vocab_size=VOCAB)
        drafts = 1 + s.seed % 6
        self.engine = Engine(self.runner, TOKENIZER, EOS, self.scheduler, proposer=guesses, draft_tokens=drafts)
        ordered = not (s.faults or s.row_faults)
        self.ledger = Ledger(self.engine, self.runner, clock, ordered=ordered, drafts=drafts if guesses else 0)
        self.orphans: dict[str, int] = {}
        """Requests without a client -> the steps that they have had since."""
        self.unheard: list[str] = []
        """What the event loop had to say about callbacks and futures of which nobody took the exception."""
        self._watch()

    def heard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler."""
        self.unheard.append(f"{context['message']}: {context.get('exception')!r}")

    def _fault(self, number: int) -> None:
        if number == self.scenario.lethal:
            raise SystemError("a fault of the interpreter")
        if number in self.scenario.faults:
            raise Fault("the device says no")

    def _watch(self) -> None:
        """Every step of the engine is checked."""
        step, launch, collect = self.engine.step, self.runner.launch, self.runner.collect
        barren = 0

        def checked() -> list[Delta]:
            nonlocal barren
            deltas = step()
            barren = 0 if deltas else barren + 1
            assert barren < MOST_BARREN, f"the engine has made {barren} steps that brought nothing"
            self.ledger.check()
            self._orphans()
            return deltas

        def launched(step: Step) -> int:
            number = self.runner.launched + 1
            if number in self.scenario.row_faults and number != self.scenario.lethal:
                self.runner.launched = number
                request = step.rows[number % len(step.rows)].request
                self.faulty.add((request.id, request.index))
                raise RowFault(request, ValueError("its numbers do not fit"))
            self.in_flight[number] = step
            try:
                return launch(step)
            except Fault:
                self._excuse(number)
                raise

        def collected(ticket: int) -> StepResult:
            try:
                return collect(ticket)
            except Fault:
                self._excuse(ticket)
                raise

        self.engine.step = checked  # pyright: ignore[reportAttributeAccessIssue]
        self.runner.launch, self.runner.collect = launched, collected  # pyright: ignore[reportAttributeAccessIssue]

    def _excuse(self, number: int) -> None:
        """A step failed: its requests may, and those of the steps that were launched behind it."""
        for later, step in self.in_flight.items():
            if later >= number:
                self.failed.update((row.request.id, row.request.index) for row in step.rows)

    def _orphans(self) -> None:
        """Requests whose client has gone are aborted before the step after the next."""
        alone = {name for name in self.scheduler._by_id if name not in self.worker._channels}
        self.orphans = {name: self.orphans.get(name, 0) + 1 for name in alone}
        late = [name for name, steps in self.orphans.items() if steps > 2]
        assert not late, f"{late[0]} is still computed though its client has gone"

    async def run(self) -> None:
        """All clients, to their ends; then nothing may be left."""
        with patch.object(worker_module, "ThreadPoolExecutor", lambda *args, **options: self.executor):
            self.worker = EngineWorker(
                self.engine,
                _Latencies(),  # pyright: ignore[reportArgumentType]
                lambda error: None,
                max_wait_s=self.scenario.max_wait_s,
            )
        tasks = [asyncio.ensure_future(self._client(i, client)) for i, client in enumerate(self.scenario.clients)]
        loop = asyncio.get_running_loop()
        for task, client in zip(tasks, self.scenario.clients, strict=True):
            if client.cancelled_at_s is not None:
                loop.call_at(client.cancelled_at_s, task.cancel)
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), _LONGEST_S)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        while len(self.executor):  # what the last ones left behind: their aborts, and the steps in flight
            self.executor.run_one()
            await asyncio.sleep(0)
        self._end()

    def _end(self) -> None:
        assert not self.worker._channels, "a channel is still open"
        gc.collect()  # a future says that nobody took its exception when it goes
        assert not self.unheard, f"the event loop was left with an exception: {self.unheard[0]}"
        stopped = self.worker.stopped is not None
        assert stopped == self._died(), "the worker stopped though nothing fatal happened, or went on though it did"
        if not stopped:
            self.ledger.idle()
        stats = self.engine.stats()
        self.outcome.fetched, self.outcome.returned = stats.pages_in, stats.window_pages_returned
        self.outcome.drafted, self.outcome.accepted = stats.drafted_tokens, stats.accepted_tokens
        self.outcome.steps, self.outcome.preemptions, self.outcome.hits = (
            self.ledger.steps,
            stats.preemptions,
            stats.prefix_hit_tokens,
        )

    def _died(self) -> bool:
        return self.scenario.lethal is not None and self.runner.launched >= self.scenario.lethal

    async def _client(self, number: int, client: Client) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, client.at_s - loop.time()))
        params = SamplingParams(**client.params, speculate=number % 4 != 3)
        deltas: dict[tuple[str, int], list[Delta]] = defaultdict(list)
        end = "cancelled"
        try:
            end = await self._read(f"client-{number}", client, params, deltas)
        except QueueFull as error:
            end = "queue full" if error.retry_after_s > 0 else "told to retry at once"
        except RequestTooLong:
            end = "too long"
        except ValueError:
            assert any(not prompt for prompt in client.prompts), "a good prompt was refused"
            end = "refused"
        except EngineStopped:
            assert self._died(), "the engine stopped though nothing fatal happened"
            end = "stopped"
        finally:
            self.outcome.ends[end] += 1
            assert end != "told to retry at once", "that is no advice"
            self._judge(number, client, params, deltas, complete=end == "done")

    async def _read(self, name: str, client: Client, params: SamplingParams, deltas: Any) -> str:
        async with self.worker.open(name, [list(p) for p in client.prompts], [params] * len(client.prompts)) as channel:
            reads = 0
            while client.leaves_after is None or reads < client.leaves_after:
                new = await channel.take()
                if not new:
                    return "done"
                for delta in new:
                    deltas[delta.request_id, delta.index].append(delta)
                reads += 1
                await asyncio.sleep(client.read_s)
        return "left"

    def _judge(self, number: int, client: Client, params: SamplingParams, deltas: Any, *, complete: bool) -> None:
        for place, prompt in enumerate(client.prompts):
            name = f"client-{number}" if len(client.prompts) == 1 else f"client-{number}-{place}"
            for index in range(params.n):
                mine, sample = deltas.pop((name, index), []), (name, index)
                excused = {"error"} if sample in self.failed | self.faulty else set[str]()
                if self.scenario.max_wait_s is not None and place == 0:
                    excused.add("expired")
                check_answer(prompt, params, index, mine, excused)
                if complete:
                    assert mine, "a sample got nothing"
                    assert mine[-1].finish_reason is not None, "a sample never came to its end"
                    assert sample not in self.faulty or mine[-1].finish_reason == "error", "a row that cannot run went on"
                    self.outcome.ends[mine[-1].finish_reason] += 1
                self.outcome.answers += complete
        assert not deltas, f"deltas of somebody else: {list(deltas)}"


def run_scenario(scenario: Scenario) -> Outcome:
    """Run an episode. Raises AssertionError (also `loop.Stuck`) where a promise is broken."""
    executor = SimulatedExecutor()
    loop = SimulatedLoop(executor, scenario.seed)
    episode = _Episode(scenario, executor, loop.time)
    loop.set_exception_handler(episode.heard)
    try:
        loop.run_until_complete(episode.run())
    except TimeoutError:
        raise AssertionError(f"after {_LONGEST_S:g} s somebody still waits: a request starves") from None
    finally:
        loop.close()
    return episode.outcome
