"""Which products of a graph run in int8, and which stay in 16 bits because their error would be too large.

A linear layer's weight gets int8 codes with one scale a row (ops/weights.py); its activation is quantised by rows in the call
where there are more than 16, and stays in 16 bits below (ops/linear.py). The error of each layer is measured on the example
inputs, with the float model's activations as its input, before it is decided: relative RMS of the layer's own product.

Convolutions stay in 16 bits: their kernel takes codes, but nothing writes codes for it on the way, so each would cost a launch
and a pass over its input more than it saves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright import ops
from tilewright.fuse.anchors import read
from tilewright.fuse.naming import layer_name
from tilewright.fuse.report import Report
from tilewright.fuse.trace import Traced
from tilewright.ops.weights import QuantizedWeight, quantize_weight

__all__ = ["LARGEST_ERROR", "Quantiser"]

LARGEST_ERROR = 0.03
"""Of one product, relative to the RMS of the float one. Codes of 8 bits for normal numbers give 0.01."""
_NARROW = 32
"""Products with fewer rows of the weight, or of K, save nothing."""


class _Inputs(fx.Interpreter):
    """Runs the float graph and keeps what each product reads."""

    def __init__(self, traced: Traced):
        super().__init__(traced.module)
        self.kept: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        anchor = read(n)
        if anchor is not None and anchor.kind == "linear":
            value = self.env[anchor.x]
            self.kept[n.name] = value.reshape(-1, value.shape[-1])[:1024].clone()
        return super().run_node(n)


class Quantiser:
    """Decides for each product; asked while the new graph is built.

    Args:
        exact: the float model.
        inputs: examples, flat.
        report: decisions go there.
    """

    def __init__(self, exact: Traced, inputs: Sequence[Any], report: Report):
        self.report = report
        recorder = _Inputs(exact)
        with torch.no_grad():
            recorder.run(*inputs, enable_io_processing=False)
        self.read = recorder.kept

    def weight(self, node: Node, weight: Tensor, dtype: torch.dtype) -> QuantizedWeight | None:
        """The weight [N, K] of a product in int8, or None where it stays as it is; `node` is the anchor's."""
        name, x = layer_name(node), self.read.get(node.name)
        if x is None:
            self.report.add(name, "quantise", node.name, False, "its input was not seen in the float model")
            return None
        if min(weight.shape) < _NARROW:
            self.report.add(name, "quantise", node.name, False, f"a weight of {list(weight.shape)} saves nothing")
            return None
        coded = quantize_weight(weight.to(dtype), "int8")
        own = x.float().to(dtype)
        right = own.double() @ weight.double().t()
        got = ops.linear(own, coded).double()
        error = float((got - right).square().mean().sqrt() / right.square().mean().sqrt().clamp_min(1e-30))
        if not error <= LARGEST_ERROR:
            reason = f"its own error is {error:.1e} of its RMS, more than {LARGEST_ERROR:.0e}: stays in {dtype}"
            self.report.add(name, "quantise", node.name, False, reason)
            return None
        saved = weight.numel() * (dtype.itemsize - 1)
        self.report.add(name, "quantise", node.name, True, f"int8 codes by rows, own error {error:.1e}", saved)
        return coded

    def refuse(self, node: Node) -> None:
        """A convolution."""
        reason = "int8 would cost a launch that writes its input's codes: stays in 16 bits"
        self.report.add(layer_name(node), "quantise", node.name, False, reason)
