"""A program of torch calls as data: its inputs, layers and steps, its Python source, and what it computes in float64.

A step is a line `v3 = F.gelu(v2)`. A program is written for two sets of input sizes at once (another batch, another length), so
that one source must serve both.
"""

import linecache
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

IDS = 11
"""Input ids are below this."""

_NAME = re.compile(r"\b[av]\d+\b")
LAYER = re.compile(r"\bself\.(\w+)")


@dataclass(frozen=True)
class Input:
    """A tensor argument, in two sizes."""

    name: str
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    kind: str = "float"
    """float; ids: int64 below IDS; bool; mask: float, 0 or -inf with a 0 in every row."""
    layout: str = "contiguous"
    """How it lies in memory: contiguous, channels_last (of images), transposed, offset (behind a first row of its storage)."""

    def text(self, which: int) -> str:
        """How the tensor is made, as Python."""
        size = ", ".join(map(str, self.sizes[which]))
        if self.kind == "ids":
            return f"torch.randint({IDS}, ({size},))"
        if self.kind == "bool":
            return f"torch.rand({size}) > 0.3"
        if self.kind == "mask":
            return f"torch.zeros({size}).masked_fill(torch.rand({size}) > 0.7, -torch.inf).index_fill(-1, torch.tensor(0), 0.0)"
        size, last = list(self.sizes[which]), len(self.sizes[which]) - 1
        if self.layout == "channels_last":
            return f"torch.randn({size}).contiguous(memory_format=torch.channels_last)"
        if self.layout == "transposed":
            size[0], size[last] = size[last], size[0]
            return f"torch.randn({size}).transpose(0, {last})"
        if self.layout == "offset":
            return f"torch.randn({[size[0] + 1, *size[1:]]})[1:]"
        return f"torch.randn({size})"


@dataclass(frozen=True)
class Program:
    """A module with one `forward`."""

    inputs: tuple[Input, ...] = ()
    layers: dict[str, str] = field(default_factory=dict)
    """Attribute -> the Python that makes it: a module, a parameter, or a tensor, which becomes a buffer."""
    steps: tuple[tuple[str, str], ...] = ()
    """(name, expression), in order."""
    returned: str = ""
    """The expression that `forward` returns."""

    def source(self) -> str:
        """The class, as Python."""
        lines = ["class M(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        for name, made in self.layers.items():
            kept = f"self.{name} = {made}" if made.startswith("nn.") else f'self.register_buffer("{name}", {made})'
            lines.append(f"        {kept}")
        lines += [f"    def forward(self, {', '.join(i.name for i in self.inputs)}):"]
        lines += [f"        {name} = {text}" for name, text in self.steps]
        return "\n".join([*lines, f"        return {self.returned}"])

    def snippet(self, seed: int) -> str:
        """All that is needed to run it, as Python."""
        made = ", ".join(i.text(0) for i in self.inputs)
        other = ", ".join(i.text(1) for i in self.inputs)
        return "\n".join([
            "import torch; from torch import nn; import torch.nn.functional as F",
            self.source(),
            f"torch.manual_seed({seed}); m = M().eval().requires_grad_(False)",
            "[t.uniform_(0.5, 1.5) for n, t in m.state_dict().items() if '.' in n and t.ndim == 1 and t.is_floating_point()]",
            f"x = ({made},)",
            f"# the other sizes: ({other},)",
        ])  # fmt: skip

    def module(self, seed: int) -> nn.Module:
        """In evaluation, float32; vectors of layers (biases, gammas, statistics) lie in 0.5 to 1.5."""
        text, where = self.source(), f"<program {seed}>"
        linecache.cache[where] = (len(text), None, text.splitlines(keepends=True), where)
        names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math}
        exec(compile(text, where, "exec"), names)
        torch.manual_seed(seed)
        module = names["M"]().eval().requires_grad_(False)
        for name, value in module.state_dict().items():
            if "." in name and value.ndim == 1 and value.is_floating_point():
                value.uniform_(0.5, 1.5)
        return module

    def arguments(self, which: int, seed: int) -> tuple[Tensor, ...]:
        """Inputs of the first or second sizes, float32."""
        torch.manual_seed(seed)
        return tuple(eval(i.text(which), {"torch": torch}) for i in self.inputs)

    def without_dead(self) -> "Program":
        """Without steps, layers and inputs that nothing reads; a step in place keeps what it writes."""
        needed, kept = set(_NAME.findall(self.returned)), []
        for name, text in reversed(self.steps):
            if name in needed or "_(" in text or "inplace=True" in text:
                needed.update(_NAME.findall(text))
                kept.append((name, text))
        used = {found for _, text in kept for found in LAYER.findall(text)} | set(LAYER.findall(self.returned))
        layers = {name: made for name, made in self.layers.items() if name in used}
        inputs = tuple(i for i in self.inputs if i.name in needed) or self.inputs[:1]
        return replace(self, inputs=inputs, layers=layers, steps=tuple(reversed(kept)))


def double(value: Any) -> Any:
    """A copy with its floats in float64, in the same strides."""
    return pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else copied(t), value)


def copied(value: Any) -> Any:
    """A copy of every tensor: a program may write to its inputs."""
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, value)


@dataclass(frozen=True)
class Error:
    """How far outputs are from the right ones, relative to the RMS of each; inf with words where it is no number."""

    rms: float = 0.0
    largest: float = 0.0
    words: str = ""


def error(got: Any, want: Any) -> Error:
    """The worst of all outputs.

    Args:
        got: what is judged: any structure of float32 tensors and others.
        want: the same in float64.
    """
    wanted, structure = pytree.tree_flatten(want)
    found, other = pytree.tree_flatten(got)
    if structure != other:
        return Error(math.inf, math.inf, f"got the structure {other}, wanted {structure}")
    worst = Error()
    for at, (g, w) in enumerate(zip(found, wanted, strict=True)):
        one = _error(g, w)
        if one.rms > worst.rms or one.largest > worst.largest:
            worst = replace(one, words=f"output {at}: {one.words}" if one.words else f"output {at}")
    return worst


def _error(got: Any, want: Any) -> Error:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return (
            Error() if type(got) is type(want) and got == want else Error(math.inf, math.inf, f"got {got!r}, wanted {want!r}")
        )
    dtype = torch.float32 if want.is_floating_point() else want.dtype
    if got.shape != want.shape or got.dtype != dtype:
        found = f"got {got.dtype} {list(got.shape)}, wanted {dtype} {list(want.shape)}"
        return Error(math.inf, math.inf, found)
    if not want.is_floating_point():
        apart = float((got != want).double().mean()) if want.numel() else 0.0
        return Error(apart, apart)
    finite = want.isfinite()
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isfinite(), finite):
        return Error(math.inf, math.inf, "NaNs or infinities at other places")
    right = want[finite]
    if not right.numel():
        return Error()
    off = got[finite].double() - right
    scale = float(right.square().mean().sqrt())
    if not scale:
        return Error() if not off.any() else Error(math.inf, math.inf, "numbers where there are zeros")
    return Error(float(off.square().mean().sqrt()) / scale, float(off.abs().max()) / scale)
