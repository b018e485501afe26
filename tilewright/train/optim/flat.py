"""The base class of all optimizers: flat float32 master weights; norm of the gradients, clipping and skipping on the device.

An `Optimizer` replaces the memory of the parameters. A 16-bit parameter becomes a view of one flat buffer of its dtype, to
which each step writes the rounded master weights. A float32 parameter becomes a view of the master weights themselves. So
create the optimizer after the weights are loaded, and before a model is compiled or captured. The `nn.Parameter` objects stay
the same.

The state is saved per parameter: `state_dict` returns views of the flat buffers by name, so a checkpoint does not depend on the
layout of the buffers.

This module does not include: learning rate schedules (`train.schedules`), accumulation of gradients, communication.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.kernels.optimizer.grad_norm import clip_scale_op, grad_squares_op
from tilewright.kernels.optimizer.multi_tensor import CHUNK, Slot, control_values, starts_of

__all__ = ["Optimizer", "PerParameter", "Step", "matrices_only"]

PerParameter = Callable[[str, Tensor], float]
"""A function from (name, parameter) to a number."""


class Step(NamedTuple):
    """The result of a step, on the device. Reading it waits until the step is complete."""

    norm: Tensor
    """Norm of all gradients together, before clipping; float64, 0-dim."""
    applied: Tensor
    """1 if the step was applied; 0 if the norm was not finite, so that nothing was changed. float64, 0-dim."""


def matrices_only(weight_decay: float) -> PerParameter:
    """Weight decay for parameters with two or more dimensions only, not for biases and norm weights."""
    return lambda name, parameter: weight_decay if parameter.ndim >= 2 else 0.0


class Optimizer:
    """Parameters, their float32 master weights, and the control values that kernels read. Subclasses add the moments and the
    update rule.

    Args:
        parameters: name -> parameter. All must have the same dtype (float32, bfloat16 or float16) and device. Their memory is
            replaced: they become views of flat buffers.
        betas: decay of the running averages of the subclass; 0 for an average that it does not have.
        max_norm: gradients are scaled down to this global norm; inf: never.
        decay: weight decay of each parameter.
        lr_scale: factor on the learning rate of each parameter, for example for muP.

    Raises:
        ValueError: there are no parameters, they have several dtypes or devices or a dtype without a kernel, or two of them
            share memory.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, betas: tuple[float, float], max_norm: float, decay: PerParameter,
        lr_scale: PerParameter = lambda name, parameter: 1.0,
    ) -> None:  # fmt: skip
        _check(parameters, betas, max_norm)
        first = next(iter(parameters.values()))
        self.names = tuple(parameters)
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self._starts = starts_of([p.numel() for p in parameters.values()])
        self.master = torch.zeros(self._starts[-1], dtype=torch.float32, device=first.device)
        """The master weights, flat, in the layout of `kernels.optimizer.multi_tensor`."""
        self.weights = None if first.dtype == torch.float32 else torch.zeros_like(self.master, dtype=first.dtype)
        """The master weights, rounded to the parameters' dtype; None if that is float32."""
        rates = [[lr_scale(name, p), decay(name, p)] for name, p in parameters.items()]
        self.rates = torch.tensor(rates, dtype=torch.float32, device=first.device)
        self.control = torch.tensor(control_values(*betas, max_norm), dtype=torch.float64, device=first.device)
        self._states: dict[str, tuple[Tensor, int]] = {"master": (self.master, 1)}
        self._squares = torch.zeros(self.master.numel() // CHUNK, dtype=torch.float32, device=first.device)
        with torch.no_grad():
            for p, view in zip(parameters.values(), self._views(self.master)):
                view.copy_(p)
            for p, view in zip(parameters.values(), self._views(self.master if self.weights is None else self.weights)):
                view.copy_(p)
                p.data = view

    def _state(self, name: str, dtype: torch.dtype = torch.float32, per: int = 1, fill: int = 0) -> Tensor:
        """Create a flat state with one number for every `per` elements. All numbers are `fill` at first."""
        state = torch.full((self.master.numel() // per,), fill, dtype=dtype, device=self.master.device)
        self._states[name] = (state, per)
        return state

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer, as a view with the parameter's shape."""
        parts = zip(self._starts, self.shapes.values())
        return [flat[start : start + shape.numel()].view(shape) for start, shape in parts]

    def _in_order(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """The gradients in the order of the parameters. Raises ValueError if they do not match the parameters."""
        missing = [name for name in self.names if name not in grads]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"there is no gradient for {missing[0]}{more}; give one for every parameter, with zeros for a parameter "
                "that was not used"
            )
        for name, shape in self.shapes.items():
            if grads[name].shape != shape:
                raise ValueError(
                    f"the gradient of {name} has shape {tuple(grads[name].shape)}, but its parameter has shape {tuple(shape)}"
                )
        kinds = sorted({f"{grads[name].dtype} on {grads[name].device}" for name in self.names})
        if len(kinds) > 1 or grads[self.names[0]].device != self.master.device:
            raise ValueError(
                f"the gradients are {', '.join(kinds)}, but must all have one dtype and be on {self.master.device}; "
                "convert them first"
            )
        return [grads[name] for name in self.names]

    @torch.no_grad()
    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The sums of squares for the norm: float32 [chunks], one sum for every 4,096 elements of each parameter, in order.

        The next call overwrites them. If a model is divided over ranks, the ranks concatenate their sums and pass all of them
        to `step`.
        """
        grad_squares_op(self._squares, self._in_order(grads))
        return self._squares

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: float, *, squares: Tensor | None = None) -> Step:
        """Update every parameter, unless the norm of the gradients is not finite. Does not wait for the device.

        Args:
            grads: name -> gradient, with the shape of the parameter; all of the same dtype. They are not changed.
            lr: the learning rate of this step.
            squares: the sums of squares for the whole model, if this optimizer has only a part of the model.

        Raises:
            ValueError: a gradient is missing, its shape differs from its parameter's, or gradients have several dtypes.
        """
        given = self._in_order(grads)
        clip_scale_op(self.squares(grads) if squares is None else squares, self.control)
        self._update(given, lr)
        return Step(self.control[Slot.NORM].clone(), self.control[Slot.APPLIED].clone())

    def _update(self, grads: list[Tensor], lr: float) -> None:
        """Update the master weights, `weights` and the moments, if `control` allows it."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a step depends on: "<state>.<parameter>" -> a view of the state, and "control"."""
        found = {"control": self.control}
        for state, (flat, per) in self._states.items():
            for start, (name, shape) in zip(self._starts, self.shapes.items()):
                size = -(-shape.numel() // per)
                view = flat[start // per : start // per + size]
                found[f"{state}.{name}"] = view.view(shape) if per == 1 else view
        return found

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Copy a saved state, and set the parameters to the saved weights.

        Raises:
            ValueError: the state is for another optimizer or for other parameters; nothing was changed.
        """
        own = self.state_dict()
        wrong = sorted(own.keys() ^ saved.keys())
        if wrong:
            where = "is missing from" if wrong[0] in own else "is not expected in"
            raise ValueError(f"{wrong[0]} {where} the saved state, which is for another optimizer or another model")
        for name, state in own.items():
            if state.shape != saved[name].shape or state.dtype != saved[name].dtype:
                got = f"{tuple(saved[name].shape)} {saved[name].dtype}"
                raise ValueError(f"{name} is {got} in the saved state, wanted {tuple(state.shape)} {state.dtype}")
        for name, state in own.items():
            state.copy_(saved[name])
        if self.weights is not None:
            self.weights.copy_(self.master)


def _check(parameters: Mapping[str, Tensor], betas: tuple[float, float], max_norm: float) -> None:
    """Raise ValueError for parameters or options that an optimizer does not accept."""
    if not parameters:
        raise ValueError("the optimizer got no parameters; check that the model has parameters that are not frozen")
    kinds = sorted({f"{p.dtype} on {p.device}" for p in parameters.values()})
    if len(kinds) > 1:
        raise ValueError(
            f"the parameters of an optimizer must have one dtype and device, got {', '.join(kinds)}; use one optimizer "
            "for each kind"
        )
    dtype = next(iter(parameters.values())).dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"parameters are {dtype}, wanted float32, bfloat16 or float16")
    homes: dict[int, str] = {}
    for name, p in parameters.items():
        before = homes.setdefault(p.data_ptr(), name) if p.numel() and not p.is_meta else name
        if before != name:
            raise ValueError(f"{before} and {name} share the same memory; give a tied parameter only once")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}, wanted numbers of at least 0 and below 1")
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, wanted a number above 0, or inf for no clipping")
