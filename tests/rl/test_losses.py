"""Every loss and its gradient against a float64 loop over tokens; micro-batches; what stands at unchosen tokens."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.rl import definitions
from tilewright.parallel.launch import run_ranks
from tilewright.rl.advantages import (
    gae,
    group_centered,
    group_normalised,
    informative,
    leave_one_out,
    overlong_penalty,
    whitened,
)
from tilewright.rl.batch import Batch, Sample, pack, split
from tilewright.rl.losses.cispo import cispo
from tilewright.rl.losses.correction import masked, truncated
from tilewright.rl.losses.dapo import dapo
from tilewright.rl.losses.dr_grpo import dr_grpo
from tilewright.rl.losses.grpo import grpo
from tilewright.rl.losses.gspo import gspo
from tilewright.rl.losses.kl import ESTIMATORS, penalty
from tilewright.rl.losses.ppo import entropy_bonus, ppo, value_loss
from tilewright.rl.losses.reinforce import reinforce
from tilewright.rl.losses.reinforce_plus_plus import discounted_whitened
from tilewright.rl.stats import measure


class Case(NamedTuple):
    ours: Callable[[Tensor, Batch], Tensor]
    theirs: Callable[[definitions.Answers], Tensor]


CASES = {
    "ppo": Case(ppo, partial(definitions.ppo, low=0.2, high=0.2)),
    "ppo, dual clip": Case(
        partial(ppo, low=0.1, high=0.3, dual=1.5), partial(definitions.ppo_dual, low=0.1, high=0.3, dual=1.5)
    ),
    "grpo": Case(grpo, partial(definitions.grpo, low=0.2, high=0.2)),
    "dr-grpo": Case(partial(dr_grpo, longest=12), partial(definitions.dr_grpo, low=0.2, high=0.2, longest=12)),
    "dapo": Case(dapo, partial(definitions.ppo, low=0.2, high=0.28)),
    "gspo": Case(partial(gspo, low=0.03, high=0.04), partial(definitions.gspo, low=0.03, high=0.04)),
    "cispo": Case(cispo, partial(definitions.cispo, low=1.0, high=0.28)),
    "rloo": Case(reinforce, definitions.reinforce),
    **{f"kl {k}": Case(lambda p, b, k=k: penalty(p, b, 1.0, k), partial(definitions.kl, estimator=k)) for k in ESTIMATORS},
}


def random_batch(seed: int, dtype: torch.dtype) -> tuple[Batch, Tensor]:
    """Answers of 0 to 9 chosen tokens after prompts of 1 to 4, some with unchosen tokens inside; new log-probabilities."""
    g = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    samples = []
    for index in range(12):
        prompt, answer = integer(1, 5), integer(0, 10)
        chosen = [False] * prompt + [bool(torch.rand((), generator=g) < 0.8) for _ in range(answer)]
        logprobs = (-2 * torch.rand(len(chosen), generator=g, dtype=torch.float64)).tolist()
        reward = float(torch.randn((), generator=g))
        samples.append(Sample(tokens=range(len(chosen)), chosen=chosen, logprobs=logprobs, reward=reward, group=index // 4))
    batch = pack(samples, dtype)
    noise = partial(torch.randn, len(batch.tokens), generator=g, dtype=torch.float64)
    batch = replace(batch, advantages=batch.spread(noise()[:12].to(dtype)), reference=(batch.old + 0.3 * noise()).to(dtype))
    return batch, (batch.old + 0.3 * noise()).to(dtype)


def answers_of(batch: Batch, logprobs: Tensor) -> definitions.Answers:
    """The batch as lists; `logprobs` in float64, with a gradient."""
    assert batch.advantages is not None
    assert batch.reference is not None
    found, first = [], 0
    for length in batch.lengths.tolist():
        found.append(
            [
                (logprobs[t], float(batch.old[t]), float(batch.advantages[t]), float(batch.reference[t]))
                for t in range(first, first + length)
                if batch.mask[t]
            ]
        )
        first += length
    return found


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    leaf = at.detach().clone().requires_grad_()
    value = loss(leaf)
    (found,) = torch.autograd.grad(value, leaf)
    return value.detach(), found


def close(found: Tensor, wanted: Tensor, limit: float, scale: float = 1e-3) -> None:
    size = max(scale, float(wanted.abs().max()))
    assert float((found.double() - wanted.double()).abs().max()) <= limit * size


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_the_formulas(name: str, dtype: torch.dtype, limit: float) -> None:
    case = CASES[name]
    for seed in range(5):
        batch, logprobs = random_batch(seed, dtype)
        ours = gradient(lambda p, b=batch: case.ours(p, b), logprobs)
        theirs = gradient(lambda p, b=batch: case.theirs(answers_of(b, p)), logprobs.double())
        assert float(theirs[1].abs().max()) > 0
        # The value is a mean of terms about 1 in size, which may cancel.
        close(ours[0], theirs[0], limit, scale=1.0)
        close(ours[1], theirs[1], limit)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("most", [1, 13, 40])
def test_micro_batches_add_up(name: str, most: int) -> None:
    batch, logprobs = random_batch(3, torch.float64)
    whole = gradient(lambda p: CASES[name].ours(p, batch), logprobs)
    parts = split(batch, most)
    assert len(parts) > 1
    cut = torch.split(logprobs, [len(part.tokens) for part in parts])
    found = [gradient(lambda p, b=part: CASES[name].ours(p, b), piece) for part, piece in zip(parts, cut)]
    close(sum((value for value, _ in found), torch.zeros(())), whole[0], 1e-12)
    close(torch.cat([slope for _, slope in found]), whole[1], 1e-12)


@pytest.mark.long
def test_four_ranks_add_up(tmp_path: Path) -> None:
    """Over gloo, each with three of twelve sequences."""
    from tests.rl.loss_rank import loss_and_gradient

    path = tmp_path / "sums.safetensors"
    run_ranks([sys.executable, "-m", "tests.rl.loss_rank", str(path)], 4, print)
    found, batch = load_file(path), random_batch(7, torch.float64)[0]
    for name in CASES:
        for kind, whole in zip(("loss", "gradient"), loss_and_gradient(name, batch)):
            assert float(whole.abs().max()) > 0
            close(found[f"{name} {kind}"], whole, 1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_unchosen_tokens_do_not_matter(name: str, poison: float) -> None:
    batch, logprobs = random_batch(1, torch.float64)
    clean = gradient(lambda p: CASES[name].ours(p, batch), logprobs)
    bad = torch.where(batch.mask, logprobs, poison)
    dirty = replace(
        batch,
        old=torch.where(batch.mask, batch.old, poison),
        reference=torch.where(batch.mask, batch.known("reference"), poison),
    )
    found = gradient(lambda p: CASES[name].ours(p, dirty), bad)
    assert torch.equal(clean[0], found[0])
    assert torch.equal(clean[1], found[1])


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    batch, _ = random_batch(0, torch.float64)
    count = len(batch.tokens)
    before, returns, values = torch.randn(3, count, generator=g, dtype=torch.float64)
    batch = replace(batch, values=before, returns=returns)
    value, slope = gradient(lambda v: value_loss(v, batch, clip=clip), values)
    total, slopes = 0.0, torch.zeros(count, dtype=torch.float64)
    for t in range(count):
        if not batch.mask[t]:
            continue
        v, v0, r = float(values[t]), float(before[t]), float(returns[t])
        error, derivative = (v - r) ** 2, 2 * (v - r)
        if clip is not None:
            moved = v0 + min(max(v - v0, -clip), clip)
            if (moved - r) ** 2 > error:
                error, derivative = (moved - r) ** 2, 2 * (moved - r) if abs(v - v0) < clip else 0.0
        total += error / 2 / batch.totals.tokens
        slopes[t] = derivative / 2 / batch.totals.tokens
    close(value, torch.tensor(total, dtype=torch.float64), 1e-12)
    close(slope, slopes, 1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_sum_of_the_errors_to_come(gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 9, 3])
    rewards, values = torch.randn(2, 18, generator=g, dtype=torch.float64)
    after = torch.randn(4, generator=g, dtype=torch.float64)
    advantages, returns = gae(rewards, values, lengths, after, gamma=gamma, lam=lam)
    wanted = [
        x
        for r, v, last in zip(torch.split(rewards, lengths.tolist()), torch.split(values, lengths.tolist()), after.tolist())
        for x in definitions.gae(r.tolist(), v.tolist(), last, gamma, lam)
    ]
    expected = torch.tensor(wanted, dtype=torch.float64)
    close(advantages, expected, 1e-12)
    close(returns, expected + values, 1e-12)


def test_group_advantages() -> None:
    rewards = {0: [1.0, 0.0, 0.0, 1.0], 1: [2.0, 2.0], 2: [5.0]}
    samples = [
        Sample(tokens=[1, 2], chosen=[False, True], logprobs=[0, -1], reward=r, group=key)
        for key, got in rewards.items()
        for r in got
    ]
    batch = pack([samples[i] for i in (6, 0, 4, 2, 1, 5, 3)], torch.float64)
    order = batch.rewards.tolist()
    assert order == [5.0, 1.0, 2.0, 0.0, 0.0, 2.0, 1.0]
    deviation = (4 * 0.25 / 3) ** 0.5
    expected = [0, 0.5 / deviation, 0, -0.5 / deviation, -0.5 / deviation, 0, 0.5 / deviation]
    assert group_normalised(batch, eps=0.0).nan_to_num()[::2].tolist() == pytest.approx(expected)
    assert group_centered(batch)[::2].tolist() == [0, 0.5, 0, -0.5, -0.5, 0, 0.5]
    assert leave_one_out(batch)[::2].tolist() == pytest.approx([0, 2 / 3, 0, -2 / 3, -2 / 3, 0, 2 / 3])
    assert informative(batch).tolist() == [False, True, False, True, True, False, True]


def test_leave_one_out_is_against_the_others() -> None:
    batch, _ = random_batch(0, torch.float64)
    found = [float(a) for a in torch.split(leave_one_out(batch), batch.lengths.tolist()) for a in a[:1]]
    for i in range(12):
        others = [float(batch.rewards[j]) for j in range(12) if j != i and batch.groups[j] == batch.groups[i]]
        assert found[i] == pytest.approx(float(batch.rewards[i]) - sum(others) / len(others))


def test_reinforce_plus_plus_advantages() -> None:
    batch, _ = random_batch(2, torch.float64)
    found = discounted_whitened(batch, kl_coefficient=0.1)
    raw, first = [], 0
    for s, length in enumerate(batch.lengths.tolist()):
        span = range(first, first + length)
        cost = {t: 0.1 * float(batch.old[t] - batch.known("reference")[t]) for t in span if batch.mask[t]}
        raw += [float(batch.rewards[s]) - sum(c for t2, c in cost.items() if t2 >= t) for t in span]
        first += length
    chosen = torch.tensor(raw, dtype=torch.float64)[batch.mask]
    assert found[batch.mask].tolist() == pytest.approx(((chosen - chosen.mean()) / chosen.std(correction=0)).tolist(), abs=1e-6)
    assert whitened(batch, found, center=False)[batch.mask].std(correction=0) == pytest.approx(1.0)


def test_overlong_answers_lose_up_to_one() -> None:
    lengths = torch.tensor([0.0, 80.0, 90.0, 100.0, 500.0])
    assert overlong_penalty(lengths, limit=100, buffer=20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_corrections_weigh_by_trainer_over_sampler() -> None:
    batch, _ = random_batch(0, torch.float64)
    batch = replace(batch, advantages=torch.ones_like(batch.old))
    assert torch.equal(truncated(batch).known("advantages"), batch.known("advantages"))
    off = torch.linspace(-2, 2, len(batch.tokens), dtype=torch.float64)
    away = replace(batch, old=batch.sampled + off)
    for t in batch.mask.nonzero()[:, 0].tolist():
        w = float(off[t].exp())
        assert float(truncated(away, cap=1.5).known("advantages")[t]) == pytest.approx(min(w, 1.5))
        assert float(masked(away, low=0.5, high=1.5).known("advantages")[t]) == pytest.approx(w if 0.5 <= w <= 1.5 else 0.0)


def test_on_policy_the_ratio_is_exactly_one_and_a_stale_sampler_shows() -> None:
    batch, _ = random_batch(0, torch.float32)
    here = measure(batch.old, batch)
    assert (here["ratio"], here["ratio_off"], here["kl"], here["clip_share"]) == (1.0, 0.0, 0.0, 0.0)
    stale = measure(batch.old + 0.01, replace(batch, old=batch.sampled, versions=torch.arange(12)))
    assert stale["ratio_off"] == pytest.approx(0.01, rel=1e-2)
    assert stale["stale"] == 11


def test_k3_is_never_negative_and_k1_is_unbiased() -> None:
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    true = float((p.exp() * (p - q)).sum())
    x = (q - p).double()
    assert float((p.exp() * ESTIMATORS["k1"](x)).sum()) == pytest.approx(true)
    assert float((p.exp() * ESTIMATORS["k3"](x)).sum()) == pytest.approx(true)
    assert float(ESTIMATORS["k3"](x).min()) >= 0


def test_entropy_bonus_lowers_the_loss_of_an_uncertain_policy() -> None:
    batch, _ = random_batch(0, torch.float64)
    entropies = torch.arange(len(batch.tokens), dtype=torch.float64)
    assert float(entropy_bonus(entropies, batch, 0.5)) == pytest.approx(-0.5 * float(entropies[batch.mask].mean()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chosen": [True]}, "sample 0 has"),
        ({"tokens": [], "chosen": [], "logprobs": []}, "at least 1"),
        ({"reward": float("nan")}, "not finite"),
        ({"logprobs": [0.0, -float("inf")]}, "not finite"),
    ],
)
def test_bad_samples_are_refused(change: dict[str, object], words: str) -> None:
    good = Sample(tokens=[1, 2], chosen=[False, True], logprobs=[0.0, -1.0], reward=1.0, group=0)
    with pytest.raises(ValueError, match=words):
        pack([replace(good, **change)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least one sample"):
        pack([])
    with pytest.raises(ValueError, match="needs the field advantages"):
        grpo(torch.zeros(2), pack([good]))
    with pytest.raises(ValueError, match=r"rewards has shape \(3,\); wanted \(1,\)"):
        replace(pack([good]), rewards=torch.zeros(3))
