"""Muon for the matrices of a model, AdamW for the rest (Jordan et al., "Muon: An optimizer for hidden layers", 2024).

    b <- beta b + (1 - beta) g;  u = (1 - beta) g + beta b;  O = orthogonalised u;  p <- p - lr (s O + d p)

O comes from five Newton-Schulz steps in bfloat16, which start at u / |u|: x <- a x + (b x x^T + c (x x^T)^2) x. The constants
(a, b, c) make small singular values grow quickly; all of them end between 0.7 and 1.2. The factor s = 0.2 sqrt(max(rows,
columns)) gives updates of the same size as AdamW's, so both can use the same learning rate (Liu et al., "Muon is scalable for
LLM training", 2025).

Matrices of the same shape are orthogonalised as one batch. Matrix products are torch's. The launch of `SGD` updates the
weights.
Not supported: an optimizer that has only a part of a matrix, because orthogonalisation needs the whole matrix.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tilewright.kernels.optimizer.multi_tensor import Slot, applied
from tilewright.kernels.optimizer.sgd import sgd_op
from tilewright.train.optim.adamw import AdamW
from tilewright.train.optim.flat import Optimizer, PerParameter, Step, matrices_only

__all__ = ["Muon", "hidden_matrices", "orthogonalized"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def hidden_matrices(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix between the embedding and the output layer, judged by its shape and by the usual names of
    these two."""
    return parameter.ndim == 2 and not any(word in name for word in ("embed", "head"))


def orthogonalized(u: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Bring the singular values of matrices [..., rows, columns] close to 1. The products and the result are in `dtype`."""
    a, b, c = COEFFICIENTS
    tall = u.shape[-2] > u.shape[-1]
    x = (u.mT if tall else u).to(dtype).reshape(-1, min(u.shape[-2:]), max(u.shape[-2:]))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(u.shape)


class _Matrices(Optimizer):
    """The Muon update, for matrices only."""

    def __init__(self, parameters: Mapping[str, Tensor], *, beta: float, nesterov: bool, max_norm: float, decay: PerParameter,
                 lr_scale: PerParameter) -> None:  # fmt: skip
        size = {name: 0.2 * math.sqrt(max(p.shape)) for name, p in parameters.items()}
        # SGD's launch multiplies decay by the factor on the learning rate. Here that factor includes the size of an update, on
        # which decay must not depend.
        super().__init__(
            parameters, betas=(beta, 0.0), max_norm=max_norm,
            decay=lambda name, p: decay(name, p) / size[name], lr_scale=lambda name, p: size[name] * lr_scale(name, p),
        )  # fmt: skip
        self.nesterov = nesterov
        self._buffers = self._views(self._state("momentum"))
        self._unscaled = self.control.clone()
        by_shape: dict[torch.Size, list[int]] = {}
        for i, shape in enumerate(self.shapes.values()):
            by_shape.setdefault(shape, []).append(i)
        self._batches = tuple(by_shape.values())

    def _update(self, grads: list[Tensor], lr: float) -> None:
        missing = (1 - self.control[Slot.BETA1]).float()
        scale, good = self.control[Slot.SCALE].float(), applied(self.control)
        updates: list[Tensor] = [grads[0]] * len(grads)
        for batch in self._batches:
            grad = torch.stack([grads[i] for i in batch]).float() * scale
            old = torch.stack([self._buffers[i] for i in batch])
            new = torch.where(good, old + missing * (grad - old), old)
            move = grad + (1 - missing) * (new - grad) if self.nesterov else new
            for i, buffer, update in zip(batch, new, orthogonalized(move)):
                self._buffers[i].copy_(buffer)
                updates[i] = update
        self._unscaled[Slot.APPLIED] = self.control[Slot.APPLIED]
        sgd_op(self.master, self.weights, updates, self.rates, self._unscaled, lr)


class Muon:
    """Muon for hidden matrices; AdamW for embeddings, output layer and vectors. Both share the learning rate and the norm.

    Args:
        parameters: name -> parameter. Their memory is replaced, as described in `Optimizer`.
        muon: (name, parameter) -> whether Muon updates it. By default: all matrices except embedding and output layer.
        momentum: decay of Muon's running average of the gradients.
        nesterov: orthogonalise the average with Nesterov's look-ahead.
        The other arguments are those of `AdamW`. `betas` and `eps` apply to the parameters that AdamW updates.

    Raises:
        ValueError: as in `Optimizer`; or `muon` selects no parameter, or one that is not a matrix.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, muon: Callable[[str, Tensor], bool] = hidden_matrices,
        momentum: float = 0.95, nesterov: bool = True, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, max_norm: float = math.inf, decay: PerParameter | None = None,
        lr_scale: PerParameter = lambda name, parameter: 1.0,
    ) -> None:  # fmt: skip
        taken = {name: p for name, p in parameters.items() if muon(name, p)}
        rest = {name: p for name, p in parameters.items() if name not in taken}
        if not taken:
            raise ValueError("Muon needs at least one hidden matrix, but none is among the parameters; use AdamW")
        for name, p in taken.items():
            if p.ndim != 2:
                raise ValueError(f"Muon supports only matrices, but {name} has shape {tuple(p.shape)}; use AdamW for it")
        decay = decay or matrices_only(weight_decay)
        self._parts: list[Optimizer] = [
            _Matrices(taken, beta=momentum, nesterov=nesterov, max_norm=max_norm, decay=decay, lr_scale=lr_scale)
        ]
        if rest:
            self._parts.append(AdamW(rest, betas=betas, eps=eps, max_norm=max_norm, decay=decay, lr_scale=lr_scale))

    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """As `Optimizer.squares`. The sums of Muon's matrices come first."""
        return torch.cat([part.squares(grads) for part in self._parts])

    def step(self, grads: Mapping[str, Tensor], lr: float, *, squares: Tensor | None = None) -> Step:
        """As `Optimizer.step`."""
        squares = self.squares(grads) if squares is None else squares
        steps = [part.step(grads, lr, squares=squares) for part in self._parts]
        return steps[0]

    def state_dict(self) -> dict[str, Tensor]:
        """As `Optimizer.state_dict`. Names begin with "muon." or "adamw."."""
        return {f"{name}.{key}": t for name, part in zip(_PARTS, self._parts) for key, t in part.state_dict().items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """As `Optimizer.load_state_dict`."""
        if wrong := sorted(self.state_dict().keys() ^ saved.keys()):
            raise ValueError(
                f"{wrong[0]} is in only one of the saved state and this optimizer, so they are for different models"
            )
        for name, part in zip(_PARTS, self._parts):
            own = {key.removeprefix(f"{name}."): t for key, t in saved.items() if key.startswith(f"{name}.")}
            part.load_state_dict(own)


_PARTS = ("muon", "adamw")
