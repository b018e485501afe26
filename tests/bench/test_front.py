"""The bench of front processes: its engine gives what it is asked for, and its rows are of what was served."""

import math
from typing import Any

import pytest

from tests.server.fake_engine import behind_a_socket
from tilewright.bench.front import parts, run_fronts
from tilewright.bench.front_engine import MockEngine, words
from tilewright.engine.reader import Reader
from tilewright.engine.request import SamplingParams
from tilewright.server.prompts import Served


def test_its_engine_gives_each_stream_a_token_a_step() -> None:
    engine, reader = MockEngine(1e6), Reader(words())
    for stream, tokens in ((5, 3), (6, 1), (9, 4)):
        params = SamplingParams(max_tokens=tokens)
        engine.submit([1, 2], params, f"r-{stream}", max_wait_s=None, streams=[stream])
        reader.open([stream], f"r-{stream}", [1, 2], params)
    engine.abort("r-9")
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in reader.read(engine.advance()):
            found.setdefault(delta.request_id, []).append(len(delta.text))
    assert found == {"r-5": [5, 5, 5], "r-6": [5]}, "words of four letters, with a space"
    assert engine.stats().generated_tokens == 4
    assert not engine.by_id.keys() - {"r-9"}


def test_an_engine_process_takes_it() -> None:
    """All that the process asks of an engine when it starts."""
    engine: Any = MockEngine(1e6)
    with behind_a_socket(engine, Served.of(engine, "mock")) as (process, _):
        assert process.engine is engine


def test_parts_are_numbers() -> None:
    found = parts(8, 0.01)
    assert set(found) == {"encode", "decode", "text", "long way", "text and events"}
    assert all(math.isfinite(us) and us > 0 for us in found.values())


@pytest.mark.long
def test_a_row() -> None:
    row = run_fronts(2, streams=6, tokens=50, tokens_per_s=3000)
    assert (row["fronts"], row["tokens"]) == (2, 300)
    assert row["tokens_an_event"] >= 0.9
    assert row["front_us_a_token"] > 0
