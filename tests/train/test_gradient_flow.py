"""What theory says of gradients and activations at initialisation, by where the norms stand; and the command."""

import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.train.lab.chart import specification, svg
from tilewright.train.lab.gradient_flow import FlowConfig, Snapshot, gradient_flow

DEPTHS = (6, 12, 24, 48)


@lru_cache
def start(norm: str, layers: int, seed: int = 0) -> Snapshot:
    return gradient_flow(FlowConfig(norm=norm, layers=layers, seed=seed, batch=8)).snapshots[0]


def last_layer(norm: str) -> list[float]:
    """Gradient that a token gives the last layer's second matrix, mean over two models, by depth."""
    return [sum(start(norm, layers, seed).per_token[-1] for seed in (0, 1)) / 2 for layers in DEPTHS]


def test_post_norm_last_layer_does_not_depend_on_depth() -> None:
    """Xiong et al., 2020, theorem 1."""
    found = last_layer("post")
    assert max(found) / min(found) < 1.25


def test_pre_norm_last_layer_shrinks_with_the_root_of_depth() -> None:
    """Xiong et al., 2020, theorem 1."""
    scaled = [value * math.sqrt(layers) for value, layers in zip(last_layer("pre"), DEPTHS)]
    mean = sum(scaled) / len(scaled)
    assert all(abs(value / mean - 1) < 0.15 for value in scaled)
    plain = last_layer("pre")
    assert max(plain) / min(plain) > 2  # what is constant is not the gradient itself


@lru_cache
def stream(norm: str) -> np.ndarray:
    """Mean square of the residual stream behind each of 48 layers, mean over two models."""
    return np.mean([start(norm, 48, seed).activations for seed in (0, 1)], axis=0)


def line(values: np.ndarray) -> tuple[float, float]:
    """(slope, share of the variance that a straight line explains)."""
    x = np.arange(len(values))
    slope, offset = np.polyfit(x, values, 1)
    return float(slope), float(1 - np.var(values - (slope * x + offset)) / np.var(values))


def test_pre_norm_stream_grows_linearly() -> None:
    slope, explained = line(stream("pre"))
    assert slope > 0.5
    assert explained > 0.99


def test_peri_norm_stream_grows_by_two_a_layer() -> None:
    """Attention and feed-forward layer each add a normed output, of mean square 1 (Kim et al., 2025)."""
    slope, explained = line(stream("peri"))
    assert abs(slope / 2 - 1) < 0.1
    assert explained > 0.99


def test_without_norms_the_stream_grows_exponentially() -> None:
    slope, explained = line(np.log(stream("none")))
    assert slope > math.log(1.5)
    assert explained > 0.99
    assert line(stream("none"))[1] < 0.5  # a line through the values themselves does not do


def test_deep_norm_gradients_are_smaller_than_post_norms() -> None:
    """The more so the deeper: that is what its scaling is for (Wang et al., 2022)."""
    ratios = [start("deepnorm", n).per_token[-1] / start("post", n).per_token[-1] for n in (6, 24)]
    assert ratios[1] < 0.6 * ratios[0] < 0.3


def test_runs_repeat_bitwise_and_updates_are_seen() -> None:
    config = FlowConfig(norm="pre", layers=2, steps=5, batch=2)
    one, two = gradient_flow(config, snapshots=3), gradient_flow(config, snapshots=3)
    assert one == two
    assert [s.step for s in one.snapshots] == [0, 2, 4]
    # AdamW's first step moves each weight by the learning rate, whatever its gradient; Xavier's matrices have a known norm.
    count = 12 * 64 * 64 + 2 * 64
    squares = 4 * 64 * 64 / 64 + 2 * 64 * 256 * (2 / 320) + 2 * 64
    assert one.snapshots[0].updates == pytest.approx([1e-3 * math.sqrt(count / squares)] * 2, rel=0.05)
    assert len(one.losses) == 5


@pytest.mark.long
def test_post_norm_without_warm_up_lags_and_pre_norm_does_not() -> None:
    """At a learning rate of 1e-3 and 12 layers. A bound that both know: the entropy of the successors, 1.28 nats."""
    losses = {norm: gradient_flow(FlowConfig(norm=norm, layers=12, steps=120, batch=8)).losses for norm in ("pre", "post")}
    pre, post = (sum(losses[norm][-10:]) / 10 for norm in ("pre", "post"))
    assert pre < 2.2
    assert post > pre + 1


def test_the_picture_has_every_quantity() -> None:
    flow = gradient_flow(FlowConfig(norm="none", layers=2, steps=2, batch=2))
    points = specification([flow])["data"]["values"]
    assert {(p["quantity"], p["when"], p["layer"]) for p in points} == {
        (quantity, when, layer)
        for quantity in {p["quantity"] for p in points}
        for when in ("at initialisation", "step 2")
        for layer in (1, 2)
    }
    assert len({p["quantity"] for p in points}) == 4
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed: pip install 'tilewright[lab]'")
    assert svg(specification([flow])).startswith("<svg")


def test_numbers_that_json_has_not_become_null() -> None:
    flow = gradient_flow(FlowConfig(norm="pre", layers=1, batch=1))
    flow.losses[0] = math.inf
    assert json.loads(json.dumps(flow.as_json(), allow_nan=False))["losses"] == [None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "sandwich", "layers": 2}, "norm is 'sandwich', wanted one of pre, post, peri, deepnorm, none"),
        ({"norm": "pre", "layers": 0}, "layers is 0, wanted 1 to 1000"),
        ({"norm": "pre", "layers": 2, "width": 60}, "width is 60, wanted a multiple of 16"),
        ({"norm": "pre", "layers": 2, "warmup": 3}, "warmup is 3 and steps is 0"),
        ({"norm": "pre", "layers": 2, "lr": math.nan}, "lr is nan"),
    ],
)
def test_bad_input_is_one_sentence(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FlowConfig(**options)


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "flow.json"
    options = ["lab", "gradient-flow", "--norm", "pre,none", "--layers", "1,2", "--batch", "1", "--length", "4"]
    result = CliRunner().invoke(app, [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [(run["config"]["norm"], run["config"]["layers"]) for run in json.loads(out.read_text())] == [
        ("pre", 1), ("pre", 2), ("none", 1), ("none", 2),
    ]  # fmt: skip
    assert json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout) == json.loads(out.read_text())
    result = CliRunner().invoke(app, ["lab", "gradient-flow", "--layers", "six"])
    assert result.exit_code == 1
    assert "wanted integers separated by commas" in result.output
