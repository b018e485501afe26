"""AdamW with 8-bit moments: 6 bytes of state per parameter instead of 12, including master weights."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.kernels.optimizer.adamw_8bit import GROUP, adamw_8bit_op
from tilewright.train.optim.flat import Optimizer, PerParameter, matrices_only

__all__ = ["AdamW8bit"]


class AdamW8bit(Optimizer):
    """AdamW with block-wise dynamic quantisation of the moments (Dettmers et al., 2021); see `kernels.optimizer.adamw_8bit`.

    The arguments are those of `AdamW`.
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
        self._moments = (
            self._state("exp_avg_codes", torch.uint8, fill=128),
            self._state("exp_avg_scales", per=GROUP),
            self._state("exp_avg_sq_codes", torch.uint8),
            self._state("exp_avg_sq_scales", per=GROUP),
        )

    def _update(self, grads: list[Tensor], lr: float) -> None:
        adamw_8bit_op(self.master, *self._moments, self.weights, grads, self.rates, self.control, lr, self.eps)
