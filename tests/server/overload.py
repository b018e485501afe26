"""Twice as many requests as a server can answer: `python -m tests.server.overload [--seconds 60] [--seed 0]`.

Starts `tilewright serve bookworm` with its defaults on the CPU. Measures what it can answer when many clients ask at once, then
sends twice that rate, by a Poisson process, and measures once more what it can answer. Counts

    in time     answers within 5 s of their request, as a share of what the server could have answered (wanted: 85 %):
                the mean of both measurements, whose slices of 5 s say how far it scatters
    refused     every other request has a 429 with a retry-after, and had it within 5 s
    honest      how often requests that come again when they were told to are answered then, beside the share of first requests
    recovered   the latency of single requests from 5 s after the end, against that before (wanted: at most twice)

With `--step 0.1` the server runs in this process on an engine whose steps take so many seconds and no processor: on a machine
that is busy otherwise the embedded model's own speed would decide. With `--batch 0.2` it serves an ordinary model whose batches
of 8 take so many seconds and no processor.

`--apart` gives the clients one core and the server the others, as clients on machines of their own would leave it all of its
own. Without it the clients take more of the server's cores at twice the load than while its capacity is measured.

Prints the numbers and exits with 1 where one is not as wanted. Loopback only; ends by itself.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.host.fakes import Makes
from tests.server.fake_engine import fake_engine, running
from tests.server.v2.running import double, serving
from tests.server.victim import BOOKWORM, server_process
from tilewright.host.config import ModelConfig

IN_TIME_S = 5.0
WANTED_SHARE = 0.85
RECOVERY_S = 5.0
TOKENS = 16
CLIENTS = 128
"""That ask again and again while the capacity is measured: twice as many as run at once, so that some always wait."""
WARM_S, SLICE_S, SLICES = 4.0, 5.0, 5
"""Of a measurement of the capacity: what is not counted, and what is."""


@dataclass
class Asked:
    """One request: when it was sent, its status, how long it took, and when it was told to come again."""

    sent_s: float
    status: int
    took_s: float
    retry_s: float = 0.0


Make = Callable[[random.Random], tuple[str, Any]]
"""Path and JSON of a request."""


def completion(rng: random.Random) -> tuple[str, Any]:
    """A request to the embedded model."""
    words = " ".join(rng.choice(("sea", "ship", "captain", "wind", "night", "land")) for _ in range(8))
    return "/v1/completions", {"prompt": words, "max_tokens": TOKENS, "ignore_eos": True, "seed": rng.randrange(1 << 30)}


def four_numbers(rng: random.Random) -> tuple[str, Any]:
    """A request to an ordinary model."""
    data = [rng.randrange(100) for _ in range(4)]
    return "/v2/models/m/infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": data}]}


class _Asking(asyncio.Protocol):
    """A request on a connection of its own, which costs the client as little as may be: its cores may be the server's."""

    def __init__(self, data: bytes):
        self._data, self.answer, self.done = data, bytearray(), asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self.answer += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def ask(port: int, rng: random.Random, make: Make) -> Asked:
    """Send one request on a connection of its own."""
    path, fields = make(rng)
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    sent_s = time.monotonic()
    try:
        transport, asking = await asyncio.get_running_loop().create_connection(lambda: _Asking(data), "127.0.0.1", port)
    except OSError:
        return Asked(sent_s, 0, time.monotonic() - sent_s)
    await asyncio.wait((asking.done,), timeout=60)
    transport.close()
    retry = re.search(rb"(?i)retry-after: (\d+)", asking.answer)
    status = int(asking.answer[9:12] or 0) if asking.done.done() else 0
    return Asked(sent_s, status, time.monotonic() - sent_s, float(retry[1]) if retry else 0.0)


