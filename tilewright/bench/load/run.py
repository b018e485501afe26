"""Runs a whole load test: from a config to stages, and to their summaries."""

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tilewright import __version__
from tilewright.bench.load.config import LoadConfig
from tilewright.bench.load.drive import Drive, drive
from tilewright.bench.load.prompts import Prompts
from tilewright.bench.load.sample import Sample
from tilewright.bench.load.schedule import BLOCK_TOKENS, Planned, Stage, arrivals, read_trace
from tilewright.bench.load.summary import WINDOWS, Summary, spread, summarise
from tilewright.bench.load.target import Http, OpenAI, open_session, until_ready
from tilewright.bench.load.v2 import V2, describe

__all__ = ["Outcome", "line", "load", "stages"]

AGREE = 0.1
"""Windows agree if their throughput and latency differ by at most this share."""

Look = Callable[[str, Drive], None]


@dataclass(kw_only=True)
class Outcome:
    """The result of a load test."""

    url: str
    model: str
    config: LoadConfig
    summaries: list[Summary] = field(default_factory=list)
    samples: list[list[Sample]] = field(default_factory=list)
    """Samples of each stage."""
    began_at: float = 0.0
    """Seconds since 1970."""
    tensors: str | None = None
    """How a v2 model's tensors were sent: json, binary or shared memory."""
    rows: int | None = None
    """Rows of a v2 request, if the model leaves the first dimension open."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values, without single requests."""
        config = asdict(self.config) | {"api_key": None if self.config.api_key is None else "given"}
        head = {"tilewright": __version__, "url": self.url, "model": self.model, "began_at": self.began_at}
        if self.tensors is not None:
            head |= {"tensors": self.tensors, "rows": self.rows}
        return {**head, "config": config, "stages": [summary.to_json() for summary in self.summaries]}


def stages(config: LoadConfig) -> list[Stage]:
    """The stages of a config. Raises OSError or ValueError for a trace that cannot be read."""
    if config.trace is not None:
        planned = read_trace(Path(config.trace), speed=config.speed, length_scale=config.length_scale, limit=config.limit)
        return [Stage(label=Path(config.trace).name, planned=planned)]
    found = []
    for number, load in enumerate(config.loads):
        seed = config.seed * 1_000_003 + number
        if config.rate is not None:
            times = arrivals(load, config.arrivals, seed)
            label, concurrency = f"{load:g} requests/s", None
        else:
            times, concurrency = itertools.repeat(0.0), int(load)
            label = f"{concurrency} user{'s' if concurrency > 1 else ''}"
        planned = _with_lengths(times, config, seed)
        found.append(
            Stage(
                label=label,
                planned=itertools.islice(planned, config.limit),
                concurrency=concurrency,
                duration_s=config.duration,
            )
        )
    return found


def _with_lengths(times: Iterator[float], config: LoadConfig, seed: int) -> Iterator[Planned]:
    rng, (prompt, answer) = random.Random(seed), config.lengths
    for at_s in times:
        yield Planned(at_s, rng.randint(*prompt), rng.randint(*answer))


async def load(
    url: str, config: LoadConfig, *, look: Look = lambda label, state: None, say: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Run all stages against a service, one after the other.

    Args:
        look: called a few times a second with the running stage.
        say: called with one line of text when a stage has ended.

    Raises:
        OSError: the service cannot be reached, or is still loading after `config.wait`; or a trace cannot be read.
        ValueError: the service does not match the config.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the URL is {url!r}, wanted one such as http://127.0.0.1:8000")
    planned = stages(config)
    async with open_session(config.timeout, config.api_key) as session:
        await until_ready(session, url, config.wait, say)
        model, target = await _target(session, url, config)
        outcome = Outcome(url=url, model=model, config=config, began_at=time.time())
        if isinstance(target, V2):
            outcome.tensors, outcome.rows = target.way, target.rows
        try:
            for stage in planned:
                await target.begin(stage.concurrency)
                state = await drive(
                    stage, target, most_in_flight=config.max_in_flight, look=functools.partial(_look, stage, config, look)
                )
                summary = _summary(stage, state, config, outcome.rows)
                outcome.summaries.append(summary)
                outcome.samples.append(state.samples)
                say(line(summary))
        finally:
            await target.close()
    return outcome


async def _target(session: aiohttp.ClientSession, url: str, config: LoadConfig) -> tuple[str, Http]:
    if config.endpoint == "v2":
        assert config.model is not None
        asked = await describe(session, url, config.model, config.batch)
        return config.model, V2(session, url, asked, seed=config.seed, shared=config.shared_memory)
    model = config.model or await OpenAI.model_of(session, url)
    prompts = Prompts(config.seed, config.shared_prefix, round(BLOCK_TOKENS * config.length_scale))
    chat = config.endpoint == "chat"
    return model, OpenAI(session, url, model, prompts, chat=chat, ignore_eos=config.ignore_eos)


def _look(stage: Stage, config: LoadConfig, look: Look, state: Drive) -> None:
    window_s = config.until_stable
    if window_s is not None and not state.stopped:
        begin_s = state.elapsed_s - WINDOWS * window_s
        if begin_s >= config.warmup:
            differ = spread(state.samples, begin_s, state.elapsed_s)
            state.stopped = differ is not None and differ <= AGREE
            if state.stopped:
                state.stable_until_s = state.elapsed_s
    look(stage.label, state)


def _summary(stage: Stage, state: Drive, config: LoadConfig, rows: int | None) -> Summary:
    begin_s, end_s = config.warmup, stage.duration_s
    if state.stable_until_s is not None and config.until_stable is not None:
        end_s = state.stable_until_s
        begin_s = end_s - WINDOWS * config.until_stable
    elif end_s is None or config.limit is not None:
        # A stage that ends with its last request is measured from its beginning to the last answer.
        end_s = max((sample.end_s for sample in state.samples), default=0.0) + 1e-9
        begin_s = begin_s if begin_s < end_s / 2 else 0.0
    bounds = {"begin_s": begin_s, "end_s": end_s}
    return summarise(stage.label, state.samples, config.objective, **bounds, concurrency=stage.concurrency, rows=rows)


def line(summary: Summary) -> str:
    """The summary of a stage as one line of text."""
    parts = [f"{summary.label}: {summary.request_rate:.2f} requests/s"]
    if summary.row_rate is not None:
        parts.append(f"{summary.row_rate:.0f} rows/s")
    if summary.token_rate:
        parts.append(f"{summary.token_rate:.0f} tokens/s")
    for name, found in summary.latencies.items():
        if name in ("ttft", "tpot") or "ttft" not in summary.latencies:
            parts.append(f"{name.upper()} {found['p50'] * 1000:.1f} / {found['p99'] * 1000:.1f} ms (p50 / p99)")
    if summary.rejected or summary.failed:
        parts.append(f"{summary.rejected} rejected, {summary.failed} failed")
    return ", ".join(parts)
