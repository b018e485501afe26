"""Temperature and filters: what the sampler says of a token is its distribution's, and the trainer finds the same."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rl.test_loop import TINY
from tilewright import ops
from tilewright.engine.draws import drawn_logprobs, kept_counts
from tilewright.engine.outputs import joined
from tilewright.engine.request import Delta, SamplingParams
from tilewright.rl.batch import Batch
from tilewright.rl.characters import Characters
from tilewright.rl.config import RLConfig
from tilewright.rl.loop import Trainer
from tilewright.rl.policies import small_model
from tilewright.rl.policy import logprobs_and_entropies_of, logprobs_of, support_of
from tilewright.rl.rollout import Answer, Drawing, Sampler

SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.3, 5, 1.0, 0.0),
    (0.8, 0, 0.7, 0.0),
    (2.0, 0, 1.0, 0.1),
    (1.0, 7, 0.9, 0.05),
]
"""Temperature, top-k, top-p, min-p."""
DRAWINGS = [{"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.8}, {"top_k": 4}, {"top_k": 12, "top_p": 0.5}]


def distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The probabilities of the tokens that the filters keep, one after the other, in float64; without ties."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    mass = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order[: top_k or len(order)]}
    total, likelier, kept = sum(mass.values()), 0.0, {}
    for token, own in mass.items():
        if likelier < top_p * total and own >= min_p:
            kept[token] = own
        likelier += own
    return {token: own / sum(kept.values()) for token, own in kept.items()}


def test_the_distribution_of_a_draw_is_that_of_the_definition() -> None:
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(SETTINGS), 50, generator=g)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*SETTINGS))
    positions = torch.arange(len(SETTINGS))
    for draw in range(40):
        tokens = ops.sample(
            logits, temperature, top_k.int(), top_p, min_p, torch.full_like(positions, draw), positions
        )  # fmt: skip
        found, kept = drawn_logprobs(logits, tokens, temperature, top_k.int(), top_p, min_p)
        for row, setting in enumerate(SETTINGS):
            wanted = distribution(logits[row].tolist(), *setting)
            assert int(kept[row]) == len(wanted)
            assert float(found[row]) == pytest.approx(math.log(wanted[int(tokens[row])]), abs=2e-6)


def test_tokens_that_tie_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    one, none = torch.ones(1), torch.zeros(1)
    counts, least = kept_counts(logits, one, torch.tensor([2]), one, none)
    assert (counts.item(), least.item()) == (4, 1.0)


def sampled(model: Any, drawing: Drawing, count: int = 64) -> tuple[list[list[Answer]], list[list[int]]]:
    prompts = [Characters().prompt(f"{number:02d}=") for number in range(count)]
    sampler = Sampler(model, max_len=16, seqs=64, end_ids=(20,), drawing=drawing)
    return sampler(prompts, answers=2, max_tokens=4, seed=0), prompts


@pytest.mark.parametrize("settings", [{}, *DRAWINGS], ids=str)
def test_columns_say_what_values_say(settings: dict[str, float]) -> None:
    """The same requests again, from an engine that makes a value of each token."""
    drawing, model = Drawing(**settings), spread_model()  # pyright: ignore[reportArgumentType]
    prompts = [Characters().prompt(f"{number:02d}=") for number in range(20)]
    sampler = Sampler(model, max_len=16, seqs=8, end_ids=(20,), drawing=drawing)
    answers = [answer for group in sampler(prompts, answers=3, max_tokens=6, seed=5) for answer in group]
    engine, found = sampler._engine, dict[tuple[str, int], list[Delta]]()
    engine.runner._columns = False  # pyright: ignore[reportAttributeAccessIssue]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=6, logprobs=0, n=3, seed=(5 << 24) + 3 * i, temperature=drawing.temperature, top_k=drawing.top_k,
            top_p=drawing.top_p,
        )  # fmt: skip
        engine.submit(prompt, params, f"{i:03d}")
    while engine.has_work:
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).append(delta)
    assert len({len(answer.tokens) for answer in answers}) > 1
    for answer, (_, deltas) in zip(answers, sorted(found.items()), strict=True):
        whole = joined(deltas)
        entries = whole.logprobs
        assert answer.tokens == list(whole.token_ids) == [entry.token_id for entry in entries]
        assert answer.whole == [entry.logprob for entry in entries]
        assert answer.logprobs == [entry.logprob if drawing.plain else entry.drawn for entry in entries]
        assert answer.kept == [entry.kept if drawing.filters else 0 for entry in entries]
        assert answer.truncated == (whole.finish_reason == "length")


def test_a_model_whose_logits_are_no_numbers_is_said_to_be() -> None:
    model = small_model(TINY)
    sampler = Sampler(model, max_len=16, seqs=8, end_ids=(20,))
    model.head.weight.data.fill_(math.nan)
    with pytest.raises(RuntimeError, match="NaN"):
        sampler([Characters().prompt("01=")], answers=2, max_tokens=4, seed=0)


def spread_model(config: RLConfig = TINY) -> Any:
    """A model whose answers are far from uniform, so that filters bite."""
    model = small_model(config)
    model.head.weight.data.mul_(30.0)
    return model


def packed(answers: list[list[Answer]], prompts: list[list[int]], temperature: float) -> Batch:
    from tilewright.rl.batch import Sample, pack

    samples = [
        Sample(
            tokens=[*prompt, *answer.tokens], chosen=[False] * len(prompt) + [True] * len(answer.tokens),
            logprobs=[0.0] * len(prompt) + answer.logprobs, kept=[0] * len(prompt) + answer.kept, reward=0.0, group=i,
        )
        for i, (group, prompt) in enumerate(zip(answers, prompts)) for answer in group
    ]  # fmt: skip
    return pack(samples, temperature=temperature)


@pytest.mark.parametrize("settings", DRAWINGS, ids=str)
def test_the_trainer_finds_the_distribution_that_was_drawn_from(settings: dict[str, float]) -> None:
    """Every probability of the vocabulary against a float64 loop, and what the sampler said of its tokens."""
    drawing, model = Drawing(**settings), spread_model()  # pyright: ignore[reportArgumentType]
    answers, prompts = sampled(model, drawing)
    assert all(len(answer.whole) == len(answer.tokens) for group in answers for answer in group)
    batch = packed(answers, prompts, drawing.temperature)
    if drawing.filters:
        width = int(batch.known("kept").max())
        batch = replace(batch, support=support_of(model, batch, width))
    with torch.no_grad():
        found, entropies = logprobs_and_entropies_of(model, batch)
    assert (found - batch.sampled)[batch.mask].abs().max() < 1e-5  # rounding, of logits up to about 20
    first = 0
    for sequence, length in enumerate(batch.lengths.tolist()):
        if sequence % 16 == 0:
            place = first + length - 1
            context = batch.tokens[first:place].tolist()
            wanted = distribution(whole_logits(model, context), drawing.temperature, drawing.top_k, drawing.top_p, 0.0)
            assert float(found[place]) == pytest.approx(math.log(wanted[int(batch.tokens[place])]), abs=1e-5)
            entropy = -sum(p * math.log(p) for p in wanted.values())
            assert float(entropies[place]) == pytest.approx(entropy, abs=1e-5)
        first += length


def whole_logits(model: Any, context: list[int]) -> list[float]:
    """Log-probabilities of all next tokens at temperature 1."""
    from tests.rl.test_loop import sample
    from tilewright.rl.batch import pack

    every = pack([sample([*context, token], len(context)) for token in range(21)])
    with torch.no_grad():
        return logprobs_of(model, every)[every.mask].double().tolist()


def test_gradients_are_those_of_the_renormalised_distribution() -> None:
    """Against torch: log-softmax over the kept tokens alone."""
    drawing, model = Drawing(temperature=0.8, top_k=3), spread_model()
    answers, prompts = sampled(model, drawing, count=8)
    batch = packed(answers, prompts, drawing.temperature)
    batch = replace(batch, support=support_of(model, batch, 3))
    weights = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    head = model.head.weight
    loss = batch.total(weights * logprobs_of(model, batch))
    ours = torch.autograd.grad(loss, head)[0]
    from tilewright.rl.policy import hidden_of

    with torch.no_grad():
        hidden = hidden_of(model, batch).double()
    leaf = head.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    assert batch.support is not None
    for place in batch.mask.nonzero()[:, 0].tolist():
        ids = batch.support[place]
        logs = ((hidden[place - 1] @ leaf.T)[ids] / 0.8).log_softmax(0)
        total = total + weights[place] * logs[(ids == batch.tokens[place]).nonzero()[0, 0]]
    theirs = torch.autograd.grad(total, leaf)[0]
    assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("settings", DRAWINGS, ids=str)
def test_on_policy_the_ratio_is_one_at_every_step(settings: dict[str, float]) -> None:
    config = replace(TINY, updates=3, learning_rate=0.02, entropy_bonus=0.01, **settings)
    with Trainer(config, spread_model(config)) as trainer:
        rows = list(trainer)
    for row in rows:
        assert row["applied"] == 1.0
        assert row["ratio_off"] < 1e-5
        assert abs(row["entropy"] - row["entropy_whole"]) > 1e-6  # two distributions
        # The support stays that of the sampler while the weights move: a ratio is of probabilities over the same tokens.
        assert 0 < row["kl_after"] < math.inf


def test_a_token_that_the_new_weights_would_filter_out_stays_in_the_support() -> None:
    drawing, model = Drawing(top_k=2), spread_model()
    answers, prompts = sampled(model, drawing, count=8)
    batch = packed(answers, prompts, 1.0)
    other = spread_model(replace(TINY, seed=1))
    batch = replace(batch, support=support_of(other, batch, 2))
    assert batch.support is not None
    assert (batch.support[batch.mask] == batch.tokens[batch.mask][:, None]).any(1).all()
    assert logprobs_of(other, batch)[batch.mask].isfinite().all()
