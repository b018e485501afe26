"""A mock engine behind the real socket: every stream gets one token per step, at a given rate.

`python -m tilewright.bench.front_engine TOKENS_PER_S NOTES FOLDER CONTROL` is the engine process of `tilewright bench front`.
At its end it writes into NOTES the time between its steps while most streams were open.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tilewright.bench.front_server import quantiles_ms
from tilewright.engine.deltas import Note, StepDeltas
from tilewright.engine.outputs import EngineStats
from tilewright.engine.request import SamplingParams
from tilewright.engine.tokenizer import Tokenizer
from tilewright.server.engine_main import serve_engine
from tilewright.server.prompts import Served

__all__ = ["MockEngine", "words"]

VOCAB = 8192
MAX_MODEL_LEN = 1 << 20
LEAST_STEP_S = 0.002
"""Shortest time of a step, which counts if there are few streams."""


def words(vocab_size: int = VOCAB) -> Tokenizer:
    """A tokenizer whose tokens are a space and four or more letters, similar to those of language models for English."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    wanted = vocab_size - 257
    chosen = itertools.islice(itertools.product("etaoinsrhl", repeat=max(4, len(str(wanted)))), wanted)
    names = ["Ġ" + "".join(chars) for chars in chosen]
    vocab = {name: i for i, name in enumerate([*letters, *names])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"})


class _Scheduler:
    """The parts of a scheduler that a server uses."""

    max_model_len = MAX_MODEL_LEN
    max_waiting = 1 << 16

    def __init__(self, engine: "MockEngine"):
        self._engine = engine
        self.blocks = self
        self.num_pages, self.page_size = MAX_MODEL_LEN, 16

    def live(self, request_id: str) -> list[int]:
        """Its streams."""
        return self._engine.by_id.get(request_id, [])


class MockEngine:
    """The part of `Engine` that an engine process needs. Its tokens, letters and words, are random."""

    lost = None
    adapters = None
    failed_steps = 0

    def __init__(self, tokens_per_s: float):
        self.runner: Any = None
        self.tokenizer = words()
        self.eos_ids, self.vocab_size = self.tokenizer.eos_ids, self.tokenizer.vocab_size
        self.scheduler = _Scheduler(self)
        self.by_id: dict[str, list[int]] = {}
        self._rate = tokens_per_s
        self._streams = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.int64)
        self._fresh: list[int] = []
        self._names: dict[int, str] = {}
        self._drawn = np.random.default_rng(0).integers(257, VOCAB - 1, 1 << 16).astype(np.int32)
        self._next_s = 0.0
        self._made = 0
        self._stamps: list[tuple[float, int]] = []
        """(time, number of streams) of each step."""

    def gaps_s(self) -> np.ndarray:
        """Seconds between consecutive steps that both had the highest number of streams."""
        times, counts = np.array(self._stamps or [(0.0, 0)]).T
        full = counts == counts.max()
        return np.diff(times)[full[1:] & full[:-1]]

    @property
    def has_work(self) -> bool:
        """Whether there are streams."""
        return bool(len(self._streams))

    def submit(
        self, prompt: list[int], params: SamplingParams, request_id: str, *, max_wait_s: float | None, streams: Sequence[int]
    ) -> str:
        """Start the streams of a request."""
        self.by_id[request_id] = list(streams)
        self._names |= dict.fromkeys(streams, request_id)
        self._streams = np.append(self._streams, np.array(streams, np.int64))
        self._left = np.append(self._left, np.full(len(streams), params.max_tokens))
        self._fresh += streams
        return request_id

    def abort(self, request_id: str) -> None:
        """End the streams of a request without a message."""
        for stream in self.by_id.pop(request_id, []):
            self.stop(stream)

    def stop(self, stream: int) -> None:
        """End a stream."""
        self._names.pop(stream, None)
        keep = self._streams != stream
        self._streams, self._left = self._streams[keep], self._left[keep]

    def advance(self) -> StepDeltas:
        """Wait until the next step is due, and give each stream a token."""
        now_s = time.perf_counter()
        count = len(self._streams)
        time.sleep(max(0.0, self._next_s - now_s))
        self._next_s = max(now_s, self._next_s) + max(count / self._rate, LEAST_STEP_S)
        start = self._made % (len(self._drawn) - count) if count < len(self._drawn) else 0
        self._made += count
        self._left -= 1
        streams, ended = self._streams, np.nonzero(self._left == 0)[0]
        fresh = set(self._fresh)
        first = [int(row) for row in np.nonzero(np.isin(streams, self._fresh))[0]] if fresh else []
        notes = {row: Note(row, cached_tokens=0) for row in first}
        for row in map(int, ended):
            notes[row] = Note(row, "length", cached_tokens=0)
            self.by_id.pop(self._names.pop(int(streams[row])), None)
        self._fresh.clear()
        if len(ended):
            keep = self._left > 0
            self._streams, self._left = streams[keep], self._left[keep]
        tokens = self._drawn[start : start + count]
        self._stamps.append((time.perf_counter(), count))
        return StepDeltas(streams, np.ones(count, np.int32), tokens, tuple(notes[row] for row in sorted(notes)))

    def stats(self) -> EngineStats:
        """The engine's statistics; most of them are 0 here."""
        names = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(**{**names, "running": len(self._streams), "generated_tokens": self._made})


if __name__ == "__main__":
    made: Any = MockEngine(float(sys.argv[1]))
    code = serve_engine(Path(sys.argv[3]), int(sys.argv[4]), lambda log: (made, Served.of(made, "mock"), None))
    p50, p99 = quantiles_ms(made.gaps_s())
    Path(sys.argv[2]).write_text(json.dumps({"p50": p50, "p99": p99}))
    os._exit(code)
