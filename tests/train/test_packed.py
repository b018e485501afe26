"""Models on packed documents: gradients against transformers in float64, and the logits of the serving path."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.oracles import make_oracle
from tests.models.running import run_logits
from tests.models.test_models import CASES
from tilewright.models import Model, load_model
from tilewright.models.fill import part_names, parts_of
from tilewright.nn import PackedKeysValues
from tilewright.train.batch import IGNORED, TrainBatch, pack
from tilewright.train.optim import SGD
from tilewright.train.step import NextToken, running_sum, train_step, trainable, tree_sum

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
VOCAB = 97


def documents(lengths: tuple[int, ...], vocab: int = VOCAB, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length) for length in lengths]


def packed(given: list[np.ndarray]) -> TrainBatch:
    """Every document predicts its own next tokens; the last token of each has no target."""
    return pack([(ids, np.append(ids[1:], IGNORED)) for ids in given])


def by_name(model: Model, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of transformers, merged projections taken apart."""
    found = {}
    for path, grad in grads.items():
        parts = parts_of(model.get_submodule(path.rpartition(".")[0]), grad)
        names, form = part_names(model, path, parts)
        found |= dict(zip(names, form.views(grad, parts), strict=True))
    return found


def oracle_gradients(oracle: torch.nn.Module, given: list[np.ndarray]) -> tuple[float, dict[str, Tensor]]:
    """One document after the other in float64; nothing is packed there."""
    oracle.double().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for ids in map(torch.from_numpy, given):
        if len(ids) > 1:
            total = total + F.cross_entropy(oracle(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
    total.backward()
    return total.item(), {name: p.grad for name, p in oracle.named_parameters() if p.grad is not None}


MIXTURES = ("gpt-oss", "mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "granite-moe", "glm4-moe", "ernie4.5-moe")
DENSE = {name: case for name, case in CASES.items() if case[0] not in MIXTURES}
# transformers takes the factors by each document's length; the loss is of logits without a cap.
del DENSE["phi3-long"], DENSE["gemma2"]
RENAMED = {"embed_out.weight": "lm_head.weight"}
"""Tensors that files of GPT-NeoX call otherwise than transformers does."""


@pytest.mark.parametrize("case", DENSE.values(), ids=list(DENSE))
def test_gradients_equal_transformers(case: tuple[str, dict], tmp_path: Path) -> None:
    oracle = make_oracle(*case)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu").requires_grad_(True)
    given = documents((9, 1, 23, 2, 14))
    loss = NextToken()(model, packed(given))
    weights = trainable(model)
    grads = by_name(model, dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
    want_loss, want = oracle_gradients(oracle, given)
    assert loss.item() == pytest.approx(want_loss, rel=1e-5)
    grads = {RENAMED.get(name, name): grad for name, grad in grads.items()}
    assert grads.keys() == want.keys()
    largest = max(grad.norm() for grad in want.values())
    for name, grad in want.items():
        # Where keys are not rotated, their bias moves all scores of a query alike, and its gradient is 0.
        size = grad.norm() if grad.norm() > 1e-7 * largest else largest
        error = (grads[name].reshape(grad.shape) - grad).norm() / size
        assert error < 2e-5, f"{name}: {error:.1e}"


def test_capped_logits_are_refused(tmp_path: Path) -> None:
    make_oracle(*CASES["gemma2"]).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu").requires_grad_(True)
    with pytest.raises(TypeError, match=r"set final_logit_softcapping to null"):
        NextToken()(model, packed(documents((9, 4))))


def test_packed_logits_equal_those_of_serving() -> None:
    model = load_model("bookworm", device="cpu", dtype=torch.float32)
    given = documents((40, 3, 65), model.config.vocab_size)
    batch = packed(given)
    with torch.no_grad():
        logits = model.logits(model(batch.token_ids, batch.packed, PackedKeysValues()))
        served = torch.cat([run_logits(model, ids.tolist(), chunk=16) for ids in given])
    torch.testing.assert_close(logits, served, atol=2e-4, rtol=1e-4)


def test_a_document_is_not_touched_by_its_neighbours() -> None:
    model = load_model("bookworm", device="cpu", dtype=torch.float32)
    a, b, c = documents((12, 30, 7), model.config.vocab_size)
    with torch.no_grad():
        outs = []
        for first in (a, c):
            batch = packed([first, b])
            outs.append(model(batch.token_ids, batch.packed, PackedKeysValues())[len(first) :])
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sum_of", [running_sum, tree_sum])
def test_micro_batches_make_the_step_of_one_batch(sum_of: object) -> None:
    given = documents((9, 14, 5, 23, 2, 8, 11), 4096)
    losses, weights = [], []
    for cut in ([given], [given[:2], given[2:3], given[3:6], given[6:]], [[one] for one in given]):
        model = load_model("bookworm", device="cpu", dtype=torch.float32).requires_grad_(True)
        optimizer = SGD(trainable(model), max_norm=1.0)
        result = train_step(model, optimizer, [packed(part) for part in cut], 0.5, NextToken(), sum_of)  # pyright: ignore
        losses.append(result.loss.item())
        weights.append(model.blocks[1].attn.qkv.weight.detach().clone())  # pyright: ignore
        assert result.applied.item() == 1
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)
    before = load_model("bookworm", device="cpu", dtype=torch.float32).blocks[1].attn.qkv.weight  # pyright: ignore
    moved = (weights[0] - before).norm()
    assert moved > 1e-3
    for one in weights[1:]:
        assert (one - weights[0]).norm() < 1e-4 * moved


def test_tree_sum_does_not_depend_on_who_sums_which_run() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(1000, generator=generator) * 10.0**i] for i in range(8)]
    halves = [tree_sum(parts[:4]), tree_sum(parts[4:])]
    assert torch.equal(tree_sum(parts)[0], tree_sum(halves)[0])
    assert not torch.equal(tree_sum(parts)[0], running_sum([[p[0].clone()] for p in parts])[0])


def test_what_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        pack([])
    model = load_model("bookworm", device="cpu", dtype=torch.float32).requires_grad_(True)
    ids = np.arange(4)
    batch = pack([(ids, np.full(4, IGNORED))])
    with pytest.raises(ValueError, match="no position in this step's batches has a target"):
        train_step(model, SGD(trainable(model)), [batch], 0.1, NextToken(), running_sum)
