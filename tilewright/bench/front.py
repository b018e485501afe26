"""How many tokens a second front processes serve, and what each costs: a mock engine behind the real socket, real HTTP.

The engine gives every open stream a token a step, at a rate that is given; clients in processes of their own read every event.
Fronts that cannot keep up put several tokens into an event, and the run takes longer than the rate says. Processor time a
token does not depend on that, nor on how many cores there are: it is what to compare.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.bench.front_engine import words
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
_SCRIPT = """
import json, sys
from pathlib import Path
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.serve import bind
from tilewright.server.supervisor import Supervisor, private_folder
spec = json.loads(sys.argv[1])
config = ServerConfig(**spec["config"])
with Log("error") as log, private_folder() as folder:
    sys.exit(Supervisor(config, spec["engine"], folder, bind(config), log).run("mock"))
"""


@contextmanager
def _server(fronts: int, tokens_per_s: float) -> Iterator[tuple[int, int]]:
    """(process, port) of a server with a mock engine."""
    config = {"port": 0, "fronts": fronts, "max_connections": 65536, "log_level": "error", "max_wait_s": 1e6}
    engine = [sys.executable, "-m", "tilewright.bench.front_engine", str(tokens_per_s)]
    command = [sys.executable, "-c", _SCRIPT, json.dumps({"config": config, "engine": engine})]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said, end_s = "", time.monotonic() + START_S
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
                line = process.stderr.readline()
                said += line
                if not line or time.monotonic() > end_s:
                    raise OSError(f"the server did not start: {said.strip()}")
            yield process.pid, int(found[1])
        finally:
            process.terminate()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_fronts(fronts: int, *, streams: int, tokens: int, tokens_per_s: float) -> dict[str, Any]:
    """One row: `streams` streams of `tokens` tokens each, through so many fronts.

    Raises:
        OSError: the server does not start, or a stream does not come to its end.
    """
    with _server(fronts, tokens_per_s) as (parent, port):
        pids = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
        serving = [pid for pid, command in commands.items() if "server.front" in command]
        engines = [pid for pid in pids if pid not in serving]
        before = {pid: _cpu_s(pid) for pid in pids}
        share = [streams // fronts + (i < streams % fronts) for i in range(fronts)]
        clients = [
            subprocess.Popen(
                [sys.executable, "-m", "tilewright.bench.front_client", str(port), str(one), str(tokens)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for one in share
        ]
        found = [json.loads(client.communicate()[0] or "{}") for client in clients]
        spent = {pid: _cpu_s(pid) - before[pid] for pid in pids}
    if sum(one.get("whole", 0) for one in found) != streams:
        raise OSError(f"{streams} streams were opened, and {sum(one.get('whole', 0) for one in found)} came to their end")
    made = streams * tokens
    seconds = max(one["last_s"] for one in found) - min(one["first_s"] for one in found)
    us: Callable[[float], float] = lambda seconds: round(1e6 * seconds / made, 2)  # noqa: E731
    return {
        "fronts": fronts,
        "streams": streams,
        "tokens": made,
        "tok_per_s": round(made / seconds),
        "tokens_an_event": round(made / (sum(one["events"] for one in found)), 2),
        "front_us_a_token": us(sum(spent[pid] for pid in serving)),
        "engine_us_a_token": us(sum(spent[pid] for pid in engines)),
        "client_us_a_token": us(sum(one["cpu_s"] for one in found)),
        "cores": os.cpu_count(),
    }


class _Nowhere:
    """A connection whose bytes go nowhere, and a channel that waits for more."""

    blocked = False
    waiting = True

    def wake(self) -> None:
        """There is no task."""

    def write_chunk(self, data: bytes) -> None:
        """Forget them."""


def parts(streams: int = 128, seconds: float = 0.5) -> dict[str, float]:
    """Processor microseconds a token of each part of the way, alone, on steps of one token for each of `streams` streams.

    encode and decode are the wire's; "text" makes deltas, "text and events" the events of the short way (server/direct.py),
    "long way" the events of deltas that take the other one. Connections are not in it.
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
    """Processor seconds of one call: the least of five rounds, as others only ever add to it."""
    best = float("inf")
    for _ in range(5):
        calls, start_s = 0, time.process_time()
        while (spent := time.process_time() - start_s) < seconds / 5:
            work()
            calls += 1
        best = min(best, spent / calls)
    return best
