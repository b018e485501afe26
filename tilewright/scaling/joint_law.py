"""The joint law: a floor plus one power of a sum of two terms, for model size and for tokens.

    L(N, D) = E + (A / N^alpha + B / D^beta)^gamma

With gamma = 1 it is the law of Hoffmann et al. 2022. With E = 0 and beta = 1 it is that of Kaplan et al. (Scaling Laws for
Neural Language Models, 2020, equation 1.5), in which a model that is too small gains less from more tokens. Runs with few
tokens for their size have such a curvature. The sum of two powers (gamma = 1) cannot describe it, and explains it by a floor.
Predictions are averaged over values of the floor E (averaged.py).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tilewright.scaling.averaged import AveragedLaw, fit_floors
from tilewright.scaling.runs import Array, Runs

__all__ = ["JointLaw", "fit_joint_law"]

_LIMITS = ((-40.0, 20.0), (-6.0, 2.0), (-40.0, 20.0), (-6.0, 2.0), (-4.0, 1.5))
_GAMMAS = (0.5, 0.2, 1.0)
"""Start values of gamma. The fit for floor 0 begins at each of them; the fits for the other floors begin at the first of them,
and at the result of the previous floor."""


@dataclass(frozen=True, eq=False, kw_only=True)
class JointLaw(AveragedLaw):
    """numbers [F, 5]: log A, log alpha, log B, log beta, log gamma, for sizes divided by e^size and tokens divided by e^tokens.

    flops_per_param_token: FLOPs of a run / (N D), to convert a budget to tokens.
    """

    size: float
    tokens: float
    flops_per_param_token: float

    NAME: ClassVar = "joint law"
    COUNT: ClassVar = 5
    CENTERS: ClassVar = ("size", "tokens", "flops_per_param_token")

    def best_size(self, flops: float) -> float:
        """N* of a budget: the geometric mean over the floors; at least 1, and at most the size for which 1 token remains.

        In one fit, N* is the solution of alpha A / N^alpha = beta B / D^beta with N D = flops / flops_per_param_token.
        """
        whole = math.log(flops / self.flops_per_param_token)
        product = whole - self.size - self.tokens
        log_a, log_alpha, log_b, log_beta, _ = self.numbers.T
        alpha, beta = np.exp(log_alpha), np.exp(log_beta)
        best = (log_alpha + log_a - log_beta - log_b + beta * product) / (alpha + beta)
        return math.exp(min(max(self.size + float(self.weights @ best), 0.0), whole))

    def loss(self, params: float, tokens: float) -> tuple[float, tuple[float, float]]:
        """(predicted loss of a run, its 95 % interval) for `params` parameters after `tokens` tokens."""
        return self.averaged((math.log(params) - self.size, math.log(tokens) - self.tokens))

    def best_loss(self, flops: float) -> tuple[float, tuple[float, float]]:
        """(predicted loss of a run that spends a budget on a model of the best size, its 95 % interval)."""
        params = self.best_size(flops)
        return self.loss(params, flops / self.flops_per_param_token / params)

    @staticmethod
    def form(p: Array, floor: float, x: Array) -> tuple[Array, Array]:
        """x [M, 2]: log N - size, log D - tokens."""
        (n, d), (alpha, beta, gamma) = x.T, np.exp(p[[1, 3, 4]])
        by_size, by_tokens = p[0] - alpha * n, p[2] - beta * d
        both = np.logaddexp(by_size, by_tokens)
        power = np.exp(gamma * both)
        steep = gamma * power / (floor + power)
        size, tokens = steep * np.exp(by_size - both), steep * np.exp(by_tokens - both)
        slopes = np.stack([size, -size * alpha * n, tokens, -tokens * beta * d, steep * both], axis=1)
        return np.log(floor + power), slopes


def fit_joint_law(runs: Runs) -> JointLaw:
    """Fit the law to runs for each floor, and compute the weights of the floors.

    Raises:
        ValueError: there are too few runs or budgets.
        MissingExtra: scipy is not installed; it is in the extra [scaling].
    """
    runs.check_enough()
    size, tokens = float(np.log(runs.params).mean()), float(np.log(runs.tokens).mean())
    x = np.stack([np.log(runs.params) - size, np.log(runs.tokens) - tokens], axis=1)
    y = np.log(runs.loss)

    def starts(floor: float, below: Array | None) -> list[Array]:
        above = np.log(np.exp(y) - floor)
        level, fall = float(above.mean()), max(0.02, float(-np.polyfit(x[:, 1], above, 1)[0]))
        gammas = _GAMMAS if below is None else _GAMMAS[:1]
        half = [level / gamma - math.log(2) for gamma in gammas]
        exponents = [math.log(2 * fall / gamma) for gamma in gammas]
        begin = [np.array([a, e, a, e, math.log(gamma)]) for a, e, gamma in zip(half, exponents, gammas)]
        return begin if below is None else [*begin, below]

    fields = fit_floors(JointLaw.form, x, y, starts, _LIMITS)
    return JointLaw(size=size, tokens=tokens, flops_per_param_token=runs.flops_per_param_token, **fields)
