"""Plans: how they are read, which do not fit, what they are predicted to take, and whether a simulated clock agrees."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewright.models import SHAPES, ModelConfig, empty_model
from tilewright.models.experts import Experts
from tilewright.nn import Routing
from tilewright.parallel.clock import bubble, simulated
from tilewright.parallel.mesh import Mesh, lines
from tilewright.parallel.part import make_part, refusal
from tilewright.parallel.plan import SCHEDULES, Plan, Shape
from tilewright.parallel.predict import predicted, sizes_of
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.spread import Spread
from tilewright.train.config import TrainConfig, differences, merged, to_toml
from tilewright.train.setup import STATE_BYTES, build_optimizer

SHAPE = Shape(layers=8, heads=16, kv_heads=4, inner=64, tokens=128, micro_batches=8, tree=True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", Plan()),
        ("dp=2", Plan(dp=2)),
        ("dp=2, zero=3,tp=2,sp,pp=2,schedule=gpipe", Plan(dp=2, zero=3, tp=2, sp=True, pp=2, schedule="gpipe")),
        ("sp=false,slices=4", Plan(slices=4)),
        ({"dp": 2, "sp": True}, Plan(dp=2, sp=True)),
    ],
)
def test_a_plan_is_read_and_written_back(given: Any, wanted: Plan) -> None:
    assert Plan.read(given) == wanted
    assert Plan.read(str(wanted)) == wanted
    assert Plan.read(wanted.table()) == wanted


@pytest.mark.parametrize("given", ["dp=2", "dp=4,tp=2", "pp=2,dp=4,tp=2", "pp=4,cp=2,dp=2,tp=2", "pp=3,tp=2"])
def test_lines_of_ranks_are_those_of_an_array_of_all(given: str) -> None:
    plan = Plan.read(given)
    ranks = torch.arange(plan.ranks).view(plan.pp, plan.dp, plan.cp, plan.tp)
    for dim, name in enumerate(("pp", "dp", "cp", "tp")):
        wanted = {tuple(line) for line in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()}
        assert set(lines(plan, name)) == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ring", "ring needs cp above 1"),
        ("schedul=gpipe", "did you mean 'schedule'"),
        ("frog=2", "the options are dp"),
        ("dp=0", "dp is 0, wanted 1 or more"),
        ("dp=two", "dp is 'two', wanted int"),
        ("dp", "dp is True, wanted int"),
        ("zero=4", "wanted 0, 1, 2 or 3"),
        ("schedule=frog", "wanted one of"),
        ("virtual=2,pp=2", "1f1b has one part per rank"),
        ("dp=4,ep=3", "ep is 3 and dp is 4; ep must be a divisor of dp"),
        ("slices=3,tp=2", "slices is 3 and tp is 2"),
        ("slices=6,tp=2", "times a power of two"),
    ],
)
def test_a_plan_that_no_model_makes_right_is_refused(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan.read(given)


@pytest.mark.parametrize(
    ("given", "changes", "words"),
    [
        ("tp=3", {}, "slices 3 does not divide the heads, 16"),
        ("tp=8", {}, "slices 8 does not divide the key and value heads, 4"),
        ("tp=4", {"inner": 66}, "does not divide the feed-forward width, 66"),
        ("cp=3", {}, "chunks 3 does not divide the tokens of a micro-batch, 128"),
        ("cp=2,tp=4", {}, "key and value heads of a slice, 1"),
        ("dp=3", {}, "dp 3 does not divide the micro_batches, 8"),
        ("tp=4,sp", {"tokens": 126}, "does not divide the 126 tokens"),
        ("pp=16", {}, "more than the 8 layers"),
        ("dp=2", {"micro_batches": 6}, "each replica has 3 micro-batches of an update; accumulate tree needs a power of two"),
        ("dp=6,zero=2", {"micro_batches": 6}, "dp is 6; accumulate tree needs a power of two"),
        ("pp=4,virtual=2,schedule=interleaved,dp=4", {}, "as the number of micro-batches per replica, got 2"),
        ("pp=2,zero=2", {}, "zero 2 cannot be combined with pp"),
        ("zero=1,dp=2", {"whole": "muon"}, "muon needs whole parameters"),
        ("cp=2", {"ragged": True}, "conversations"),
        ("dp=4,ep=2", {}, "the model has no experts"),
        ("dp=8,ep=8", {"experts": 12}, "ep 8 does not divide the 12 experts"),
        ("dp=4,ep=2,zero=2", {"experts": 8}, "zero 2 cannot be combined with ep"),
        ("dp=6,ep=2", {"experts": 8, "micro_batches": 6}, "each expert has 3 replicas"),
        ("dp=2,ep=2", {"experts": 8, "whole": "muon"}, "but zero, tp and ep divide them"),
        ("chunks=4,cp=2", {}, "cp is 2; they must be equal"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_a_sentence(given: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Plan.read(given).check(replace(SHAPE, **changes))
    assert "\n" not in str(caught.value)


def test_every_micro_batch_and_layer_has_one_owner() -> None:
    for plan in (Plan(dp=4), Plan(dp=4, zero=2), Plan(dp=2, pp=3), Plan(pp=3, schedule="interleaved", virtual=2)):
        owners = [plan.owner(i, 8) for i in range(8)]
        assert sorted(set(owners)) == list(range(plan.dp))
        assert owners.count(0) == 8 // plan.dp
        assert [layer for part in range(plan.parts) for layer in plan.layers_of(part, 17)] == list(range(17))
        places = [tuple(plan.place(rank).values()) for rank in range(plan.ranks)]
        assert len(set(places)) == plan.ranks


def test_the_config_has_the_plan_and_a_resumed_run_may_have_another() -> None:
    config = merged({"parallel": {"dp": 2, "tp": 2, "micro_batches": 8}}, {})
    assert config.micro_batches == 8
    assert config.parallel == Plan(dp=2, tp=2)
    assert 'parallel = "dp=2,tp=2"' in to_toml(config)
    with pytest.raises(ValueError, match="8 in parallel and 4 outside it"):
        merged({"parallel": {"micro_batches": 8}, "micro_batches": 4}, {})
    assert not differences(config, replace(config, parallel=Plan(slices=2)))
    assert not differences(config, replace(config, parallel=Plan(pp=4, tp=2, zero=1)))
    (words,) = differences(config, replace(config, parallel=Plan(dp=4)))
    assert words == "parallel was slices=2 and is now undivided"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 32)])
def test_idle_time_is_as_predicted_on_a_simulated_clock(schedule: str, ranks: int, batches: int) -> None:
    plan = Plan(pp=ranks, schedule=schedule, virtual=2 if schedule in ("interleaved", "zero-bubble") else 1)
    clock = simulated(plan, batches)
    assert clock.bubble == pytest.approx(bubble(plan, batches), rel=0.05)
    assert max(clock.held) <= batches * plan.virtual
    if schedule == "1f1b":
        assert clock.held == tuple(min(batches, ranks - rank) for rank in range(ranks))


SMALL = replace(
    SHAPES["qwen3-0.6b"], vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, windows=(None,) * 4,
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize(
    "given", ["dp=4", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "tp=4", "pp=2,dp=2", "pp=2,tp=2", "dp=2,tp=2,zero=3"]
)
def test_bytes_of_a_rank_are_as_predicted(given: str, dtype: str, tied: bool) -> None:
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    counted(Plan.read(given), replace(SMALL, tie_word_embeddings=tied), kind)


def counted(plan: Plan, shape: ModelConfig, kind: torch.dtype) -> None:
    """Hold what ranks have against the formulas."""
    dtype = str(kind).removeprefix("torch.")
    config = TrainConfig(model="-", dtype=dtype, parallel=plan, accumulate="tree", micro_batches=8)
    for stage in range(plan.pp):
        model = empty_model(shape, device="cpu", dtype=kind).requires_grad_(True)
        order = [name for name, _ in model.named_parameters()]
        need = predicted(
            plan, sizes_of(model), stage, item=kind.itemsize, moments=STATE_BYTES["adamw"], micro_batches=8, tree=True,
            tokens=64, cut_width=1, whole_width=1,
        )  # fmt: skip
        dp, tp, ep = (Unmet(None, 1 % size, size) for size in (plan.dp, plan.tp, plan.ep))
        mesh = Mesh(dp=dp, tp=tp, pp=Unmet(None, stage, plan.pp), ep=ep, same=Unmet(None, 0, plan.expert_replicas))
        spread = Spread(plan, mesh, make_part(model, plan, mesh, invariant=True), order, invariant=True)
        optimizer = build_optimizer(config, model, spread.weights())
        spread.share()
        seen = [*spread.leaves.values(), *spread.held.values(), *optimizer.state_dict().values()]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in seen}
        assert sum(held.values()) == pytest.approx(need.weights + need.optimizer, rel=0.02)
        leaves = sum(leaf.numel() for leaf in spread.leaves.values() if leaf.numel())
        levels = 1 + math.ceil(math.log2(8 // plan.dp))
        if not plan.dealt:
            assert (kind.itemsize + 4 * levels) * leaves == pytest.approx(need.gradients, rel=0.02)


MIXTURE = replace(
    SMALL, architecture="MixtralForCausalLM",
    experts=Experts(first_layer=0, inner=256, shared=0, routing=Routing(method="greedy", experts=8, chosen=2)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "given", ["dp=4", "dp=4,zero=3", "dp=4,ep=2", "dp=4,ep=2,zero=1", "dp=4,ep=4,zero=1", "pp=2,dp=2,ep=2"]
)
def test_bytes_of_a_rank_with_experts_are_as_predicted(given: str, dtype: torch.dtype) -> None:
    plan = Plan.read(given)
    counted(plan, replace(MIXTURE, tie_word_embeddings=False), dtype)


class Unmet(Ranks):
    """Ranks that were never joined: what is there can be counted without them."""

    def texts(self, text: str) -> list[str]:
        return [text] * self.size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(self.size, *[1] * (x.dim() - 1))


def test_layers_of_other_kinds_are_cut_by_rows_alone() -> None:
    shape = replace(SHAPES["qwen3-0.6b"], architecture="Olmo2ForCausalLM")
    model = empty_model(shape, device="meta", dtype=torch.float32)
    for given in ("tp=2", "pp=2", "cp=2"):
        assert "block 0 of this model, which must consist of an RMS norm, attention" in (refusal(model, Plan.read(given)) or "")
    assert refusal(model, Plan.read("dp=2,zero=3")) is None
    assert refusal(empty_model(SHAPES["qwen3-0.6b"], device="meta", dtype=torch.float32), Plan.read("tp=2,pp=2")) is None
