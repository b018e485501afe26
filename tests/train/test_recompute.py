"""Plans against brute force, predicted bytes against what is alive, gradients against those of the model as it is."""

import gc
import itertools
import json
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.models import load_model
from tilewright.nn import Linear
from tilewright.ops.linear_fp8 import Fp8Recipe
from tilewright.train.batch import pack
from tilewright.train.lab.residual import SCHEMES, Transformer
from tilewright.train.recompute import (
    BlockProfile,
    Call,
    Choice,
    Profile,
    applied,
    full,
    none,
    pareto,
    planned,
    profile,
    reasons,
    selective,
)
from tilewright.train.recompute.plan import _fastest_first, _plan
from tilewright.train.step import NextToken, trainable

Loss = Callable[[], Tensor]


def lab_model(norm: str = "pre", device: str = "cpu") -> tuple[nn.Module, Sequence[nn.Module], Loss]:
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(SCHEMES[norm], layers=3, features=64, heads=4, vocabulary=64, length=32)
        tokens = torch.randint(64, (4, 33))
    return model, list(model.blocks), lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Torch(nn.Module):
    """Blocks of torch alone, unlike each other, with dropout and something written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 32), nn.ReLU(inplace=True))
            for width in (64, 128, 64)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(x + block(x))
        return x.square().mean()


def torch_model() -> tuple[nn.Module, Sequence[nn.Module], Loss]:
    torch.manual_seed(0)
    model, x = Torch(), torch.randn(50, 32)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return model(x.clone())  # so that it is made where `Alive` sees it

    return model, list(model.blocks), loss


def decoder() -> tuple[nn.Module, Sequence[nn.Module], Loss]:
    """The embedded model on two packed documents."""
    model = load_model("bookworm", device="cpu", dtype=torch.float32).requires_grad_(True)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 48)
    batch = pack([(ids[:30], ids[:30]), (ids[30:], ids[30:])])
    objective = NextToken(deterministic=True)
    return model, list(model.blocks), lambda: objective(model, batch)


def with_codes() -> tuple[nn.Module, Sequence[nn.Module], Loss]:
    """The embedded model, whose first block has float8 products, which save codes in place of x and w."""
    model, blocks, loss = decoder()
    for layer in blocks[0].modules():
        if isinstance(layer, Linear):
            layer.fp8 = Fp8Recipe("row", weight_gradient=True)
    return model, blocks, loss


MODELS = {
    "tilewright": lab_model,
    "peri": lambda: lab_model("peri"),
    "torch": torch_model,
    "decoder": decoder,
    "codes": with_codes,
}


class Alive(TorchDispatchMode):
    """The storages that calls have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.sizes:
                storage = t.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        return out


@pytest.mark.parametrize("name", MODELS)
def test_held_bytes_are_as_predicted_and_gradients_bitwise_the_same(name: str) -> None:
    model, blocks, loss = MODELS[name]()
    parameters = list(trainable(model).values())
    weights = {p.untyped_storage()._cdata for p in parameters}
    found = profile(blocks, loss, parameters=parameters, repeats=1)
    want = torch.autograd.grad(loss(), parameters)
    plans = [none(found), full(found), selective(found), *(plan for _, plan in pareto(found))]
    assert len({plan.held_bytes for plan in plans}) > 4
    for plan in plans:
        alive = Alive()
        with alive, applied(blocks, plan.choices):
            result = loss()
            gc.collect()
            held = sum(size for key, size in alive.sizes.items() if key not in weights)
            got = torch.autograd.grad(result, parameters)
        assert abs(held / plan.held_bytes - 1) < 0.03
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_kept_call_is_not_run_again() -> None:
    """Calls of attention, by how many blocks keep its result."""
    model, blocks, loss = lab_model()
    parameters = list(model.parameters())
    place = [c.name for c in profile(blocks, loss, parameters=parameters, repeats=1).blocks[0].calls].index(
        "tilewright.attention"
    )

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += str(func) == "tilewright.attention.default"
            return func(*args, **(kwargs or {}))

    for keeping in range(4):
        choices = [Choice(frozenset({place} if i < keeping else ())) for i in range(3)]
        count = Count()
        with applied(blocks, choices):
            result = loss()
        with count:
            torch.autograd.grad(result, parameters)
        assert count.calls == 3 - keeping


def test_a_profile_on_meta_has_the_bytes_of_a_real_one() -> None:
    real_model, real_blocks, real_loss = lab_model()
    meta_model, meta_blocks, meta_loss = lab_model(device="meta")
    real = profile(real_blocks, real_loss, parameters=list(real_model.parameters()), repeats=1)
    meta = profile(
        meta_blocks, meta_loss, parameters=list(meta_model.parameters()), seconds_of=lambda func, args, out: 1e-6
    )  # fmt: skip
    for make in (none, full, selective):
        assert abs(make(meta).held_bytes - make(real).held_bytes) <= 64
    assert [b.key for b in meta.blocks] == [b.key for b in real.blocks]


# ---- the optimum


