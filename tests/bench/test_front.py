"""The bench of front processes: its engine gives what it is asked for, and its rows are of what was served."""

import math
from typing import Any

import pytest

from tests.server.fake_engine import behind_a_socket, fake_engine
from tilewright.bench.front import parts, run_fronts
from tilewright.bench.front_engine import MockEngine, words
from tilewright.bench.served import run_served
from tilewright.bench.served_engine import alone, prompts
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


def test_gaps_are_those_of_steps_for_all_streams() -> None:
    engine = MockEngine(1e6)
    assert len(engine.gaps_s()) == 0
    engine._stamps = [(1.0, 1), (2.0, 2), (2.5, 2), (4.5, 2), (5.0, 1)]
    assert engine.gaps_s().tolist() == [0.5, 2.0]


@pytest.mark.long
def test_a_row() -> None:
    row = run_fronts(2, streams=6, tokens=400, tokens_per_s=3000, idle=20)
    assert (row["fronts"], row["tokens"], row["idle_lost"]) == (2, 2400, 0)
    assert row["tokens_an_event"] >= 0.9
    assert row["front_us_a_token"] > 0
    assert 0 < row["engine_gap_ms_p50"] <= row["engine_gap_ms_p99"]
    assert 0 < row["gap_ms_p50"] <= row["gap_ms_p99"]
    assert 0 <= row["growth_mib"] < row["memory_mib"]


@pytest.mark.long
def test_an_engine_alone_and_served() -> None:
    options = {"device": "cpu", "max_model_len": 128}
    (row,) = run_served("bookworm", options, fronts=1, streams=4, tokens_in=20, tokens_out=30, runs=1)
    assert row["alone_tok_per_s"] > 0
    assert row["share"] == pytest.approx(row["tok_per_s"] / row["alone_tok_per_s"], rel=0.01)
    assert row["tokens_an_event"] >= 1
    assert math.isfinite(row["adds_ms_p50"])


def test_what_is_measured_of_an_engine_alone() -> None:
    found = alone(fake_engine(max_model_len=64), streams=4, tokens_in=10, tokens_out=20, seed=0)
    assert found["tok_per_s"] > 0
    assert 0 < found["p50"] <= found["p99"]
    again, other = prompts(3, 5, 100, 0), prompts(3, 5, 100, 1)
    assert again == prompts(3, 5, 100, 0) != other
