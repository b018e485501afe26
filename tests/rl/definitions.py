"""The losses once more, token by token in loops, in float64, from the formulas of the papers: what the tests compare with.

Here a batch is a list of answers, each a list of (log p, old log p, advantage, reference log p) of its chosen tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Answer = list[tuple[Tensor, float, float, float]]
Answers = list[Answer]


def clip(ratio: Tensor, low: float, high: float) -> Tensor:
    if ratio.item() < 1 - low:
        return torch.tensor(1 - low, dtype=torch.float64)
    if ratio.item() > 1 + high:
        return torch.tensor(1 + high, dtype=torch.float64)
    return ratio


def surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    one, other = ratio * advantage, clip(ratio, low, high) * advantage
    return one if one.item() <= other.item() else other


def answered(answers: Answers) -> Answers:
    return [answer for answer in answers if answer]


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def ppo(answers: Answers, low: float, high: float) -> Tensor:
    tokens = [token for answer in answers for token in answer]
    return -sum((surrogate(torch.exp(p - old), a, low, high) for p, old, a, _ in tokens), zero()) / len(tokens)


def ppo_dual(answers: Answers, low: float, high: float, dual: float) -> Tensor:
    total, count = zero(), 0
    for answer in answers:
        for p, old, a, _ in answer:
            gain = surrogate(torch.exp(p - old), a, low, high)
            if a < 0 and gain.item() < dual * a:
                gain = zero() + dual * a
            total, count = total + gain, count + 1
    return -total / count


def grpo(answers: Answers, low: float, high: float) -> Tensor:
    total = zero()
    for answer in answered(answers):
        total = total + sum((surrogate(torch.exp(p - old), a, low, high) for p, old, a, _ in answer), zero()) / len(answer)
    return -total / len(answered(answers))


def dr_grpo(answers: Answers, low: float, high: float, longest: int) -> Tensor:
    total = zero()
    for answer in answered(answers):
        total = total + sum((surrogate(torch.exp(p - old), a, low, high) for p, old, a, _ in answer), zero()) / longest
    return -total / len(answered(answers))


def gspo(answers: Answers, low: float, high: float) -> Tensor:
    total = zero()
    for answer in answered(answers):
        mean = sum((p - old for p, old, _, _ in answer), zero()) / len(answer)
        total = total + surrogate(torch.exp(mean), answer[0][2], low, high)
    return -total / len(answered(answers))


def cispo(answers: Answers, low: float, high: float) -> Tensor:
    total, count = zero(), 0
    for answer in answers:
        for p, old, a, _ in answer:
            weight = min(max(math.exp(p.item() - old), 1 - low), 1 + high)
            total, count = total + weight * a * p, count + 1
    return -total / count


def reinforce(answers: Answers) -> Tensor:
    total = zero()
    for answer in answered(answers):
        total = total + sum((a * p for p, _, a, _ in answer), zero())
    return -total / len(answered(answers))


def kl(answers: Answers, estimator: str) -> Tensor:
    formulas: dict[str, Callable[[Tensor, float], Tensor]] = {
        "k1": lambda p, ref: p - ref,
        "k2": lambda p, ref: 0.5 * (p - ref) ** 2,
        "k3": lambda p, ref: torch.exp(ref - p) - 1 - (ref - p),
    }
    tokens = [token for answer in answers for token in answer]
    return sum((formulas[estimator](p, ref) for p, _, _, ref in tokens), zero()) / len(tokens)


def gae(rewards: list[float], values: list[float], after: float, gamma: float, lam: float) -> list[float]:
    """The sum of the discounted errors that are still to come, written out for every step."""
    ahead = [*values[1:], after]
    errors = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, ahead)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]
