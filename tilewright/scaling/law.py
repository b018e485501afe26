"""The parametric scaling law L(N, D) = E + A / N^alpha + B / D^beta, and its optimum for a budget.

N: parameters. D: training tokens. L: loss in nats per token. Source: Hoffmann et al., Training Compute-Optimal Large Language
Models, 2022, section 3.3 and equation 4. This module has no dependencies.
"""

import math
from dataclasses import dataclass

__all__ = ["HOFFMANN", "Law", "Optimum"]

_LARGEST_LOG = 600.0
"""The logarithms of A, B and E are limited to plus and minus this, so that their products are valid float64 numbers."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best use of a budget of `flops` operations: `params` parameters and `tokens` tokens, and the loss of that run."""

    flops: float
    params: float
    tokens: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Law:
    """The five parameters of the law. `E` is the floor: the loss that no model can go below."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @classmethod
    def from_logs(cls, a: float, b: float, e: float, alpha: float, beta: float) -> "Law":
        """The law with the variables of a fit: log A, log B, log E, alpha, beta. A, B and E are kept above 0."""
        A, B, E = (math.exp(min(max(x, -_LARGEST_LOG), _LARGEST_LOG)) for x in (a, b, e))
        return cls(E=E, A=A, B=B, alpha=alpha, beta=beta)

    @property
    def logs(self) -> tuple[float, float, float, float, float]:
        """log A, log B, log E, alpha, beta."""
        return math.log(self.A), math.log(self.B), math.log(self.E), self.alpha, self.beta

    @property
    def params_exponent(self) -> float:
        """a in N* ~ C^a; the exponent of the tokens is 1 - a."""
        return self.beta / (self.alpha + self.beta)

    def loss(self, params: float, tokens: float) -> float:
        """The predicted loss of a model with `params` parameters after `tokens` tokens."""
        return self.E + self.A * params**-self.alpha + self.B * tokens**-self.beta

    def optimum(self, flops: float, flops_per_param_token: float = 6.0) -> Optimum:
        """The parameters and tokens with the lowest loss for the budget C = k N D, k = `flops_per_param_token`.

        Raises:
            ValueError: the budget or k is not positive, or an exponent is not, so that there is no minimum.
        """
        if not (0 < flops < math.inf and 0 < flops_per_param_token < math.inf):
            raise ValueError(
                f"the budget is {flops:g} FLOPs and flops_per_param_token is {flops_per_param_token:g}; both must be "
                "finite and above 0"
            )
        if self.alpha <= 0 or self.beta <= 0:
            raise ValueError(
                f"the law has no minimum with alpha {self.alpha:.3g} and beta {self.beta:.3g}; both must be above 0"
            )
        product = math.log(flops / flops_per_param_token)
        shift = math.log(self.alpha * self.A / (self.beta * self.B)) / (self.alpha + self.beta)
        params = math.exp(shift + self.params_exponent * product)
        tokens = math.exp(product) / params
        return Optimum(flops=flops, params=params, tokens=tokens, loss=self.loss(params, tokens))


HOFFMANN = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
"""As printed in the Chinchilla paper (equation 10). The paper's own data points reject it: see docs/scaling.md."""
