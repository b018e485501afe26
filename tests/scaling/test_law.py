"""The law's optimum against a search, and the counted operations against torch's own counter."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.utils.flop_counter import FlopCounterMode

from tilewright.scaling import Law
from tilewright.scaling.law import HOFFMANN
from tilewright.scaling.plan import Plan, hours, plan, read_plan
from tilewright.scaling.shapes import Shape, nearest_shape

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")


@pytest.mark.parametrize("seed", range(10))
def test_the_optimum_is_the_lowest_loss_that_a_search_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    law = Law(
        E=rng.uniform(0.5, 3),
        A=10 ** rng.uniform(1, 4),
        B=10 ** rng.uniform(1, 4),
        alpha=rng.uniform(0.1, 1),
        beta=rng.uniform(0.1, 1),
    )
    flops, k = 10 ** rng.uniform(15, 25), rng.uniform(2, 8)
    found: Any = minimize_scalar(
        lambda x: law.loss(np.exp(x), flops / k / np.exp(x)), bounds=(-20, 100), method="bounded", options={"xatol": 1e-9}
    )
    best = law.optimum(flops, k)
    assert best.loss <= float(found.fun) * (1 + 1e-12)
    assert best.loss == pytest.approx(found.fun, rel=1e-9)
    assert k * best.params * best.tokens == pytest.approx(flops, rel=1e-9)


def test_the_papers_law_gives_the_papers_chinchilla_budget() -> None:
    # Table A3 of Hoffmann et al. gives 40 billion parameters for Gopher's 5.76e23 FLOPs by the law ("approach 3").
    assert HOFFMANN.optimum(5.76e23).params == pytest.approx(40e9, rel=0.25)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_flops_are_those_that_torch_counts(tied: bool) -> None:
    shape = Shape(layers=3, hidden=128, heads=8, kv_heads=2, head_dim=16, ffn=320, vocab=501, tied=tied)
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=320,
        vocab_size=501,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == shape.params
    ids = torch.zeros(2, 40, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(ids, labels=ids).loss
        forward = counter.get_total_flops()
        loss.backward()
    assert forward / ids.numel() == sum(shape.forward_flops(40, causal=False).values())
    assert counter.get_total_flops() / ids.numel() == shape.train_flops(40, causal=False)


def test_causal_attention_counts_the_keys_that_are_seen() -> None:
    shape = Shape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=96, vocab=10)
    seen = sum(position + 1 for position in range(100)) / 100
    assert shape.forward_flops(100)["attention"] == pytest.approx(2 * 2 * seen * 4 * 16 * 2)


@pytest.mark.parametrize("budget", [1e15, 1e17, 3e19, 1e24])
def test_a_plan_brackets_each_optimum_and_costs_what_was_asked(budget: float) -> None:
    made = plan(budget, vocab=1024, head_dim=32, tied=True, sequence=256)
    by_budget: dict[float, list[int]] = {}
    for run in made.runs:
        assert run.flops == pytest.approx(run.budget, rel=1e-3)
        assert run.flops == pytest.approx(run.tokens * run.shape.train_flops(256))
        assert run.params == run.shape.params
        by_budget.setdefault(run.budget, []).append(run.params)
    assert sorted(by_budget) == pytest.approx([budget / 10 ** (i / 2) for i in range(4, -1, -1)])
    for sizes in by_budget.values():
        assert sizes == sorted(set(sizes))
        assert len(sizes) == 5
        assert 4 < sizes[-1] / sizes[0] < 16


def test_a_plan_follows_its_prior() -> None:
    half = Law(E=1.8, A=480.0, B=2100.0, alpha=0.3473, beta=0.3672)
    doubled = Law(E=1.8, A=480.0 * 2, B=2100.0, alpha=0.3473, beta=0.3672)
    small, large = (plan(1e20, prior=law, budgets=1).runs[2].params for law in (half, doubled))
    assert large / small == pytest.approx(2 ** (1 / (0.3473 + 0.3672)), rel=0.15)


def test_a_plan_survives_its_file(tmp_path: "object") -> None:
    import json
    from pathlib import Path

    made = plan(1e17, vocab=2048)
    path = Path(str(tmp_path)) / "plan.json"
    path.write_text(json.dumps(made.to_json()))
    read = read_plan(path)
    assert isinstance(read, Plan)
    assert read == made


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"budget": 1e11}, "no 5 distinct sizes"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"budget": 1e30}, "budget is 1e"),
        ({"sizes": 2}, "sizes is 2"),
        ({"span": 1.0}, "span is 1"),
        ({"vocab": 0}, "vocab is 0"),
        ({"ratio": 1.0}, "ratio is 1"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(change: dict[str, float], finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        plan(**{"budget": 1e18, **change})  # pyright: ignore[reportArgumentType]


def test_hours_are_of_the_cards_peak() -> None:
    whole = hours(1e18, "h200", 1.0)
    assert hours(1e18, "h200", 0.25) == pytest.approx(4 * whole)
    assert 1e18 / 1100e12 / 3600 < whole < 1e18 / 500e12 / 3600
    with pytest.raises(ValueError, match="no card called 'h201'"):
        hours(1e18, "h201", 0.5)


def test_shapes_come_close_to_what_is_asked() -> None:
    for params in np.geomspace(1e7, 1e11, 40):
        assert nearest_shape(params, 32_000, tied=True, head_dim=32).params == pytest.approx(params, rel=0.15)


def test_a_plan_of_one_depth() -> None:
    made = plan(1e15, budgets=2, vocab=1024, head_dim=32, layers=3)
    assert {run.shape.layers for run in made.runs} == {3}
    assert len({run.shape.hidden for run in made.runs}) > 4
    with pytest.raises(ValueError, match="layers is 0, wanted 1 to 1000"):
        plan(1e15, layers=0)
