"""The report says by measured figures where a format is slower than bf16, and for which steps."""

import json

import pytest
import torch
from torch import nn

import tilewright as tw
from tests.source import ROOT
from tilewright.ops.weights import WEIGHT_FORMATS
from tilewright.quant import speed
from tilewright.quant.speed import Speed, speed_of, speed_text


def report(format: str) -> tw.quant.report.Report:
    torch.manual_seed(0)
    return tw.quantize(nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128)), format)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_every_format_has_figures_and_slower_ones_say_so(format: str) -> None:
    found = speed_of(format)
    assert found is not None
    told = speed_text(format)
    assert found.card in told
    assert found.measured in told
    for rows, ratio in found.ratios.items():
        assert f"{rows}: {ratio:.2f}" in told
    assert ("is slower than bf16" in told) == (min(found.ratios.values()) < 1)


def test_the_report_has_it_in_words_and_as_data() -> None:
    told = report("int4")
    assert speed_text("int4") in str(told)
    plain = json.loads(json.dumps(told.to_json()))
    found = speed_of("int4")
    assert found is not None
    assert plain["speed"]["card"] == found.card
    assert plain["speed"]["ratios"] == {str(rows): ratio for rows, ratio in found.ratios.items()}


def test_words(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        "int4": Speed("a card", "2026-01-02", {1: 2.5, 256: 0.9, 1024: 0.8, 8192: 1.1}),
        "int8": Speed("a card", "2026-01-02", {1: 1.8, 256: 1.5, 1024: 1.4, 8192: 1.3}),
    }
    monkeypatch.setattr(speed, "speed_of", figures.get)
    told = speed_text("int4").splitlines()
    assert told[0].endswith("measured on a card, 2026-01-02: 1: 2.50, 256: 0.90, 1024: 0.80, 8192: 1.10")
    assert told[1].startswith(
        "at 256 to 1024 rows (prompts, large batches) int4 is slower than bf16, down to 0.80 times its speed"
    )
    assert told[2] == "if such steps dominate, use int8, which is at least 1.40 times as fast as bf16 there"
    assert len(speed_text("int8").splitlines()) == 1
    assert speed_text("mxfp8") == ""


def test_the_figures_are_those_of_the_published_table() -> None:
    """Of one row of docs/results.md each; `results_table.py --check` holds both to the result file."""
    table = (ROOT / "docs/results.md").read_text()
    for format in WEIGHT_FORMATS:
        found = speed_of(format)
        assert found is not None
        line = next(line for line in table.splitlines() if line.startswith(f"| {format} | "))
        cells = [float(cell.split()[0]) for cell in line.split("|")[2:-1] if cell.strip()]
        assert cells == list(found.ratios.values())
