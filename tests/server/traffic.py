"""`python -m tests.server.traffic --minutes 20`: mixed traffic against a real server with too small a cache, answers checked.

Each request of a fixed list is first answered alone: that is its reference. Then many clients send them all at once, at random:
waiting or streaming, or going away in the middle. An answer that comes to its end must be the reference's: its text, its finish
reason, its tokens; with `--invariant` its log-probabilities, to the last bit. At the end no page is held, and the server's
memory must not have grown. Only addresses of this machine are used, and the run ends by itself.

Exit code 0: all of it held; 1: something did not, and the last lines say what.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

__all__ = ["REQUESTS", "Summary", "serving", "traffic"]

SIZES = (
    "--max-seqs", "8", "--kv-cache-gib", "0.0014", "--max-model-len", "320", "--max-tokens-per-step", "256",
    "--max-wait", "600",
)  # fmt: skip
"""A cache that holds a part of eight answers: most of them are preempted. Nobody is refused for waiting."""
MB_A_MINUTE = 0.1
_STORY = "The captain looked at the sea and said to the old man, who had been with him since the beginning of the voyage, "


Requests = Sequence[tuple[str, dict[str, Any]]]
"""(path, body) of each."""


def _requests() -> Requests:
    """All that are sent; greedy or seeded, so each has one right answer."""
    found: list[tuple[str, dict[str, Any]]] = []
    prompts = ["Call me", _STORY, _STORY + "that night ", _STORY * 4, "été", "It was"]
    draws: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.0, "seed": 8, "top_p": 0.8, "top_k": 40},
        {"temperature": 0.8, "seed": 9, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    ]  # fmt: skip
    for place, prompt in enumerate(prompts):
        for turn, drawn in enumerate(draws):
            body: dict[str, Any] = {
                "model": "bookworm",
                "prompt": prompt,
                "max_tokens": (24, 60, 120)[(place + turn) % 3],
                **drawn,
            }
            extras: list[dict[str, Any]] = [
                {}, {"stop": ["the", ". "]}, {"logprobs": 3}, {"n": 2, "seed": 5}, {"min_tokens": 8, "logit_bias": {"5": 2}},
            ]  # fmt: skip
            found.append(("/v1/completions", body | extras[(place * 2 + turn) % 5]))
    for turn, drawn in enumerate(draws):
        messages = [
            {"role": "system", "content": "You tell stories."},
            {"role": "user", "content": f"Tell me about {turn} ships."},
        ]
        chat = {"model": "bookworm", "messages": messages, "max_tokens": 40, "logprobs": True, "top_logprobs": 2, **drawn}
        found.append(("/v1/chat/completions", chat))
    return found


REQUESTS = _requests()


@dataclass
class Summary:
    """What a run found."""

    answers: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    preemptions: float = 0.0
    pages_used: float = -1.0
    mb_a_minute: float = 0.0
    """How fast the server's resident memory grew, over the last half of the run."""
    resident_mb: tuple[float, ...] = ()
    """Resident memory at the start of the traffic, and after each tenth of it."""
    longest_gap_s: float = 0.0
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """What did not hold, in words."""
        found = list(self.wrong[:5])
        if self.pages_used != 0:
            found.append(f"{self.pages_used:g} pages are held at idle")
        if set(self.statuses) != {200}:
            found.append(f"statuses other than 200: {dict(self.statuses)}")
        if self.seconds >= 120 and self.mb_a_minute > MB_A_MINUTE:
            found.append(f"memory grows by {self.mb_a_minute:.2f} MB a minute, allowed {MB_A_MINUTE}")
        return found


def _resident_mb(pid: int | str) -> float:
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert resident is not None, f"process {pid} of the server has ended"
    return int(resident[1]) / 1024


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the process, its URL) of a server of bookworm, on the CPU unless told; ended on leaving."""
    device = () if "--device" in options else ("--device", "cpu")
    command = [sys.executable, "-m", "tilewright.cli", "serve", "bookworm", *device, "--port", "0", *options]
    with TemporaryDirectory() as folder, (log := Path(folder) / "log").open("w") as out:
        server = subprocess.Popen(command, stderr=out, stdout=out, text=True)
        try:
            url = None
            while url is None:
                assert server.poll() is None, f"the server did not start: {log.read_text()}"
                time.sleep(0.1)
                url = re.search(r"http://[\d.]+:\d+", log.read_text())
            yield server, url[0]
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def _choices(path: str, answer: dict[str, Any], exact: bool) -> list[Any]:
    """What of an answer must be equal: texts, finish reasons, and log-probabilities where every bit counts."""
    found = []
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        found.append([text, choice["finish_reason"], choice.get("logprobs") if exact else None])
    return found


async def _streamed(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], leave_after: int | None, statuses: Counter[int]
) -> list[Any] | None:  # fmt: skip
    """The choices of a streamed answer, without log-probabilities; None where the client went away."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        statuses[response.status_code] += 1
        events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                piece = choice["delta"].get("content") or "" if "chat" in path else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + piece
                reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
            events += 1
            if leave_after is not None and events >= leave_after:
                return None
    return [[texts[i], reasons[i], None] for i in sorted(texts)]


