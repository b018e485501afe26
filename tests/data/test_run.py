"""Whole runs: the same output however they are cut, how often they are killed, whoever runs them; bad input in one sentence."""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import Result
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from tests.data.sets import WORDS, prose
from tilewright.cli import app
from tilewright.data.diff import compare, lines
from tilewright.data.recipe import Recipe, load
from tilewright.data.report import table, write_html
from tilewright.data.run import RunResult, _pool, run
from tilewright.data.shards import TokenShards

STEPS = """
[[step]]
use = "exact-documents"
[[step]]
use = "gopher-quality"
min_words = 10
[[step]]
use = "exact-lines"
[[step]]
use = "near-duplicates"
[[step]]
use = "pii"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over three files with copies, near copies and addresses, two sources of different weight, and a tokenizer."""
    root = tmp_path_factory.mktemp("recipe")
    draw = random.Random(0)
    texts = [prose(draw, draw.randint(5, 200)) for _ in range(150)]
    for _ in range(100):
        copy = draw.choice(texts).split(" ")
        copy[draw.randrange(len(copy))] = draw.choice(["other", "mail me at jo@site.org", "now"])
        texts.append(" ".join(copy))
    draw.shuffle(texts)
    for number in range(3):
        rows = [json.dumps({"text": text, "n": i}) for i, text in enumerate(texts[number::3])]
        (root / f"part-{number}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    vocabulary = {word: i for i, word in enumerate(["<end>", "<unk>", *dict.fromkeys(WORDS), *".,!?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "tokenizer.json"))
    head = '[[input]]\npaths = ["part-[01].jsonl"]\nname = "a"\nweight = 1.5\n[[input]]\npaths = ["part-2.jsonl"]\nname = "b"\n'
    tail = '[tokens]\ntokenizer = "tokenizer.json"\nend_of_text = "<end>"\nshard_tokens = 4000\n'
    (root / "recipe.toml").write_text("seed = 3\n" + head + STEPS + tail)
    return root / "recipe.toml"


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The output of one process that nobody disturbed."""
    return run(load(recipe), tmp_path_factory.mktemp("whole") / "out", processes=1)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.data.run._SHARE", 1 << 18)  # 4 GB / 2**18: chunks of 16 KB


def content(folder: Path) -> list[bytes]:
    return [line for path in sorted((folder / "documents").iterdir()) for line in path.read_bytes().splitlines()]


def test_the_output(whole: RunResult) -> None:
    rows = [json.loads(line) for line in content(whole.folder)]
    assert 60 < len(rows) < 200
    assert all(row["origin"]["file"].endswith(".jsonl") for row in rows)
    assert [step["step"] for step in rows[0]["steps"]] == [
        "exact-documents", "gopher-quality", "exact-lines", "near-duplicates", "pii",
    ]  # fmt: skip
    assert sum("[EMAIL]" in row["text"] for row in rows) == sum(row["steps"][-1].get("email", 0) > 0 for row in rows) > 0
    assert not any("jo@site.org" in row["text"] for row in rows)
    steps = whole.report["steps"]
    assert all(a["documents_out"] == b["documents_in"] for a, b in itertools.pairwise(steps))
    assert all(step["documents_in"] - step["documents_out"] == sum(step["reasons"].values()) for step in steps)
    assert steps[-1]["documents_out"] == len(rows)
    assert sorted(path.name for path in whole.folder.iterdir()) == [".lock", "documents", "report.json", "tokens"]


def test_an_output_document_is_found_again_by_its_origin(whole: RunResult) -> None:
    for line in content(whole.folder)[:20]:
        row = json.loads(line)
        with open(row["origin"]["file"], "rb") as file:
            file.seek(row["origin"]["offset"])
            assert json.loads(file.readline())["n"] == row["metadata"]["n"]


def test_chunks_and_processes_change_nothing(
    recipe: Path, whole: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    other = run(load(recipe), tmp_path / "out", processes=2)
    assert other.sha256 == whole.sha256
    assert content(other.folder) == content(whole.folder)
    assert other.report["tokens"] == whole.report["tokens"]
    counts = ("documents_in", "documents_out", "bytes_out", "reasons", "examples", "notes", "lengths")
    for ours, theirs in zip(other.report["steps"], whole.report["steps"], strict=True):
        assert {key: ours[key] for key in counts} == {key: theirs[key] for key in counts}


@pytest.mark.long
def test_ray_changes_nothing(recipe: Path, whole: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install 'tilewright[ray]'")
    small_chunks(monkeypatch)
    assert run(load(recipe), tmp_path / "out", processes=2, executor="ray").sha256 == whole.sha256


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("", {"address": "local", "num_cpus": 3, "include_dashboard": False}),
        ("ray://head:10001", {"address": "ray://head:10001"}),
    ],
)
def test_a_ray_cluster_is_not_told_its_processors(monkeypatch: pytest.MonkeyPatch, address: str, wanted: dict) -> None:
    calls: list[dict] = []
    ray = SimpleNamespace(init=lambda **settings: calls.append(settings), shutdown=lambda: None)
    monkeypatch.setattr("tilewright.data.run.needed", lambda *names: ray)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with _pool(3, "ray"):
        pass
    assert calls == [{**wanted, "log_to_driver": False, "ignore_reinit_error": True}]


KILLED = """
import os, signal, sys
from pathlib import Path
from tilewright.data import run as module, tasks
from tilewright.data.recipe import load
module._SHARE = 1 << 18
left = int(sys.argv[3])
original = os.replace
def counted(self, target):  # dies in the middle of a task, just before or after a file takes its name
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(self, target)
    return result
