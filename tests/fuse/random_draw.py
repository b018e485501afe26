"""Draws a random program: proposes steps (random_ops.py), runs each in float64 on both sizes of inputs, keeps what works.

A step is kept when torch takes it, when its values are finite and neither tiny nor huge, and when its tensors are small. So a
program is legal by construction, and a comparison in float32 means something.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuse.random_program import LAYER, Input, Program, double

LARGEST = 6000
"""Elements of a value."""
RMS = (0.05, 20.0)
"""Of a floating-point value."""


class Rejected(Exception):
    """A proposal that does not fit the program so far."""


class Draw:
    """A program while it grows.

    Args:
        seed: of all that is drawn.
    """

    def __init__(self, seed: int):
        self.seed, self.rng = seed, random.Random(seed)
        self.program = Program()
        self.module = nn.Module()
        self.values: list[dict[str, Any]] = [{}, {}]
        """By name, of the first and of the second sizes."""
        self.proposed: dict[str, str] = {}
        """Every layer that any step has asked for."""
        self.made = 0

    # ---- what steps ask for

    def chance(self, p: float) -> bool:
        """True with probability `p`."""
        return self.rng.random() < p

    def one(self, *of: Any) -> Any:
        """One of them."""
        return self.rng.choice(of)

    def pick(self, fits: Callable[[Tensor], bool] = lambda t: True, dtype: torch.dtype = torch.float64) -> str:
        """The name of a value, later ones more often. Raises Rejected: none fits."""
        found = ((n, v) for n, v in self.values[0].items() if isinstance(v, Tensor) and v.dtype == dtype)
        names = [n for n, v in found if fits(v) and v.isfinite().all()]
        if not names:
            raise Rejected
        return names[-1] if self.chance(0.5) else self.rng.choice(names[-6:] if self.chance(0.6) else names)

    def of(self, name: str) -> Tensor:
        """A value, of the first sizes."""
        return self.values[0][name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the first sizes."""
        return tuple(self.of(name).shape)

    def fixed(self, name: str, dim: int) -> bool:
        """Whether a dimension is the same in both sizes, as a weight needs it."""
        return self.values[0][name].shape[dim] == self.values[1][name].shape[dim]

    def width(self, name: str, dim: int = -1) -> int:
        """A dimension that a weight can have. Raises Rejected: the two sizes differ in it."""
        if not self.fixed(name, dim):
            raise Rejected
        return self.of(name).shape[dim]

    def size(self, name: str, dim: int) -> str:
        """A dimension as text: a number, or where the sizes differ `v.shape[dim]`."""
        return str(self.of(name).shape[dim]) if self.fixed(name, dim) else f"{name}.shape[{dim}]"

    def layer(self, made: str) -> str:
        """A layer, parameter or buffer as text, `self.m3`: the program has it once a step reads it."""
        name = f"m{len(self.proposed)}"
        self.proposed[name] = made
        return f"self.{name}"

    def _made(self, text: str) -> None:
        """Make the layers that a step reads. Raises what torch raises."""
        for name in LAYER.findall(text):
            if name not in self.program.layers:
                made = self.proposed[name]
                self.program = replace(self.program, layers={**self.program.layers, name: made})
                value = getattr(Program((), {name: made}, (), "None").module(self.seed).double(), name)
                self.module.register_buffer(name, value) if type(value) is Tensor else setattr(self.module, name, value)

    def param(self, *size: int, scale: float = 1.0) -> str:
        """A new parameter of random normal numbers."""
        times = "" if scale == 1.0 else f" * {scale:.3g}"
        return self.layer(f"nn.Parameter(torch.randn({', '.join(map(str, size))}){times})")

    def input(self, first: tuple[int, ...], second: tuple[int, ...], kind: str = "float", layout: str = "contiguous") -> str:
        """A new argument."""
        given = Input(f"a{len(self.program.inputs)}", (first, second), kind, layout)
        self.program = replace(self.program, inputs=(*self.program.inputs, given))
        for which in (0, 1):
            torch.manual_seed(self.seed + len(self.program.inputs))
            self.values[which][given.name] = double(eval(given.text(which), {"torch": torch}))
        return given.name

    def step(self, text: str) -> str:
        """A new value. Raises Rejected, or what torch raises."""
        name = f"v{self.made}"
        self.made += 1
        self._made(text)
        with torch.no_grad():
            results = [eval(text, {"torch": torch, "nn": nn, "F": F, "self": self.module, **own}) for own in self.values]
        for result in results:
            self._sane(result)
        if isinstance(results[0], Tensor) and results[0].ndim != results[1].ndim:
            raise Rejected
        for own, result in zip(self.values, results, strict=True):
            own[name] = result
        self.program = replace(self.program, steps=(*self.program.steps, (name, text)))
        return name

    def writable(self, name: str) -> bool:
        """Whether a step may write to it: it shares no memory with a parameter, which a module may not change."""
        mine = {t.untyped_storage().data_ptr() for t in (*self.module.parameters(), *self.module.buffers())}
        return self.of(name).untyped_storage().data_ptr() not in mine

    # ---- keeping and dropping

    @staticmethod
    def _sane(value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        if not 0 < value.numel() <= LARGEST or value.ndim > 6 or value.dtype == torch.float32:
            raise Rejected
        if value.is_floating_point():
            finite = value[value.abs() < 1e6]  # masked scores are -inf or -1e9
            if value.isnan().any() or not finite.numel() or (finite.numel() < value.numel() and value.ndim != 4):
                raise Rejected
            if finite.any() and not RMS[0] <= float(finite.square().mean().sqrt()) <= RMS[1]:
                raise Rejected

    def attempt(self, op: Callable[["Draw"], Any]) -> bool:
        """Let `op` add its steps, all or none."""
        before, made = self.program, self.made
        try:
            op(self)
        except (Rejected, RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError):
            wrote = len(self.program.steps) >= len(before.steps)
            self.program, self.made = before, made
            if wrote:
                self._replay()
            return False
        # A step in place changes values that were judged before.
        try:
            for own in self.values:
                for value in own.values():
                    self._sane(value)
        except Rejected:
            self.program, self.made = before, made
            self._replay()
            return False
        return True

    def _replay(self) -> None:
        """All values anew: a dropped step may have written to them."""
        for which, own in enumerate(self.values):
            own.clear()
            for at, given in enumerate(self.program.inputs):
                torch.manual_seed(self.seed + at + 1)
                own[given.name] = double(eval(given.text(which), {"torch": torch}))
            with torch.no_grad():
                for name, text in self.program.steps:
                    own[name] = eval(text, {"torch": torch, "nn": nn, "F": F, "self": self.module, **own})

    def returning(self) -> Program:
        """The program, with one or more of its values as results, in some structure."""
        tensors = [n for n, v in self.values[0].items() if isinstance(v, Tensor) and n.startswith("v")]
        read = " ".join(text for _, text in self.program.steps)
        ends = [
            n for n in tensors if f"{n} " not in read.replace(")", " ").replace(",", " ").replace(".", " ") + " "
        ] or tensors[-1:]
        chosen = [n for n in ends if self.chance(0.8)] or ends[-1:]
        chosen += [n for n in tensors if n not in chosen and self.chance(0.08)]
        if len(chosen) == 1 and self.chance(0.8):
            text = chosen[0]
        elif self.chance(0.5):
            text = f"({', '.join(chosen)},)"
        else:
            text = "{" + ", ".join(f'"{n}": {n}' for n in chosen) + "}"
        return replace(self.program, returned=text).without_dead()


def values_of(program: Program, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every value of a program in float64, for the first and the second sizes. Raises what torch raises."""
    module, found = program.module(seed).double(), ({}, {})
    for which, own in enumerate(found):
        own |= {i.name: double(t) for i, t in zip(program.inputs, program.arguments(which, seed), strict=True)}
        with torch.no_grad():
            for name, text in program.steps:
                own[name] = eval(text, {"torch": torch, "nn": nn, "F": F, "self": module, **own})
    return found