def random_profile(seed: int) -> Profile:
    """Three blocks with up to five calls that may be kept; a block's input is a result of the block before it."""
    draw = random.Random(seed)
    keys = itertools.count()
    everywhere, entry = {next(keys): draw.randint(1, 9)}, {next(keys): 20}
    kinds = [
        [(draw.randint(0, 40), draw.random(), draw.random() < 0.8, draw.random() < 0.8) for _ in range(draw.randint(2, 5))]
        for _ in range(2)
    ]
    blocks = []
    for sizes in (kinds[0], kinds[1], kinds[0]):
        calls = tuple(
            Call(name="x", seconds=seconds, made={next(keys): size} if size else {}, again=again, may_be_kept=kept and size > 0)
            for size, seconds, again, kept in sizes
        )
        saved = {key: size for call in calls for key, size in call.made.items() if size % 3}
        blocks.append(BlockProfile(calls=calls, inputs=entry | everywhere, saved=saved | {next(keys): 30} | everywhere))
        made = [call.made for call in calls if call.made]
        entry = made[-1] if made else {next(keys): 20}
    return Profile(blocks=tuple(blocks), outside={next(keys): draw.randint(1, 20)}, step_seconds=1.0)


def all_plans(found: Profile) -> list[Any]:
    options = []
    for block in found.blocks:
        items = [j for j, c in enumerate(block.calls) if c.may_be_kept and c.again]
        sets = [frozenset(s) for n in range(len(items) + 1) for s in itertools.combinations(items, n)]
        options.append([Choice(None), *(Choice(s) for s in sets)])
    return [_plan(found, choices) for choices in itertools.product(*options)]


@pytest.mark.parametrize("seed", range(12))
def test_the_front_is_that_of_brute_force(seed: int) -> None:
    found = random_profile(seed)
    everything = all_plans(found)
    for limit in range(0, 400, 7):
        best = min((plan.recompute_seconds for plan in everything if plan.held_bytes <= limit), default=None)
        first = next(_fastest_first(found, limit), None)
        assert (best is None) == (first is None)
        if first is not None:
            assert _plan(found, first).held_bytes <= limit
            assert _plan(found, first).recompute_seconds == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_plans_fit_their_budget_and_no_usual_plan_that_fits_is_faster(seed: int) -> None:
    found = random_profile(seed)
    usual = [none(found), full(found), selective(found)]
    last = float("inf")
    for budget in range(min(plan.peak_bytes for plan in usual), none(found).peak_bytes + 50, 5):
        plan = planned(found, budget)
        assert plan.peak_bytes <= budget
        assert plan.recompute_seconds <= min(p.recompute_seconds for p in usual if p.peak_bytes <= budget)
        assert plan.recompute_seconds <= last + 1e-12
        last = plan.recompute_seconds
    assert last == 0


def test_every_tensor_has_a_reason() -> None:
    model, blocks, loss = lab_model()
    found = profile(blocks, loss, parameters=list(model.parameters()), repeats=1)
    for plan in (none(found), full(found), planned(found, none(found).peak_bytes * 2 // 3)):
        said = reasons(found, plan)
        assert len(said) == sum(bool(c.bytes) for c in found.blocks[0].calls)
        for reason in said:
            kept = [choice.kept is not None and reason.call in choice.kept for choice in plan.choices]
            assert reason.why
            assert reason.kept_in >= sum(kept)
    assert {r.kept_in for r in reasons(found, full(found))} == {0}


def test_the_command_prints_ten_budgets_and_reasons() -> None:
    for options, plans in (([], 13), (["--budget", "0.05"], 4)):
        words = ["train", "plan", "bookworm", "--tokens", "2048", "--length", "256", "--json"]
        result = CliRunner().invoke(app, [*words, *options])
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert len(said["plans"]) == plans
        assert bool(said["tensors"]) == bool(options)
        everything, leanest = said["plans"][0], said["plans"][1]
        for plan in said["plans"][3:]:
            assert plan["peak_bytes"] <= everything["peak_bytes"]
            assert plan["recompute_seconds"] <= leanest["recompute_seconds"]
    result = CliRunner().invoke(app, ["train", "plan", "bookworm", "--budget", "0.0001"])
    assert result.exit_code == 1
    assert "the plan with the least memory needs" in result.output
    assert "Traceback" not in result.output


def test_bad_input_is_one_sentence() -> None:
    found = random_profile(0)
    with pytest.raises(
        ValueError, match="a budget of 1 bytes for activations is too small; the plan with the least memory needs"
    ):
        planned(found, 1)
    model, blocks, loss = torch_model()
    with pytest.raises(ValueError, match="the list of blocks is empty"):
        profile([], loss, parameters=list(model.parameters()))
    with pytest.raises(ValueError, match=r"each must run exactly once, in the order given"):
        profile(blocks[::-1], loss, parameters=list(model.parameters()))
    with pytest.raises(ValueError, match="the plan is for 1 blocks, but the model has 3"), applied(blocks, [Choice(None)]):
        pass
