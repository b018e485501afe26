"""AdamW with float32 moments."""

import math
from collections.abc import Mapping

from torch import Tensor

from tilewright.kernels.optimizer.adamw import adamw_op
from tilewright.train.optim.flat import Optimizer, PerParameter, matrices_only

__all__ = ["AdamW"]


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019); the formula is in `kernels.optimizer.adamw`.

    Args:
        parameters: name -> parameter. Their memory is replaced, as described in `Optimizer`.
        betas: decay of the running averages of the gradients and of the squared gradients.
        eps: added to the square root of the second moment.
        weight_decay: applies to parameters with two or more dimensions. `decay` overrides it with a value per parameter.
        max_norm: gradients are scaled down to this global norm; inf: never.
        lr_scale: factor on the learning rate of each parameter.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, max_norm: float = math.inf, decay: PerParameter | None = None,
        lr_scale: PerParameter = lambda name, parameter: 1.0,
    ) -> None:  # fmt: skip
        super().__init__(
            parameters, betas=betas, max_norm=max_norm, decay=decay or matrices_only(weight_decay), lr_scale=lr_scale
        )
        self.eps = eps
        self.exp_avg = self._state("exp_avg")
        self.exp_avg_sq = self._state("exp_avg_sq")

    def _update(self, grads: list[Tensor], lr: float) -> None:
        adamw_op(
            self.master, self.exp_avg, self.exp_avg_sq, self.weights, grads, self.rates, self.control, lr, self.eps
        )  # fmt: skip
