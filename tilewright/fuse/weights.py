"""Prepares parameters for an optimised graph, once: folds operations into weights and stacks weights.

Folding uses float64 and the float model's own parameters. The result is rounded to the graph's dtype only once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node, map_arg

from tilewright.fuse.plan import Fold

__all__ = ["Weights"]


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


class Weights:
    """Parameters and buffers by their names in a graph.

    Args:
        exact: the parameters and buffers of the float model.
        cast: the same in the graph's dtype.
        root: the module that contains the tensors which the optimised graph reads.
        constant: a function that returns whether a node depends on parameters alone.
    """

    def __init__(
        self, exact: Mapping[str, Tensor], cast: Mapping[str, Tensor], root: nn.Module,
        constant: Callable[[Node], bool] = lambda node: False,
    ):  # fmt: skip
        self.exact, self.cast, self.root, self.constant = exact, cast, root, constant
        self._doubles: dict[Node, Tensor] = {}
        self._kept: dict[int, tuple[str, Any]] = {}

    def keep(self, value: Tensor | nn.Module, hint: str) -> str:
        """Store a tensor or a quantised weight in the graph's module. Returns its name there. Each object is stored once."""
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
        """Whether a node of the exported graph is a parameter or buffer, or depends on these alone."""
        if not isinstance(node, Node):
            return False
        return node.target in self.cast if node.op == "get_attr" else self.constant(node)

    def double(self, node: Node) -> Tensor:
        """A parameter of the float model, or a value computed from parameters, in float64."""
        if node.op == "get_attr":
            return _double(self.exact[str(node.target)].detach())
        if node not in self._doubles:
            args, kwargs = map_arg((node.args, node.kwargs), self.double)
            with torch.no_grad():
                self._doubles[node] = _double(node.target(*args, **kwargs))  # pyright: ignore[reportCallIssue]
        return self._doubles[node]

    def folded(self, weight: Node, bias: Node | None, folds: Sequence[Fold], transposed: bool) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) in float64, with batch norms, factors and biases folded in, in the order of `folds`.

        Args:
            weight: [O, ...], or [K, O, ...] with `transposed`; the result is [O, K, ...].
            bias: [O].
            folds: operations after the matrix product or convolution.
            transposed: see weight.
        """
        w = self.double(weight)
        w = w.transpose(0, 1) if transposed else w
        b = None if bias is None else self.double(bias)
        for fold in folds:
            factor, shift = self._affine(fold, w)
            w = w * factor.view(-1, *(1,) * (w.dim() - 1))
            if b is not None or shift is not None:
                b = (0 if b is None else b * factor) + (0 if shift is None else shift)
        return w, b  # pyright: ignore[reportReturnType]

    def _affine(self, fold: Fold, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The effect of a fold on each column: (factor [O], summand [O] or None)."""
        ones = weight.new_ones(len(weight))

        def each(operand: Any) -> Tensor:
            if not isinstance(operand, Node):
                return ones * operand
            assert fold.spread is not None, "each number of the operand must belong to a column"
            value = self.double(operand)
            return fold.spread.vector(value.view(-1, *(1,) * (len(fold.spread.dims) - 2)) if norm else value)

        norm = fold.kind == "batch_norm"
        if not norm:
            operand = each(fold.operands[0])
            return (operand, None) if fold.kind == "scale" else (ones, operand)
        scale, shift, mean, variance = (None if o is None else each(o) for o in fold.operands)
        assert mean is not None, "a batch norm must have a running mean"
        assert variance is not None, "a batch norm must have a running variance"
        factor = (variance + fold.eps).rsqrt() * (ones if scale is None else scale)
        return factor, -mean * factor + (0 if shift is None else shift)

    @staticmethod
    def joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        """(weights, biases) of several linears with the same input, stacked. A missing bias becomes zeros."""
        if all(b is None for _, b in parts):
            return torch.cat([w for w, _ in parts]), None
        biases = [w.new_zeros(w.shape[0]) if b is None else b for w, b in parts]
        return torch.cat([w for w, _ in parts]), torch.cat(biases)
