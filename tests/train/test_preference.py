"""Preferences and answers: losses and gradients against a formula in float64, pairs as data, and runs that learn them."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_models import CASES, make_oracle
from tests.server.tiny_model import write_tiny_model
from tests.train.test_packed import by_name, documents
from tilewright.engine.chat_runs import chat_runs
from tilewright.engine.tokenizer import Tokenizer
from tilewright.models import load_model
from tilewright.train.batch import IGNORED, Piece, pack
from tilewright.train.config import TrainConfig
from tilewright.train.main import train
from tilewright.train.optim import SGD
from tilewright.train.preference import Preference, pack_pairs, preference_losses
from tilewright.train.step import NextToken, running_sum, train_step, trainable, tree_sum

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

Answer = tuple[np.ndarray, int]
"""Tokens, and where the answer begins in them."""


def formula(
    kind: str, policy: Any, reference: Any, pairs: list[tuple[Answer, Answer]], beta: float, smoothing: float
) -> Tensor:
    """The mean loss of pairs, one answer after the other; nothing of the trainer is in it."""

    def logprob(model: Any, answer: Answer) -> Tensor:
        ids, begin = torch.from_numpy(answer[0]), answer[1]
        logs = model(ids[None]).logits[0].log_softmax(-1)
        return sum(logs[t - 1, ids[t]] for t in range(begin, len(ids)))  # pyright: ignore[reportReturnType]

    total: Any = 0
    for chosen, rejected in pairs:
        r = logprob(policy, chosen) - logprob(policy, rejected)
        with torch.no_grad():
            before = logprob(reference, chosen) - logprob(reference, rejected)
        r = r - before
        if kind == "ipo":
            total = total + (r - 0.5 / beta) ** 2
        else:
            total = (
                total + (1 - smoothing) * torch.log(1 + torch.exp(-beta * r)) + smoothing * torch.log(1 + torch.exp(beta * r))
            )
    return total / len(pairs)


def piece(answer: Answer) -> Piece:
    ids, begin = answer
    return ids, np.append(np.where(np.arange(1, len(ids)) >= begin, ids[1:], IGNORED), IGNORED)


def some_pairs() -> list[tuple[Answer, Answer]]:
    given = documents((9, 7, 12, 15, 4, 3))
    return [((given[i], 3), (np.append(given[i][:3], given[i + 1]), 3)) for i in (0, 2, 4)]


@pytest.mark.parametrize(("kind", "smoothing"), [("dpo", 0.0), ("dpo", 0.2), ("ipo", 0.0)])
def test_losses_and_gradients_are_those_of_the_formula(kind: str, smoothing: float, tmp_path: Path) -> None:
    oracle, before, pairs = make_oracle(*CASES["llama"]), make_oracle(*CASES["llama"]), some_pairs()
    generator = torch.Generator().manual_seed(1)
    for parameter in before.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model, reference = (_loaded(one, tmp_path / name) for one, name in ((oracle, "policy"), (before, "reference")))
    model.requires_grad_(True)
    objective = Preference(kind, beta=0.3, smoothing=smoothing, reference=reference)
    batch = pack_pairs([piece(answer) for pair in pairs for answer in pair])
    assert batch.n_targets == 3
    loss, weights = objective(model, batch) / 3, trainable(model)
    got = by_name(model, dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))

    oracle.get_input_embeddings().padding_idx = None  # what stands for padding is a token here
    found = []
    for dtype in (torch.float32, torch.float64):
        oracle.to(dtype).requires_grad_(True).zero_grad()
        want_loss = formula(kind, oracle, before.to(dtype), pairs, 0.3, smoothing)
        want_loss.backward()
        found.append({name: p.grad.double() for name, p in oracle.named_parameters()})
    single, want = found
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-6)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        error, own = ((one[name] - grad).norm() / grad.norm() for one in (got, single))
        assert error < max(1e-6, 1.5 * own), f"{name}: {error:.1e}, the formula in float32 {own:.1e}"


def _loaded(oracle: Any, folder: Path) -> Any:
    oracle.save_pretrained(folder)
    return load_model(folder, device="cpu").requires_grad_(False)


@pytest.mark.parametrize("r", [-30.0, -0.7, 0.0, 2.5, 400.0])
def test_a_pairs_loss_at_extreme_margins(r: float) -> None:
    at = torch.tensor([r], dtype=torch.float64, requires_grad=True)
    loss = preference_losses("dpo", at, beta=0.5, smoothing=0.1)
    (slope,) = torch.autograd.grad(loss.sum(), at)
    low = math.log1p(math.exp(-abs(r) / 2))  # the smaller of both logarithms
    want = 0.9 * (low + max(0.0, -r / 2)) + 0.1 * (low + max(0.0, r / 2))
    assert loss.item() == pytest.approx(want, rel=1e-12)
    assert slope.item() == pytest.approx(0.5 * (1 / (1 + math.exp(-r / 2)) - 0.9), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("sum_of", [running_sum, tree_sum])
def test_how_pairs_are_cut_does_not_matter(sum_of: Any, tmp_path: Path) -> None:
    oracle, pairs = make_oracle(*CASES["llama"]), some_pairs()
    reference = _loaded(oracle, tmp_path)
    pieces, found = [[piece(answer) for answer in pair] for pair in pairs], []
    for cut in ([pieces[0] + pieces[1] + pieces[2]], [pieces[0], pieces[1] + pieces[2]], pieces):
        model = load_model(tmp_path, device="cpu").requires_grad_(True)
        objective = Preference("dpo", beta=0.3, reference=reference)
        result = train_step(model, SGD(trainable(model)), [pack_pairs(one) for one in cut], 0.5, objective, sum_of)
        found.append((result.loss.item(), result.norm.item()))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)
    assert found[0][0] == pytest.approx(math.log(2), rel=1e-6)  # the policy is still the reference


def test_the_loss_of_answers_is_that_of_the_formula(tmp_path: Path) -> None:
    """Supervised fine-tuning: the mean over the tokens of answers alone."""
    oracle, given = make_oracle(*CASES["qwen2"]), [(ids, 3) for ids in documents((9, 14, 6))]
    model = _loaded(oracle, tmp_path).requires_grad_(True)
    batch = pack([piece(answer) for answer in given])
    loss = NextToken()(model, batch) / batch.n_targets
    oracle.double()
    nats = [
        F.cross_entropy(
            oracle(torch.from_numpy(ids)[None]).logits[0, begin - 1 : -1], torch.from_numpy(ids[begin:]), reduction="sum"
        )
        for ids, begin in given
    ]
    assert batch.n_targets == sum(len(ids) - begin for ids, begin in given)
    assert loss.item() == pytest.approx(float(sum(nats)) / batch.n_targets, rel=1e-6)


# ---- data and runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(lines: list[Any], **changes: Any) -> TrainConfig:
        data = tmp_path / "pairs.jsonl"
        data.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        small: dict[str, Any] = {"row_tokens": 64, "micro_rows": 2, "steps": 3, "warmup": 0, "lr": 1e-3, "dtype": "float32"}
        given = {"model": str(tiny), "loss": "dpo", "data": [str(data)], "out": str(tmp_path / "run"), "device": "cpu"}
        return TrainConfig(**{**small, **given, "log_every": 1, **changes})

    return make


def run(config: TrainConfig, tiny: Path) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.load(tiny)
    train(config, render=lambda messages: chat_runs(tokenizer, messages), say=lambda words: None)
    return [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]


LETTERS = [{"prompt": f"say {i}", "chosen": "yes yes", "rejected": "no no no"} for i in range(8)]


@pytest.mark.parametrize(
    "changes", [{"lora_rank": 4, "lr": 2e-2}, {"loss": "ipo", "dpo_beta": 0.5, "lr": 1e-4}], ids=["adapter", "whole, ipo"]
)
def test_the_margin_rises(config: Callable[..., TrainConfig], tiny: Path, changes: dict[str, Any]) -> None:
    log = run(config(LETTERS, **{"steps": 25, "schedule": "constant", **changes}), tiny)
    assert log[0]["margin"] == pytest.approx(0.0, abs=1e-6)
    assert log[-1]["margin"] > 0.2
    assert log[-1]["preferred"] == 1.0
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]


def test_messages_and_texts_are_pairs(config: Callable[..., TrainConfig], tiny: Path) -> None:
    turn = [{"role": "user", "content": "hi"}]
    answer = {"role": "assistant", "content": "yes"}
    worse = {"role": "assistant", "content": "no"}
    lines = [
        {"messages": turn, "chosen": "yes", "rejected": "no"},
        {"prompt": turn, "chosen": answer, "rejected": [worse]},
        {"chosen": [*turn, answer], "rejected": [*turn, worse]},
    ]
    losses = [
        run(config([line], steps=1, lora_rank=2, row_tokens=96, out=str(tiny.parent / f"as-{i}")), tiny)[0]
        for i, line in enumerate(lines)
    ]
    assert losses[0]["norm"] > 0
    assert [one["norm"] for one in losses] == [losses[0]["norm"]] * 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", 'line 2: wanted {"prompt": ..., "chosen": ..., "rejected": ...}'),
        ({"prompt": "a", "chosen": "b"}, 'wanted {"prompt"'),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "of texts, or of messages"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "of texts, or of messages"),
        ({"messages": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "of texts, or of messages"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": "b"}, "of texts, or of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same answer"),
        ({"prompt": "a" * 99, "chosen": "b", "rejected": "c"}, "but a row only 64; raise row_tokens"),
        ("[" * 100000, 'wanted {"prompt"'),
    ],
)
def test_what_is_no_pair_is_one_sentence(config: Callable[..., TrainConfig], tiny: Path, line: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        run(config([LETTERS[0], line]), tiny)
    assert "\n" not in str(caught.value)