class _Run:
    def __init__(self, url: str, seconds: float, clients: int, seed: int, requests: Requests, exact: bool, pid: int):
        self.url, self.seconds, self.clients, self.exact, self.pid = url, seconds, clients, exact, pid
        self.requests = requests
        self.rng, self.summary = random.Random(seed), Summary()
        self.references: list[list[Any]] = []

    async def run(self) -> Summary:
        """References, traffic, the end."""
        limits = httpx.Limits(max_connections=self.clients + 4)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
            for path, body in self.requests:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                self.references.append(_choices(path, answer.json(), self.exact))
            start_s = time.monotonic()
            self.end_s = start_s + self.seconds
            memory = asyncio.create_task(self._memory(start_s))
            await asyncio.gather(*(self._client(client) for _ in range(self.clients)))
            self.summary.seconds = time.monotonic() - start_s
            samples = await memory
            await self._idle(client)
        half = samples[len(samples) // 2 :]  # what is cached at first is no leak
        if len(half) > 2:
            minutes, megabytes = np.array(half).T
            self.summary.mb_a_minute = float(np.polyfit(minutes, megabytes, 1)[0])
        places = np.linspace(0, len(samples) - 1, min(11, len(samples))).astype(int)
        self.summary.resident_mb = tuple(round(samples[place][1], 2) for place in places)
        return self.summary

    async def _client(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end_s:
            place = self.rng.randrange(len(self.requests))
            path, body = self.requests[place]
            way = self.rng.choice(("wait", "stream", "leave"))
            want = self.references[place]
            if way == "wait":
                answer = await client.post(path, json=body)
                self.summary.statuses[answer.status_code] += 1
                got = _choices(path, answer.json(), self.exact) if answer.status_code == 200 else None
            else:
                got = await _streamed(
                    client, path, body, self.rng.randint(1, 20) if way == "leave" else None, self.summary.statuses
                )
                want = [[text, reason, None] for text, reason, _ in want]
                self.summary.left += got is None
            if got is None:
                continue
            self.summary.answers += 1
            if got != want:
                self.summary.wrong.append(f"request {place} ({way}): got {got!r:.400}, alone it was {want!r:.400}")

    async def _memory(self, start_s: float) -> list[tuple[float, float]]:
        """(minutes, resident megabytes) of the server's processes, every second."""
        found = []
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        while time.monotonic() < self.end_s:
            megabytes = sum(_resident_mb(pid) for pid in (self.pid, *children))
            found.append(((time.monotonic() - start_s) / 60, megabytes))
            await asyncio.sleep(1.0)
        return found

    async def _idle(self, client: httpx.AsyncClient) -> None:
        """Wait until nothing runs, and read the counters."""
        values: dict[str, float] = {}
        for _ in range(100):
            text = (await client.get("/metrics")).text
            values = {name: float(value) for name, value in re.findall(r"^tilewright_(\w+)\S* ([\d.e+]+)$", text, re.MULTILINE)}
            if values["requests_running"] == values["requests_waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        self.summary.pages_used, self.summary.preemptions = values["kv_pages_used"], values["preemptions_total"]


def traffic(
    seconds: float, *, clients: int = 16, seed: int = 0, requests: Requests = REQUESTS, options: Sequence[str] = ()
) -> Summary:  # fmt: skip
    """Start a server, send traffic for so long, and say what was found."""
    with serving(*SIZES, *options) as (server, url):
        run = _Run(url, seconds, clients, seed, requests, "--invariant" in options, server.pid)
        return asyncio.run(run.run())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.traffic", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=16, help="requests under way at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-tokens", type=int, default=120, help="of an answer; fewer make more requests a minute")
    parser.add_argument(
        "--invariant", action="store_true", help="serve so that no bit depends on company, and compare every bit"
    )
    parser.add_argument("--device", default="cpu", help="of the server; --invariant wants a card")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    given = parser.parse_args()
    options = ["--device", given.device, *(["--invariant"] if given.invariant else [])]
    requests = [
        (path, body | {name: min(body[name], given.most_tokens) for name in ("max_tokens", "min_tokens") if name in body})
        for path, body in REQUESTS
    ]
    summary = traffic(given.minutes * 60, clients=given.clients, seed=given.seed, requests=requests, options=options)
    if given.json is not None:
        found = {"options": vars(given) | {"json": None}, **vars(summary), "failures": summary.failures}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{summary.answers:,} answers in {summary.seconds:.0f} s, {summary.left:,} left early, {len(summary.wrong)} wrong; "
        f"{summary.preemptions:,.0f} preemptions, {summary.pages_used:g} pages held at idle, {summary.mb_a_minute:+.3f} MB/min"
    )
    print("resident megabytes over the run:", *summary.resident_mb)
    for line in summary.failures:
        print(line)
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
