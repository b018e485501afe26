"""The schedule of a load test, which says what to request and when: rates, steps of concurrency, and recorded traces.

A trace is a CSV or JSON-lines file, compressed with xz or gzip or not. Known names of its fields:

| what                        | names                                                                |
|-----------------------------|----------------------------------------------------------------------|
| arrival                     | `TIMESTAMP` (a date and time), `timestamp` (milliseconds), `arrival_s` |
| prompt, in tokens           | `ContextTokens`, `input_length`, `prompt_tokens`                     |
| answer, in tokens           | `GeneratedTokens`, `output_length`, `output_tokens`                  |
| shared prefix (JSON lines)  | `hash_ids`: a number for each block of 512 tokens; equal numbers are equal blocks |
"""

import csv
import gzip
import itertools
import json
import lzma
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

__all__ = ["BLOCK_TOKENS", "Planned", "Stage", "arrivals", "read_trace", "span"]

BLOCK_TOKENS = 512
"""Tokens of a block, which a trace names by a hash id."""
_PROMPT = ("ContextTokens", "input_length", "prompt_tokens")
_ANSWER = ("GeneratedTokens", "output_length", "output_tokens")
MAX_TOKENS = 1 << 24
"""Longest prompt or answer that a trace may have, in tokens."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A scheduled request."""

    at_s: float
    """Scheduled time, in seconds from the beginning of its stage."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Hash ids of the prompt's blocks; () for a prompt that shares nothing with others."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run with constant load.

    Open loop: `planned` says when each request is sent, whether or not earlier ones were answered. Closed loop: there are
    `concurrency` users, each of whom sends the next request when the last one has been answered.
    """

    label: str
    planned: Iterable[Planned] = ()
    concurrency: int | None = None
    duration_s: float | None = None
    """Seconds after which the stage ends; None: it ends with its last request."""


def arrivals(rate: float, kind: str, seed: int) -> Iterator[float]:
    """An endless sequence of arrival times in seconds, `rate` per second: "poisson" (independent users) or "constant"."""
    rng = random.Random(seed)
    at_s = 0.0
    for count in itertools.count(1):
        yield at_s
        at_s = at_s + rng.expovariate(rate) if kind == "poisson" else count / rate


def span(text: str) -> tuple[int, int]:
    """A number of tokens, or a range "64-256" from which each request draws. Raises ValueError."""
    low, dash, high = text.partition("-")
    try:
        found = (int(low), int(high) if dash else int(low))
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1] <= MAX_TOKENS:
        raise ValueError(f"the number of tokens is {text!r}, wanted a number such as 128 or a range such as 64-256")
    return found


def read_trace(path: Path, *, speed: float = 1.0, length_scale: float = 1.0, limit: int | None = None) -> list[Planned]:
    """The requests of a trace in the order of their arrival, the first one at time 0.

    Args:
        speed: 2 sends the requests in half of the recorded time.
        length_scale: factor for all lengths, including those of blocks, for models that accept less than was recorded.
        limit: use only the first so many requests.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not understood; the message names it.
    """
    found: list[Planned] = []
    with _opened(path) as file:
        for number, row in enumerate(itertools.islice(_rows(file, path), limit), start=1):
            try:
                arrival = _arrival_s(row) / speed
                prompt, answer = (_tokens(row, names, length_scale) for names in (_PROMPT, _ANSWER))
                blocks = tuple(map(int, row.get("hash_ids") or ()))
            except (KeyError, ValueError, TypeError) as error:
                wanted = "wanted arrival, prompt tokens and answer tokens, under one of the names in docs/load.md"
                raise ValueError(f"request {number} of {path} cannot be read ({error}); {wanted}") from None
            found.append(Planned(arrival, prompt, answer, blocks))
    if not found:
        raise ValueError(f"the trace {path} has no requests, wanted at least one")
    found.sort(key=lambda one: one.at_s)
    first_s = found[0].at_s
    return [Planned(one.at_s - first_s, one.prompt_tokens, one.output_tokens, one.blocks) for one in found]


def _opened(path: Path) -> IO[str]:
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    return cast(IO[str], openers.get(path.suffix, open)(path, "rt", encoding="utf-8"))


def _rows(file: IO[str], path: Path) -> Iterator[dict[str, Any]]:
    if ".csv" in path.suffixes:
        yield from csv.DictReader(file)
        return
    for number, line in enumerate(file, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {path} is not a JSON object")
        yield row


def _arrival_s(row: dict[str, Any]) -> float:
    if "arrival_s" in row:
        return float(row["arrival_s"])
    if "timestamp" in row:
        return float(row["timestamp"]) / 1000
    # Python's dates have at most six decimal digits of a second.
    date, dot, digits = row["TIMESTAMP"].partition(".")
    return datetime.fromisoformat(date).timestamp() + (float(f"0.{digits}") if dot else 0.0)


def _tokens(row: dict[str, Any], names: tuple[str, ...], scale: float) -> int:
    name = next((name for name in names if name in row), names[-1])
    tokens = max(1, round(int(row[name]) * scale))
    if tokens > MAX_TOKENS:
        raise ValueError(f"{name} is {tokens}, wanted at most {MAX_TOKENS}")
    return tokens
