"""`tilewright optimize`: the report of a user's model as text, JSON and a file, and what is said where it cannot be."""

import json
import sys
from pathlib import Path

import pytest

from tests.test_cli import tilewright

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)), (torch.randn(3, 16),)

def huge():
    model, inputs = build()
    model[0].weight.data *= 1e6
    return model, inputs

def branches():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Branch(), (torch.randn(3),)

def wrong():
    return 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return tmp_path


def test_the_report(here: Path) -> None:
    said = tilewright("optimize", "users_model:build", "--device", "cpu", "--precision", "fp32", "--out", "r.json")
    assert said.returncode == 0, said.stderr
    assert "activation relu" in said.stdout
    assert "RMS error" in said.stdout
    assert "B saved" in said.stdout
    report = json.loads((here / "r.json").read_text())
    assert report["facts"]["precision"] == "fp32"
    assert [d["kind"] for d in report["decisions"] if d["taken"]] == ["activation"]
    assert report["error"]["outputs"][0]["rms"] < 1e-6
    again = tilewright("optimize", "users_model:build", "--device", "cpu", "--precision", "fp32", "--json")
    found = json.loads(again.stdout)
    assert found["decisions"] == report["decisions"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("users_model:build --precision fp12", "--precision is 'fp12', wanted one of fp32, fp16, bf16, int8"),
        ("users_model:build --out nowhere/r.json", "--out is nowhere/r.json, wanted a file in an existing folder"),
        ("users_model:build --device tpu", "--device is 'tpu', but this machine has"),
        ("users_model:build --device cpu --tolerance -1", "tolerance is -1.0; wanted a finite number of at least 0"),
        ("users_model:build --device cpu --tune", "tune=True only for a GPU"),
        ("users_model:gone --device cpu", "has no attribute 'gone'"),
        ("nobodys_model:build --device cpu", "No module named 'nobodys_model'"),
        ("users_model:wrong --device cpu", "wanted"),
        ("resnet51 --device cpu", "no model 'resnet51'; wanted one of"),
        ("resnet50@zero --device cpu", "the batch of 'resnet50@zero' is 'zero'"),
        ("users_model:huge --device cpu --precision fp16", "The guilty layer is 0: 96 of 96 values are NaN, but finite"),
        ("users_model:branches --device cpu", "users_model.py"),
    ],
)
def test_what_is_refused_is_one_line(here: Path, arguments: str, words: str) -> None:
    said = tilewright("optimize", *arguments.split())
    assert said.returncode == 1
    line = said.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert words in line
    assert "Traceback" not in said.stderr
