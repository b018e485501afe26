"""What a load test is given: traces, objectives, options; each mistake is one sentence."""

import gzip
import itertools
import json
import lzma
from pathlib import Path

import pytest

from tests.paths import SHARED
from tilewright.bench.load.config import LoadConfig
from tilewright.bench.load.prompts import Prompts
from tilewright.bench.load.run import stages
from tilewright.bench.load.schedule import Planned, read_trace
from tilewright.bench.load.slo import Slo

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n"
LINE = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [0, 5]}


def test_a_csv_of_dates(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    assert read_trace(tmp_path / "a.csv") == [Planned(0, 374, 44), Planned(pytest.approx(4.0), 396, 109)]
    assert read_trace(tmp_path / "a.csv", speed=2, limit=2)[1].at_s == pytest.approx(2.0)


@pytest.mark.parametrize(("name", "opener"), [("a.jsonl", open), ("a.jsonl.xz", lzma.open), ("a.jsonl.gz", gzip.open)])
def test_json_lines_with_blocks(tmp_path: Path, name: str, opener) -> None:
    with opener(tmp_path / name, "wt") as file:
        file.write(json.dumps(LINE | {"timestamp": 4000}) + "\n" + json.dumps(LINE) + "\n")
    assert read_trace(tmp_path / name) == [Planned(0, 1000, 7, (0, 5)), Planned(2.5, 1000, 7, (0, 5))]
    assert read_trace(tmp_path / name, length_scale=0.01)[0].prompt_tokens == 10


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", "has no requests"),
        ("a.csv", "time,size\n1,2\n", "request 1 of .* cannot be read"),
        ("a.csv", CSV + "2023-11-16 18:16:00.1,many,4\n", "request 3 of .* cannot be read"),
        ("a.jsonl", "{\n", "line 1 of .* is not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1 of .* is not a JSON object"),
        ("a.jsonl", json.dumps(LINE | {"input_length": 1 << 40}), "wanted at most"),
        ("a.jsonl", json.dumps(LINE | {"hash_ids": ["x"]}), "request 1 of"),
    ],
)
def test_a_bad_trace_is_one_sentence(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        read_trace(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "requests", "shared"),
    [("azure-2023-conversation.csv", 19_366, False), ("mooncake-conversation.jsonl.xz", 12_031, True)],
)
def test_public_traces_are_read(file: str, requests: int, shared: bool) -> None:
    path = SHARED / "data" / "traces" / file
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    found = read_trace(path)
    assert len(found) == requests
    assert found[0].at_s == 0
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(found))
    assert any(one.blocks for one in found) is shared


def test_prompts_share_what_a_trace_says() -> None:
    prompts = Prompts(0, block_tokens=8)
    first, second, third = prompts.ids(20, (1, 2, 3)), prompts.ids(20, (1, 2, 4)), prompts.ids(30, (1, 2))
    assert list(map(len, (first, second, third))) == [20, 20, 30]
    assert first[:16] == second[:16] == third[:16]
    assert first[16:] != second[16:]
    assert prompts.ids(12) != prompts.ids(12)
    assert Prompts(0).ids(50) == Prompts(0).ids(50) != Prompts(1).ids(50)
    system = Prompts(0, shared=10)
    assert system.ids(20)[:10] == system.ids(20)[:10]
    assert len(Prompts(0).text(30).split()) == 30


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("", {}), ("ttft=200ms,itl=20ms", {"ttft": 0.2, "itl": 0.02}), ("e2e=1.5s, tpot=800us", {"tpot": 8e-4, "e2e": 1.5})],
)
def test_objectives(text: str, bounds: dict[str, float]) -> None:
    assert Slo.parse(text).bounds == pytest.approx(bounds)


@pytest.mark.parametrize("text", ["ttft", "ttft=0ms", "ttft=20", "ttft=1s,ttft=2s", "latency=1s", "ttft=-1s", "ttft=1e3ms"])
def test_no_objectives(text: str) -> None:
    with pytest.raises(ValueError, match="the objective"):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rate": "1", "concurrency": "2"}, "are given, wanted only one"),
        ({"rate": "1,x"}, "rate is '1,x'"),
        ({"concurrency": "1.5"}, "concurrency is '1.5'"),
        ({"rate": "0"}, "rate is '0'"),
        ({"endpoint": "grpc"}, "endpoint is 'grpc'"),
        ({"endpoint": "v2"}, "needs --model"),
        ({"endpoint": "v2", "model": "m", "slo": "ttft=1s"}, "does not stream"),
        ({"warmup": 30.0}, "less than the duration"),
        ({"until_stable": 11.0}, "a third of the duration"),
        ({"prompt_tokens": "9-3"}, "the number of tokens is '9-3'"),
        ({"speed": 0.0}, "speed is 0"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_a_bad_option_is_one_sentence(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoadConfig(**given)  # type: ignore[arg-type]


def test_stages_are_what_was_asked_for() -> None:
    assert [stage.concurrency for stage in stages(LoadConfig(concurrency="1,2,8"))] == [1, 2, 8]
    (stage,) = stages(LoadConfig(rate="10", arrivals="constant", limit=3, prompt_tokens="5-9"))
    planned = list(stage.planned)
    assert [one.at_s for one in planned] == pytest.approx([0, 0.1, 0.2])
    assert all(5 <= one.prompt_tokens <= 9 for one in planned)
