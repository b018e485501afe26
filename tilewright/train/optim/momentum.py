"""Stochastic gradient descent with momentum, optionally Nesterov's."""

import math
from collections.abc import Mapping

from torch import Tensor

from tilewright.kernels.optimizer.sgd import momentum_op
from tilewright.train.optim.flat import Optimizer, PerParameter, matrices_only

__all__ = ["Momentum"]


class Momentum(Optimizer):
    """b <- momentum b + g + decay p; p <- p - lr b, or with `nesterov` p - lr (g + decay p + momentum b).

    Args:
        momentum: decay of the buffer b.
        nesterov: use Nesterov's look-ahead (Sutskever et al., 2013).
        The other arguments are those of `AdamW`.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, momentum: float = 0.9, nesterov: bool = True, weight_decay: float = 0.0,
        max_norm: float = math.inf, decay: PerParameter | None = None,
        lr_scale: PerParameter = lambda name, parameter: 1.0,
    ) -> None:  # fmt: skip
        decay = decay or matrices_only(weight_decay)
        super().__init__(parameters, betas=(momentum, 0.0), max_norm=max_norm, decay=decay, lr_scale=lr_scale)
        self.nesterov = nesterov
        self.buffer = self._state("momentum")

    def _update(self, grads: list[Tensor], lr: float) -> None:
        momentum_op(self.master, self.buffer, self.weights, grads, self.rates, self.control, lr, self.nesterov)
