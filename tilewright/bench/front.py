"""Measures the token rate of front processes and their cost per token: a mock engine behind the real socket, real HTTP.

The engine gives every open stream one token per step, at a given rate; clients in separate processes read every event. Fronts
that cannot keep up put several tokens into one event, and the run takes longer than the rate implies. Processor time per token
depends neither on that nor on the number of cores, so it is the figure to compare.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.bench.front_engine import words
from tilewright.bench.front_server import clients, finite, quantiles_ms, server
from tilewright.engine.deltas import StepRows
from tilewright.engine.reader import Reader
from tilewright.engine.request import SamplingParams
from tilewright.server import wire
from tilewright.server.direct import Batch, Direct
from tilewright.server.metrics import Latencies
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job
from tilewright.server.reply import Reply
from tilewright.server.spelling import Spellings

__all__ = ["parts", "run_fronts"]

START_S = 120.0


def run_fronts(fronts: int, *, streams: int, tokens: int, tokens_per_s: float, idle: int = 0) -> dict[str, Any]:
    """One row: `streams` streams of `tokens` tokens each through `fronts` processes, with `idle` further idle connections.

    Raises:
        OSError: the server does not start, or a stream ends early.
    """
    body = json.dumps({"prompt": "a b", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "engine.json")
        with server(fronts, ["-m", "tilewright.bench.front_engine", str(tokens_per_s), str(notes)], START_S) as processes:
            before = processes.cpu_s()
            shares = [[body] * (streams // fronts + (i < streams % fronts)) for i in range(fronts)]
            found = clients(processes, [share for share in shares if share], idle)
            spent = {pid: seconds - before[pid] for pid, seconds in processes.cpu_s().items()}
        engine = json.loads(notes.read_text())
    made = streams * tokens
    us: Callable[[float], float] = lambda seconds: round(1e6 * seconds / made, 2)  # noqa: E731
    p50, p99 = quantiles_ms(found.gaps_s)
    return finite(
        {
            "fronts": fronts,
            "streams": streams,
            "idle": idle,
            "idle_lost": found.lost,
            "tokens": made,
            "tok_per_s": round(made / found.streaming_s),
            "tokens_an_event": round(made / found.total("events"), 2),
            "engine_gap_ms_p50": engine["p50"],
            "gap_ms_p50": p50,
            "engine_gap_ms_p99": engine["p99"],
            "gap_ms_p99": p99,
            "front_us_a_token": us(sum(spent[pid] for pid in processes.fronts)),
            "engine_us_a_token": us(spent[processes.engine]),
            "client_us_a_token": us(found.total("cpu_s")),
            "memory_mib": round(max(found.memory_mib), 1),
            "growth_mib": round(found.growth_mib, 1),
            "cores": os.cpu_count(),
        }
    )


class _Nowhere:
    """A connection that discards its bytes, and a channel that waits for more."""

    blocked = False
    waiting = True

    def wake(self) -> None:
        """There is no task."""

    def write_chunk(self, data: bytes) -> None:
        """Forget them."""


def parts(streams: int = 128, seconds: float = 0.5) -> dict[str, float]:
    """Processor microseconds per token of each part of the way by itself, for steps of one token for each of `streams` streams.

    "encode" and "decode" are those of the socket between engine and front; "text" makes deltas, "text and events" makes the
    events of the short way (server/direct.py), "long way" makes the events of the other deltas. Connections are not included.
    """
    tokenizer = words()
    served = Served(
        name="mock", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=1 << 20, max_samples=1 << 16,
        has_chat=False, has_adapters=False, spellings=Spellings(tokenizer),
    )  # fmt: skip
    params = SamplingParams(max_tokens=1 << 20)
    job = Job(chat=False, prompts=([300],), params=(params,), stream=True)
    reader, short, rows, batch = Reader(tokenizer), Reader(tokenizer), StepRows(), Batch(Latencies())
    replies = [Reply(f"r-{stream}", 0, job, served) for stream in range(streams)]
    for stream, reply in enumerate(replies):
        reader.open([stream], f"r-{stream}", [300], params)
        short.open([stream], f"r-{stream}", [300], params)
        direct = Direct(_Nowhere(), batch, _Nowhere(), {0: 0.0}, reply.frame)
        short.direct(stream, direct.lanes[0].take)
        rows.add(stream, 300 + 7 * stream)
    step = rows.take()
    raw, deltas = wire.pack_step(1, step), reader.read(step)

    def events() -> None:
        batch.begin(time.perf_counter())
        assert not short.read(step)
        batch.end()

    work: dict[str, Callable[[], object]] = {
        "encode": lambda: wire.pack_step(1, step),
        "decode": lambda: wire.read_step(wire.unpack(raw)),
        "text": lambda: reader.read(step),
        "long way": lambda: [list(reply.chunks([delta])) for reply, delta in zip(replies, deltas)],
        "text and events": events,
    }
    return {name: round(1e6 * _per_call(one, seconds) / streams, 3) for name, one in work.items()}


def _per_call(work: Callable[[], object], seconds: float) -> float:
    """Processor seconds of one call: the minimum of five rounds, because disturbances only make it longer."""
    best = float("inf")
    for _ in range(5):
        calls, start_s = 0, time.process_time()
        while (spent := time.process_time() - start_s) < seconds / 5:
            work()
            calls += 1
        best = min(best, spent / calls)
    return best
