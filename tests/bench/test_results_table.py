"""The tables of figures: of one card and one commit each, dated, with a mark where kernels have changed since."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.asm.test_scripts import script
from tilewright.bench.provenance import _now
from tilewright.bench.results import part

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
OLD = {
    "date": "2026-11-21T10:00:00+00:00",
    "device": H100,
    "driver": "1.0",
    "torch": "2.11",
    "triton": "3.6.0",
    "ptxas": "12.8",
}
NEW = OLD | {
    "date": "2026-11-24T10:00:00+00:00", "device": H200, "commit": "a" * 40, "dirty": False, "source": "1" * 16,
    "command": "tilewright bench softmax --out /tmp/x/softmax.json --resume",
}  # fmt: skip
KERNELS = {"softmax/triton": _now()["softmax/triton"]}
STALE = {"softmax/triton": "0" * 16}


def row(dims: str, us: float, **more: Any) -> dict[str, Any]:
    return {
        "op": "softmax", "dims": dims, "impl": "triton", "us": us, "tb_per_s": 1.0, "tflop_per_s": 2.0, "against": "torch",
        "their_us": 2 * us, "ratio": 2.0, **more,
    }  # fmt: skip


def copied(**more: Any) -> dict[str, Any]:
    return {"op": "softmax", "shape": "8192x4096", "bytes": 1 << 27, "of_copy": 0.9, "tb_per_s": 2.5, **more}


def layer(rows: int, ratio: float, **more: Any) -> dict[str, Any]:
    return {"format": "int4", "M": rows, "N": 64, "K": 64, "ratio": ratio, **more}


@pytest.fixture
def table() -> Any:
    return script("results_table")


def write(folder: Path, name: str, environment: dict[str, Any], *rows: dict[str, Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"what": "a set", "environment": environment, **more, "rows": rows}))
    return path


@pytest.fixture
def cards(tmp_path: Path, table: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An older set of one card, and one of another that names its code."""
    for folder, environment, us, more in (("h100", OLD, 111.0, {}), ("h200", NEW, 333.0, {"kernels": KERNELS})):
        write(tmp_path / folder, "ops", environment, copied(**more))
        write(tmp_path / folder, "softmax", environment, row("M=4 N=8", us, **more))
        write(tmp_path / folder, "layers", environment, layer(16, 2.0, **more), layer(512, 0.8, **more))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return tmp_path


def texts(table: Any) -> dict[str, str]:
    return {path.name: text for path, text in table.wanted().items()}


def test_the_newest_set_that_names_its_code_is_shown_and_every_card_has_a_page(table: Any, cards: Path) -> None:
    found = texts(table)
    assert set(found) == {"results.md", "results-h100.md", "support.md", "speed.json"}
    assert f"One {H200}" in found["results.md"]
    assert H100 not in found["results.md"]
    assert "333.0" in found["results.md"]
    assert "111.0" not in found["results.md"]
    assert "| format | problem |" not in found["results.md"], "what was not measured has no table"
    assert "[h100](results-h100.md)" in found["results.md"]
    assert "111.0" in found["results-h100.md"]
    assert "333.0" not in found["results-h100.md"]
    assert json.loads(found["speed.json"]) == {
        "card": H200, "measured": "2026-11-24", "ratios": {"int4": {"16": 2.0, "512": 0.8}},
    }  # fmt: skip


def test_date_commit_and_command_are_printed(table: Any, cards: Path) -> None:
    text = texts(table)["results.md"]
    assert f"Measured 2026-11-24, commit {'a' * 12}." in text
    assert "    tilewright bench softmax --out benchmarks/results/h200/softmax.json\n" in text
    assert "| softmax | torch | 1 | triton 1 | 2.000 | 2.00 (M=4 N=8) | 2026-11-24 |" in text
    assert "†" not in text
    assert "‡" not in text


def test_files_that_do_not_name_their_kernels_say_so(table: Any, cards: Path) -> None:
    text = texts(table)["results-h100.md"]
    assert "| 2026-11-21† |" in text
    assert "† The file names neither its commit nor its kernels" in text
    assert "commits not recorded" in text


def test_rows_whose_kernels_have_changed_are_marked(table: Any, cards: Path) -> None:
    write(cards / "h200", "softmax", NEW, row("M=4 N=8", 222.0, kernels=KERNELS), row("M=5 N=8", 333.0, kernels=STALE))
    write(cards / "h200", "layers", NEW, layer(16, 2.0, kernels=KERNELS), layer(512, 0.8, kernels=STALE))
    text = texts(table)["results.md"]
    changed, same = (next(line for line in text.splitlines() if line.startswith(f"| M={m} N=8")) for m in (5, 4))
    assert "2.000‡" in changed
    assert "‡" not in same
    assert "2026-11-24‡" in next(line for line in text.splitlines() if line.startswith("| softmax | torch"))
    assert "| int4 | 2.00 (2.00; 1) | 0.80 (0.80; 1)‡ |" in text
    assert "‡ Kernels of this row have changed since it was measured." in text


