"""`optimize` on models of other people (zoo_models.py), small: the right numbers for the example's sizes and for another batch.

The full models are `long`; `python -m tests.fuse.zoo` makes the table of docs/optimize_models.md from them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuse import zoo
from tests.fuse.zoo_models import MODELS, missing
from tests.fuse.zoo_row import built, checked, flops, inputs, one_by_one, taken, times

QUICK = ("densenet121", "gpt2", "torch_encoder")
"""Of one package each, and different in what they ask for; seconds each."""


def _here(name: str) -> str:
    if reason := missing(name):
        pytest.skip(reason)
    return name


def _right(name: str, small: bool) -> None:
    model, given = built(name, small), inputs(name, 2, small)
    fast = one_by_one(model, given)
    for batch in (2, 3):
        row = checked(name, batch, fast, model, small)
        assert (row["right"], row.get("runs")) == ("right", "optimised")


@pytest.mark.parametrize("name", QUICK)
def test_small(name: str) -> None:
    _right(_here(name), small=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in QUICK])
def test_small_of_all(name: str) -> None:
    _right(_here(name), small=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
def test_full(name: str) -> None:
    _right(_here(name), small=False)


# ---- the tools


def test_sixteen_models_by_known_packages() -> None:
    assert len(MODELS) == 16
    assert {entry.package for entry in MODELS.values()} == {"timm", "transformers", ""}


def test_a_wrong_model_is_found() -> None:
    model = built("lstm", True)

    def fast(*args: Any) -> Any:
        return model(*args) * (1.001 if len(args[0]) == 2 else 1.0)

    assert checked("lstm", 2, fast, model, True)["right"].startswith("wrong: RMS error 1.0e-03")
    assert checked("lstm", 3, fast, model, True)["right"] == "right"


def test_flops_of_torch_and_of_ours() -> None:
    """A product of torch's is counted, the same one by an operator of ours is not."""
    layer = torch.nn.Linear(8, 4)
    assert flops(lambda: layer(torch.randn(3, 8))) == 2 * 3 * 8 * 4
    model, given = torch.nn.Sequential(layer).eval(), ((torch.randn(3, 8),), {})
    row = taken(one_by_one(model, given), model, given)
    assert (row["flops_ours"], row["launches"], row["launches_ours"]) == (1.0, 1, 1)


def test_flops_behind_opaque_calls() -> None:
    """torch's fused encoder layer and its LSTM are single calls to the counter."""
    for layer in (
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(),
        torch.nn.LSTM(16, 16, batch_first=True),
    ):
        assert flops(lambda layer=layer: layer(torch.randn(1, 4, 16))) > 2 * 4 * 16 * 16


def test_times_are_of_the_calls() -> None:
    found = times({"a": lambda: sum(range(1000)), "b": lambda: sum(range(100_000))}, gpu=False, seconds=0.05)
    assert 5 < found["b"] / found["a"] < 2000


def test_rows_are_kept_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[tuple[str, int]]()

    class Fake:
        def __init__(self, name: str, batch: int, device: str, compiled: bool, search: bool):
            made.append((name, batch))
            self.row = {"model": name, "batch": batch, "right": "right", "other_batch": "right"}

        def measure(self) -> dict[str, Any]:
            return self.row

    monkeypatch.setattr(zoo, "Prepared", Fake)
    out = tmp_path / "rows.json"
    assert zoo.main(["--out", str(out), "--models", "lstm,unet", "--batch", "1,2"]) == 0
    assert zoo.main(["--out", str(out), "--models", "lstm,tab_transformer", "--batch", "1"]) == 0
    assert made == [("lstm", 1), ("unet", 1), ("lstm", 2), ("unet", 2), ("tab_transformer", 1)]
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["batch"]) for row in rows] == [
        ("unet", 1), ("unet", 2), ("lstm", 1), ("lstm", 2), ("tab_transformer", 1),
    ]  # fmt: skip
    assert "no model is called" in _refused(capsys, ["--out", str(out), "--models", "resnet"])


def _refused(capsys: pytest.CaptureFixture[str], given: list[str]) -> str:
    with pytest.raises(SystemExit):
        zoo.main(given)
    return capsys.readouterr().err
