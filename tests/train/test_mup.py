"""muP: its factors, and what they are for: movement that does not depend on the width, and one learning rate for all widths."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.models import ModelConfig
from tilewright.train.config import TrainConfig
from tilewright.train.lab.coordinates import CoordinatesConfig, coordinate_check, final_losses
from tilewright.train.mup import mup_for
from tilewright.train.setup import build_model, build_optimizer


def shape(width: int, *, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=200,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        head_dim=16,
        max_position_embeddings=64,
        windows=(None, None),
        tie_word_embeddings=tied,
    )


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setattr("tilewright.train.setup.model_config", lambda config: shape(256))
    return TrainConfig(model="any", init="random", dtype="float32", weight_decay=0.1, mup_base=64)


def test_weights_rates_and_decay_follow_the_table(config: TrainConfig) -> None:
    device = torch.device("cpu")
    usual, model = (build_model(each, device) for each in (replace(config, mup_base=None), config))
    m, before = 4.0, dict(usual.named_parameters())
    optimizer = build_optimizer(config, model)
    rates = dict(zip(optimizer.names, optimizer.rates.tolist()))  # pyright: ignore[reportAttributeAccessIssue]
    seen = set()
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2
        kind = (
            "embedding" if name.startswith("embed.") else "head" if name == "head.weight" else "matrix" if matrix else "vector"
        )
        seen.add(kind)
        factor = {"embedding": 1.0, "head": 0.0, "matrix": 1 / math.sqrt(m), "vector": 1.0}[kind]
        torch.testing.assert_close(parameter, before[name] * factor)
        rate, decay = rates[name]
        assert rate == pytest.approx({"embedding": 1.0, "head": 1 / m, "matrix": 1 / m, "vector": 1.0}[kind])
        assert rate * decay == pytest.approx(0.1 if matrix else 0.0)
    assert seen == {"embedding", "head", "matrix", "vector"}


def test_at_the_base_width_only_the_head_is_another(config: TrainConfig) -> None:
    both = [build_model(each, torch.device("cpu")) for each in (replace(config, mup_base=None), replace(config, mup_base=256))]
    for (name, a), b in zip(both[0].named_parameters(), both[1].parameters()):
        assert torch.equal(a, b) or name == "head.weight"
    assert not both[1].head.weight.any()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("tied", "optimizer", "words"),
    [(True, "adamw", "needs a separate head"), (False, "muon", "optimizer is muon"), (False, "sgd", "optimizer is sgd")],
)
def test_what_the_rules_do_not_cover_is_refused(tied: bool, optimizer: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mup_for(shape(64, tied=tied), 64, optimizer)
    assert mup_for(shape(64), 64, "adamw-8bit").m == 1.0


def test_bad_numbers_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="mup_base is 0"):
        TrainConfig(mup_base=0)
    for change, words in (({"widths": (64,)}, "all must be multiples of 16"), ({"lr": math.nan}, "lr is nan")):
        with pytest.raises(ValueError, match=words):
            CoordinatesConfig(mup=True, **change)


def test_the_command_shows_that_only_the_usual_rules_depend_on_the_width(tmp_path: Path) -> None:
    arguments = ["lab", "coordinate-check", "--widths", "32,64,128,256", "--base", "32", "--seeds", "2", "--json"]
    if_drawn = ["--svg", str(tmp_path / "a.svg"), "--out", str(tmp_path / "a.json")]
    result = CliRunner().invoke(app, [*arguments, *if_drawn], prog_name="tilewright")
    assert result.exit_code == 0, result.stderr
    mup, usual = json.loads(result.stdout)
    assert mup["config"]["mup"]
    assert all(abs(slope) < 0.15 for slope in mup["slopes"].values()), mup["slopes"]
    assert all(slope > 0.3 for place, slope in usual["slopes"].items() if place != "embedding"), usual["slopes"]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "a.json").read_text())[0]["slopes"] == mup["slopes"]
    bad = CliRunner().invoke(app, ["lab", "coordinate-check", "--widths", "a"], prog_name="tilewright")
    assert bad.exit_code == 1
    assert "--widths is 'a'" in bad.stderr


@pytest.mark.long
def test_movement_over_eight_times_the_width() -> None:
    mup, usual = (coordinate_check(CoordinatesConfig(mup=each)).slopes() for each in (True, False))
    print("muP", mup, "usual", usual)
    assert all(abs(slope) <= 0.05 for slope in mup.values())
    assert all(slope > 0.3 for place, slope in usual.items() if place != "embedding")


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_the_best_learning_rate_stays_where_it_is() -> None:
    """Within one step of 2 over 8 times the width under muP; without it the widest model wants another one."""
    rates = [2.0**-k for k in range(11, 2, -1)]
    best = {}
    for mup in (True, False):
        found = final_losses(CoordinatesConfig(mup=mup, steps=80, seeds=1), rates)
        print(mup, found)
        best[mup] = [losses.index(min(losses)) for losses in found.values()]
    assert max(best[True]) - min(best[True]) <= 1
    assert max(best[False]) - min(best[False]) > 1
