"""Plain stochastic gradient descent."""

import math
from collections.abc import Mapping

from torch import Tensor

from tilewright.kernels.optimizer.sgd import sgd_op
from tilewright.train.optim.flat import Optimizer, PerParameter, matrices_only

__all__ = ["SGD"]


class SGD(Optimizer):
    """p <- p - lr (g + decay p). The arguments are those of `AdamW`."""

    def __init__(
        self, parameters: Mapping[str, Tensor], *, weight_decay: float = 0.0, max_norm: float = math.inf,
        decay: PerParameter | None = None, lr_scale: PerParameter = lambda name, parameter: 1.0,
    ) -> None:  # fmt: skip
        decay = decay or matrices_only(weight_decay)
        super().__init__(parameters, betas=(0.0, 0.0), max_norm=max_norm, decay=decay, lr_scale=lr_scale)

    def _update(self, grads: list[Tensor], lr: float) -> None:
        sgd_op(self.master, self.weights, grads, self.rates, self.control, lr)