async def capacity(port: int, rng: random.Random, make: Make) -> list[float]:
    """Answers a second, slice by slice, with enough clients that each ask again at once."""
    start_s = time.monotonic() + WARM_S
    slices = [0] * SLICES

    async def client() -> None:
        while time.monotonic() < start_s + SLICES * SLICE_S:
            one = await ask(port, rng, make)
            at = int((one.sent_s + one.took_s - start_s) // SLICE_S)
            if one.status == 200 and 0 <= at < SLICES:
                slices[at] += 1
            elif one.status != 200:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return [count / SLICE_S for count in slices]


async def flood(port: int, rate: float, seconds: float, rng: random.Random, make: Make) -> tuple[list[Asked], list[Asked]]:
    """(first requests at this rate, a tenth of those that were told to come again, when they did)."""
    start_s, at_s = time.monotonic(), 0.0
    first: list[asyncio.Task[Asked]] = []
    again: list[asyncio.Task[Asked]] = []

    async def come_again(one: asyncio.Task[Asked]) -> Asked:
        refused = await one
        if refused.status != 429 or refused.sent_s + refused.took_s + refused.retry_s > start_s + seconds:
            return refused
        await asyncio.sleep(refused.retry_s)
        return await ask(port, rng, make)

    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        first.append(asyncio.create_task(ask(port, rng, make)))
        if rng.random() < 0.1:
            again.append(asyncio.create_task(come_again(first[-1])))
    asked = await asyncio.gather(*first)
    later = [one for one in await asyncio.gather(*again) if all(one is not early for early in asked)]
    return asked, later


async def single(port: int, count: int, rng: random.Random, make: Make) -> float:
    """The median latency of requests one after the other."""
    return statistics.median([(await ask(port, rng, make)).took_s for _ in range(count)])


async def run(port: int, seconds: float, rng: random.Random, make: Make = completion, *, wanted: float = WANTED_SHARE) -> bool:
    """All of it; whether everything is as wanted."""
    idle_s = await single(port, 8, rng, make)
    before = await capacity(port, rng, make)
    print(f"idle: {idle_s * 1e3:.0f} ms a request; capacity before: {_spread(before)}", flush=True)
    asked, later = await flood(port, 2 * statistics.mean(before), seconds, rng, make)
    await asyncio.sleep(max(0.0, asked[-1].sent_s + RECOVERY_S - time.monotonic()))
    after_s = await single(port, 8, rng, make)
    after = await capacity(port, rng, make)
    able = statistics.mean(before + after)
    answered = [one for one in asked if one.status == 200]
    in_time = sum(one.took_s <= IN_TIME_S for one in answered)
    refused = [one for one in asked if one.status == 429]
    share = in_time / (able * seconds)
    took = sorted(one.took_s for one in answered)
    late = sum(one.took_s > IN_TIME_S or not one.retry_s for one in refused)
    others = len(asked) - len(answered) - len(refused)
    print(f"capacity after: {_spread(after)}; both: {able:.1f}")
    print(f"sent {len(asked)} at {len(asked) / seconds:.1f}/s; answered {len(answered)}, refused {len(refused)}, else {others}")
    middle_s, last_s = took[len(took) // 2], took[-1]
    print(
        f"in time: {in_time}, {in_time / seconds:.1f}/s, {share:.0%} of capacity; median {middle_s:.2f} s, last {last_s:.2f} s"
    )
    retries = sorted(one.retry_s for one in refused) or [0.0]
    middle = retries[len(retries) // 2]
    print(f"refusals: {late} late or without retry-after; retry-after median {middle:.0f} s, most {retries[-1]:.0f} s")
    if later:
        again = sum(one.status == 200 for one in later) / len(later)
        print(f"came again when told: {again:.0%} of {len(later)} answered; first requests: {len(answered) / len(asked):.0%}")
    print(f"{RECOVERY_S:g} s after: {after_s * 1e3:.0f} ms a request")
    return share >= wanted and not late and not others and after_s <= 2 * idle_s + 0.05


def _spread(slices: list[float]) -> str:
    return f"{statistics.mean(slices):.1f} requests/s ({min(slices):.1f} to {max(slices):.1f})"


def main() -> int:
    """Start a server, flood it, end it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", action="store_true", help="the clients have a core that the server has not")
    parser.add_argument("options", nargs="*", help="further options of `tilewright serve`, after --")
    parser.add_argument("--step", type=float, help="seconds a step of a simulated engine takes")
    parser.add_argument("--batch", type=float, help="seconds that a batch of 8 of an ordinary model takes")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    if given.batch is not None:
        models = {"m": ModelConfig(source="a:b", max_batch=8)}
        with serving(models, makes=Makes(double, seconds=given.batch)) as server:
            return 0 if asyncio.run(run(server.port, given.seconds, rng, four_numbers, wanted=0.9)) else 1
    if given.step is not None:
        with running(fake_engine(delay_s=given.step, max_seqs=64, max_waiting=4096, pages=4096)) as fake:
            return 0 if asyncio.run(run(fake.port, given.seconds, rng)) else 1
    cores = sorted(os.sched_getaffinity(0))
    if given.apart and len(cores) < 2:
        parser.error("--apart needs two cores")
    os.sched_setaffinity(0, cores[:-1] if given.apart else cores)  # the server's, which inherits them
    with server_process(*BOOKWORM, *given.options, shaped=False) as server:
        os.sched_setaffinity(0, cores[-1:] if given.apart else cores)
        return 0 if asyncio.run(run(server.port, given.seconds, rng)) else 1


if __name__ == "__main__":
    sys.exit(main())