def test_a_dirty_tree_is_named(table: Any, cards: Path) -> None:
    for path in (cards / "h200").glob("*.json"):
        content = json.loads(path.read_text())
        content["environment"]["dirty"] = True
        path.write_text(json.dumps(content))
    assert "with changes that are not committed" in texts(table)["results.md"]


@pytest.mark.parametrize(
    ("what", "value"),
    [("commit", "b" * 40), ("commit", None), ("device", H100), ("driver", "2.0"), ("source", "2" * 16), ("dirty", True)],
)
@pytest.mark.parametrize("name", ["softmax", "compare-resnet50-eager"])
def test_nothing_is_made_of_two_cards_or_commits(name: str, what: str, value: Any, table: Any, cards: Path) -> None:
    write(cards / "h200", name, NEW | {what: value}, row("M=4 N=8", 1.0, kernels=KERNELS))
    with pytest.raises(SystemExit, match=f"h200 is of more than one {what}"):
        texts(table)


def test_two_cards_in_an_old_folder_are_refused_too(table: Any, cards: Path) -> None:
    write(cards / "h100", "softmax", OLD | {"device": H200}, row("M=4 N=8", 1.0))
    with pytest.raises(SystemExit, match="h100 is of more than one device"):
        texts(table)


def test_parts_are_one_table_and_are_counted(table: Any, cards: Path) -> None:
    path = write(cards / "h200", "softmax", NEW, row("M=4 N=8", 1.0, kernels=KERNELS), incomplete=True)
    with pytest.raises(SystemExit, match=r"h200: softmax\.json is incomplete"):
        texts(table)
    second = write(cards / "h200", "second", NEW, row("M=5 N=8", 1.0, kernels=KERNELS))
    second.rename(part(path, 2))
    text = texts(table)["results.md"]
    assert "| softmax | torch | 2 |" in text
    assert "softmax.json: measured 2026-11-24, by 2 processes" in text
    write(cards / "h200", "softmax.2", NEW | {"driver": "3.0"}, row("M=5 N=8", 1.0, kernels=KERNELS))
    with pytest.raises(SystemExit, match=r"softmax\.2\.json has driver 3\.0"):
        texts(table)


def test_comparisons_with_an_open_card_have_a_table_of_their_own(table: Any, cards: Path) -> None:
    side = {"engine": "optimize:fp16", "whole": [1e-3, 1e-3, 1e-3]}
    for name, fair in (("fair", True), ("unfair", False)):
        point = {"name": "drift", "why": "One side became slower.", "open": not fair}
        content = {
            "model": f"{name}_model", "fair": fair, "ratio": [2.0, 1.9, 2.1], "segments": [], "ours": side, "baseline": side,
            "card": [point], "environment": NEW,
        }  # fmt: skip
        (cards / "h200" / f"compare-{name}.json").write_text(json.dumps(content))
    closed, _, opened = texts(table)["results.md"].partition("Open on their fairness card")
    assert "| fair_model |" in closed
    assert "unfair_model" not in closed
    assert "drift: One side became slower." in next(line for line in opened.splitlines() if line.startswith("| unfair_model"))


def test_claims_stand_in_their_order_with_what_is_equal(table: Any, cards: Path) -> None:
    side = {"engine": "optimize:fp16", "whole": [1e-3, 1e-3, 1e-3]}
    claims = [
        {"engine": "graph:fp16", "words": "equal precision and launch mode", "seconds": [2e-3] * 3, "ratio": [2.0, 1.9, 2.1]},
        {"engine": "eager", "words": "not equal: fp32 beside fp16", "seconds": [9e-3] * 3, "ratio": [9.0, 8.9, 9.1]},
    ]
    segments = [{"ratio": [3.0, 2.5, 3.5]}, {"ratio": [4.0, 3.5, 4.5]}]
    content = {
        "model": "a_model", "fair": True, "ratio": [9.0, 8.9, 9.1], "segments": segments, "ours": side,
        "baseline": {"engine": "eager", "whole": [9e-3] * 3}, "card": [], "claims": claims, "environment": NEW,
    }  # fmt: skip
    (cards / "h200" / "compare-it.json").write_text(json.dumps(content))
    assert [line for line in texts(table)["results.md"].splitlines() if line.startswith("| a_model")] == [
        "| a_model | optimize:fp16 | graph:fp16 | equal precision and launch mode | 1.000 | 2.000 | 2.00 (1.90 to 2.10) |  "
        "| 2026-11-24 |",
        "| a_model | optimize:fp16 | eager | not equal: fp32 beside fp16 | 1.000 | 9.000 | 9.00 (8.90 to 9.10) | 2, 2.50 "
        "| 2026-11-24 |",
    ]
