"""Parameters on their way into an optimised graph: what is folded into them, joined, laid out and cast, once.

Folding is done in float64 from the float model's own parameters, then rounded to the graph's dtype once.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

__all__ = ["Weights"]


class Weights:
    """Parameters and buffers by the names that a graph gives them.

    Args:
        exact: those of the float model.
        cast: the same in the graph's dtype.
        root: module that holds what the optimised graph reads.
    """

    def __init__(self, exact: Mapping[str, Tensor], cast: Mapping[str, Tensor], root: nn.Module):
        self.exact, self.cast, self.root = exact, cast, root
        self._kept: dict[int, tuple[str, Any]] = {}

    def keep(self, value: Tensor | nn.Module, hint: str) -> str:
        """Store a tensor, or a quantised weight, in the graph's module; its name there. One object is stored once."""
        if id(value) in self._kept:
            return self._kept[id(value)][0]
        name = f"{hint.replace('.', '_')}_{len(self._kept)}"
        if isinstance(value, Tensor):
            self.root.register_buffer(name, value, persistent=False)
        else:
            self.root.add_module(name, value)
        self._kept[id(value)] = (name, value)
        return name

    def known(self, node: Any) -> bool:
        """Whether a node of the exported graph is a parameter or buffer."""
        return isinstance(node, Node) and node.op == "get_attr" and node.target in self.cast

    def double(self, node: Node) -> Tensor:
        """A parameter of the float model, in float64."""
        return self.exact[str(node.target)].detach().double()

    def folded(
        self, weight: Node, bias: Node | None, norm: tuple[Any, ...] | None, scales: list[Any], transposed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) in float64, a batch norm and factors of rows folded in.

        Args:
            weight: [O, ...], or [K, N] with `transposed`, which comes back as [N, K].
            bias: [O].
            norm: (weight, bias, mean, variance, eps), nodes or None for the first two.
            scales: numbers and nodes of [O].
            transposed: see weight.
        """
        w = self.double(weight)
        w = w.t() if transposed else w
        b = None if bias is None else self.double(bias)
        if norm is not None:
            scale, shift, mean, variance, eps = norm
            factor = (self.double(variance) + eps).rsqrt()
            factor = factor if scale is None else factor * self.double(scale)
            moved = -self.double(mean) if b is None else b - self.double(mean)
            b = moved * factor if shift is None else moved * factor + self.double(shift)
            w = w * factor.view(-1, *(1,) * (w.dim() - 1))
        for scale in scales:
            factor = scale if isinstance(scale, int | float) else self.double(scale)
            w = w * (factor if isinstance(factor, int | float) else factor.view(-1, *(1,) * (w.dim() - 1)))
            b = None if b is None else b * factor
        return w, b

    @staticmethod
    def joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        """(weights, biases) of several linears of one input, one above the other; a missing bias is zeros."""
        if all(b is None for _, b in parts):
            return torch.cat([w for w, _ in parts]), None
        biases = [w.new_zeros(w.shape[0]) if b is None else b for w, b in parts]
        return torch.cat([w for w, _ in parts]), torch.cat(biases)