Path.replace = counted
module.run(load(Path(sys.argv[1])), Path(sys.argv[2]), processes=1)
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_killed_runs_go_on(recipe: Path, whole: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    kills = 0
    for _ in range(2 if seed == 0 else 5):
        command = [sys.executable, "-c", KILLED, str(recipe), str(tmp_path / "out"), str(draw.randint(2, 120))]
        kills += subprocess.run(command, check=False, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert kills
    small_chunks(monkeypatch)
    found = run(load(recipe), tmp_path / "out", processes=1)
    assert found.sha256 == whole.sha256
    assert found.report["tokens"] == whole.report["tokens"]
    assert [s["documents_out"] for s in found.report["steps"]] == [s["documents_out"] for s in whole.report["steps"]]


def group_cpu_s(group: int) -> float:
    """Processor time of a process group: how far it has come, however busy the machine is."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(6))
def test_the_command_killed_from_outside_goes_on(recipe: Path, whole: RunResult, tmp_path: Path, seed: int) -> None:
    """The whole process group is killed after a random share of its work, until a run comes to its end."""
    draw = random.Random(seed)
    command = [sys.executable, "-m", "tilewright.cli", "data", "clean", str(recipe), "--out", str(tmp_path / "out")]
    kills = 0
    while True:
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        allowed_s = draw.uniform(0.5, 5) if kills < 8 else math.inf
        while process.poll() is None and group_cpu_s(process.pid) < allowed_s:
            time.sleep(0.2)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        time.sleep(0.2)
    assert process.returncode == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["sha256"] == whole.sha256


def test_token_shards(whole: RunResult, recipe: Path) -> None:
    shards = TokenShards(whole.folder / "tokens")
    tokenizer = Tokenizer.from_file(str(recipe.parent / "tokenizer.json"))
    texts = {}
    for line in content(whole.folder):
        row = json.loads(line)
        texts[row["id"]] = (row["origin"]["input"], [*tokenizer.encode(row["text"]).ids, 0])
    tokens, ends = shards.tokens(0, len(shards)), shards.ends(0, len(shards))
    assert len(shards.meta["shards"]) > 3
    assert tokens.dtype == np.uint16
    found = [tuple(part.tolist()) for part in np.split(tokens, ends[:-1])]
    want: dict[tuple[int, ...], list[int]] = {}
    for source, ids in texts.values():
        want.setdefault(tuple(ids), []).append(source)
    assert set(found) == set(want)
    once = [found.count(ids) for ids, sources in want.items() if sources == [1]]
    more = [found.count(ids) for ids, sources in want.items() if sources == [0]]
    assert set(once) == {1}
    assert set(more) == {1, 2}
    assert 0.3 < np.mean([count == 2 for count in more]) < 0.7
    draw = random.Random(0)
    for _ in range(50):
        start, stop = sorted(draw.randrange(len(shards) + 2) for _ in range(2))
        assert np.array_equal(shards.tokens(start, stop), tokens[start:stop])
        assert np.array_equal(shards.ends(start, stop), ends[(ends > start) & (ends <= stop)])


def test_shards_that_are_none(whole: RunResult, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a folder of token shards"):
        TokenShards(tmp_path)
    for path in (whole.folder / "tokens").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    np.save(tmp_path / "shard-00001.npy", np.zeros(3, np.uint16))
    with pytest.raises(ValueError, match=r"shard-00001\.npy does not have the size that meta\.json gives"):
        TokenShards(tmp_path)


def test_a_finished_run_is_not_run_again(recipe: Path, whole: RunResult) -> None:
    said: list[str] = []
    assert run(load(recipe), whole.folder, processes=1, say=said.append).sha256 == whole.sha256
    assert not said


def test_reports(whole: RunResult, tmp_path: Path) -> None:
    assert "near duplicate" in table(whole.report)
    report = json.loads(json.dumps(whole.report))
    report["steps"][4]["examples"]["near duplicate"] = [["0", "id", "<script>alert(1)</script>", "", "x"]]
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "http" not in page.replace(report["steps"][0]["examples"]["kept"][0][4], "").split("<body>")[0]
    for step in whole.report["steps"]:
        assert all(reason in page for reason in step["reasons"])


def test_diff(recipe: Path, whole: RunResult, tmp_path: Path) -> None:
    changed = recipe.with_name("changed.toml")
    changed.write_text(recipe.read_text().replace("min_words = 10", "min_words = 60"))
    other = run(load(changed), tmp_path / "out", processes=1)
    found = compare(whole.folder, other.folder)
    assert found["recipe"] == [["step[1].min_words", 10, 60]]
    assert found["documents"] == [len(content(whole.folder)), len(content(other.folder))]
    assert (
        found["documents"][0] - found["only before, count"]
        == found["in both"]
        == found["documents"][1] - found["only after, count"]
    )
    assert found["only before, count"] > 0
    assert any("too few words" in line for line in lines(found))
    with pytest.raises(ValueError, match=r"has no report\.json"):
        compare(tmp_path, whole.folder)


def test_the_commands(recipe: Path, whole: RunResult, tmp_path: Path) -> None:
    def call(*words: str) -> Result:
        return CliRunner().invoke(app, ["data", *words])

    out = str(tmp_path / "out")
    done = call("clean", str(recipe), "--out", out, "--processes", "1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["sha256"] == whole.sha256
    assert (tmp_path / "out" / "report.html").is_file()
    again = call("clean", str(recipe), "--out", out)
    assert whole.sha256 in again.stdout
    assert json.loads(call("diff", out, str(whole.folder), "--json").stdout)["same text"] == len(content(whole.folder))
    assert "kept by both" in call("diff", out, str(whole.folder)).stdout
    texts = str(recipe.parent / "part-0.jsonl")
    trained = call("train-quality", "--good", texts, "--bad", texts, "--out", str(tmp_path / "m.safetensors"))
    assert set(json.loads(trained.stdout)) == {"good", "bad", "held out", "accuracy", "roc auc"}
    wrong = call("clean", str(tmp_path / "none.toml"), "--out", out)
    assert wrong.exit_code == 1
    assert wrong.stderr.count("\n") == 1
    assert wrong.stderr.startswith("error: ")


BAD = [
    ("input = 3", "input: input should be a valid tuple"),
    ("not toml", "is not valid TOML"),
    ("", "input: field required"),
    ('[[input]]\npaths = ["nothing-*.jsonl"]', "no such file"),
    ('[[input]]\npaths = ["part-0.jsonl"]\nformat = "pdf"', "format is 'pdf', wanted one of html, jsonl"),
    ('[[input]]\npaths = ["part-0.jsonl", "part-*.jsonl"]', "named twice"),
    ('[[input]]\npaths = ["part-0.jsonl"]\ncolour = 1', "colour: extra inputs are not permitted"),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "nonsense"', "use = 'nonsense', wanted one of extract, language"),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "c4"\nmax = 1', "has no setting 'max'; its settings are line_ends"),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "decontaminate"', "missing 1 required keyword-only argument"),
    (
        '[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "decontaminate"\nevaluation = "x"',
        "evaluation .*x: there is no such file",
    ),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "decontaminate"\nevaluation = 5', "is 5, wanted the path of a file"),
    (
        '[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "decontaminate"\nevaluation = "part-1.jsonl"\nwords = 0',
        "words is 0 and min_words is 7; both must be at least 1",
    ),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "c4"\nmin_sentences = "5"', "min_sentences is '5', wanted a number"),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "c4"\nline_words = "ad"', "wanted a list of strings"),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "language"\nkeep = ["xx"]', "keep contains 'xx'"),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[[step]]\nuse = "pii"\nkinds = ["name"]', "kinds contains 'name'"),
    ('[[input]]\npaths = ["part-0.jsonl"]\n[tokens]\ntokenizer = "none.json"', "none.json: there is no such file"),
    (
        '[[input]]\npaths = ["part-0.jsonl"]\n[tokens]\ntokenizer = "tokenizer.json"\nend_of_text = "<eos>"',
        "has no token '<eos>'",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_recipes(recipe: Path, tmp_path: Path, text: str, message: str) -> None:
    path = recipe.with_name("bad.toml")
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        run(load(path), tmp_path / "out", processes=1)
    assert "\n" not in str(caught.value).strip()
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("documents/*"))


def test_a_folder_that_belongs_to_others(recipe: Path, whole: RunResult, tmp_path: Path) -> None:
    values = load(recipe).model_dump()
    with pytest.raises(ValueError, match="contains the output of another recipe"):
        run(Recipe(**{**values, "seed": 4}), whole.folder, processes=1)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty \(it contains thesis\.txt\)"):
        run(load(recipe), tmp_path, processes=1)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="wanted at least one process, and 512 MB for each"):
        run(load(recipe), tmp_path, processes=4, memory_bytes=1 << 30)
    with pytest.raises(ValueError, match="executor is 'dask', wanted one of local, ray"):
        run(load(recipe), tmp_path, executor="dask")


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "crawl [2024]*"
    folder.mkdir()
    (folder / "part-0.jsonl").write_text('{"text": "found"}\n')
    (folder / "recipe.toml").write_text('[[input]]\npaths = ["part-*.jsonl"]\n')
    assert [path for path, _, _ in load(folder / "recipe.toml").files()] == [folder / "part-0.jsonl"]


def test_numbers_that_json_does_not_have_are_no_metadata(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "kept", "a": NaN, "b": -Infinity, "c": 0.5}\n')
    (tmp_path / "recipe.toml").write_text('[[input]]\npaths = ["in.jsonl"]\n')
    run(load(tmp_path / "recipe.toml"), tmp_path / "out", processes=1)
    (line,) = (tmp_path / "out" / "documents" / "00000.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["metadata"] == {"c": 0.5}
