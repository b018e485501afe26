"""Decides which matrix products and convolutions of an optimised graph run in int8, and which calls quantise their inputs.

    candidates -> a plan of which calls quantise -> the graph -> measured -> the plan that takes the least time

In this module a "product" is a matrix product or a convolution. Weights are quantised with one scale per row. An activation has
one scale, which is determined on the example inputs. It is the scale with the least squared error, so single large numbers may
saturate. If a layer norm quantises the activation, it has one scale per row. This requires that all quantised products that
read it read all its rows in order. Before the decision, the error of each product alone (relative RMS) is measured on these
inputs.

If a value is read in quantised form, the call that computes it also quantises it, if possible: a layer norm, or a product in
int8. Otherwise a separate launch quantises it. If a convolution quantises its result, its residual is quantised too, so that a
chain of convolutions stays in int8.

On a GPU each product is measured in int8 and in 16 bits. It stays in 16 bits if int8 is not faster when the necessary
conversions are included. If the whole graph is not faster in int8, all of it stays in 16 bits. On a CPU nothing is measured.

Not supported in int8: convolutions with groups; channels or columns that are not multiples of 16; products that save nothing;
activations that are not finite; and products that do not read a quantised layer norm by rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.fuse import calls
from tilewright.fuse.naming import layer_name
from tilewright.fuse.report import Report
from tilewright.ops.linear import FEW_ROWS

__all__ = ["LARGEST_ERROR", "Candidate", "Plan", "candidates_of", "planned"]

LARGEST_ERROR = 0.03
"""Limit for the error of one product, relative to the RMS of the float product. 8-bit quantisation of normally distributed
numbers gives 0.01."""
_NARROW = 32
"""Products save nothing if the weight has fewer rows than this, or if K is smaller."""
_SAMPLE = 1 << 18
"""The number of elements of an activation that are used to determine its scale."""
_CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
"""Candidates for the largest representable value, as shares of the largest magnitude in the activation."""


@dataclass(frozen=True)
class Candidate:
    """A product that may run in int8."""

    node: Node
    """A call of `calls.linear` or `calls.conv`."""
    source: Node
    """The buffer that contains its activation; the activation may be a view of it."""
    codes: Tensor
    """The quantised weight, in the layout of the float weight."""
    w_scales: Tensor
    """Scales of the weight: [N] or [O], float32."""
    images: int
    """Number of rows or images of the activation."""
    error: float
    """The error of this product alone, relative to the RMS of its result."""
    rows: bool
    """Whether the activation has one scale per row. If so, a layer norm quantises it, for all products that read it."""


@dataclass
class Found:
    """Facts found by a run on the example inputs."""

    candidates: dict[Node, Candidate] = field(default_factory=dict)
    scales: dict[Node, Tensor] = field(default_factory=dict)
    """Buffer -> its scale, [] float32."""
    bytes: dict[Node, int] = field(default_factory=dict)
    """Buffer -> its size in bytes, if it is not quantised."""
    readers: dict[Node, list[tuple[Node, int]]] = field(default_factory=dict)
    """Buffer -> its `readers_of`."""


def source_of(node: Any) -> Any:
    """The buffer of which a node is a view; the node itself if it is no view."""
    while isinstance(node, Node) and node.target is calls.strided:
        node = node.args[0]
    return node


def readers_of(node: Node) -> list[tuple[Node, int]]:
    """All readers of a buffer, directly or through views, as (call, position of the argument). The output is (output, 0)."""
    found = []
    for user in node.users:
        if user.target is calls.strided:
            found += readers_of(user)
        else:
            places = [i for i, a in enumerate(user.args) if a is node]
            found += [(user, i) for i in places or [0]]
    return found


def _by_rows(product: Node, norm: Node) -> bool:
    """Whether a product reads all rows of a layer norm's result in order. Only then may each row have its own scale."""
    if product.target is not calls.linear:
        return False
    rows: Any = product.args[0]
    if rows is norm:
        return True
    shape: Any = norm.args[4]
    whole = [math.prod(shape[:-1]), shape[-1]]
    return rows.args[0] is norm and len(rows.args[1]) == 2 and [rows.args[1][0], rows.args[2][0]] == whole


def step_of(x: Tensor) -> Tensor:
    """The int8 scale of x with the least squared error, [] float32; NaN if x is empty or not finite."""
    if not x.numel():
        return torch.full((), torch.nan, device=x.device)
    flat = x.reshape(-1) if x.is_contiguous() else x.movedim(1, -1).reshape(-1)
    flat = flat[:: max(1, flat.numel() // _SAMPLE)].float()
    most = x.abs().amax().float().clamp_min(1e-12)
    steps = most * torch.tensor(_CLIPS, device=x.device) / 127.0
    losses = [((flat / s).round().clamp(-127, 127) * s - flat).square().mean() for s in steps]
    best = torch.stack(losses).nan_to_num(float("inf")).argmin()
    return torch.where(most.isfinite(), steps[best], torch.nan)


def _relative(got: Tensor, right: Tensor) -> float:
    right = right.double()
    return float((got.double() - right).square().mean().sqrt() / right.square().mean().sqrt().clamp_min(1e-30))


def _quantised_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(tuple(range(1, weight.dim()))).clamp_min(1e-12) / 127.0
    codes = (wide / scales.view(-1, *(1,) * (weight.dim() - 1))).round().to(torch.int8)
    return codes, scales


class _Observer(fx.Interpreter):
    """Runs the graph in 16 bits and examines the inputs of its products."""

    def __init__(self, module: fx.GraphModule, report: Report, limit: float):
        super().__init__(module)
        self.report, self.limit, self.found = report, limit, Found()
        products = [n for n in module.graph.nodes if n.target in (calls.linear, calls.conv)]
        self.scaled = {*products, *(source_of(n.args[0]) for n in products)}
        norms = [(n, source) for n in products if (source := source_of(n.args[0])).target is calls.layer_norm]
        self.by_rows = {n for n, norm in norms if _by_rows(n, norm)}
        self.row_norms = {norm for n, norm in norms if n in self.by_rows}
        """Layer norms whose quantised values have a scale per row."""

    def run_node(self, n: Node) -> Any:
        if n.target in (calls.linear, calls.conv):
            self._product(n)
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.found.bytes[n] = result.nbytes
            if n in self.scaled:
                self.found.scales[n] = step_of(result)
        return result

    def _product(self, n: Node) -> None:
        args, _ = self.fetch_args_kwargs_from_env(n)
        x, weight, source = args[0], args[1], source_of(n.args[0])
        reason = _refusal(n, args)
        if reason is None:
            reason = self._measured(n, x, weight, source, args)
        if reason is not None:
            self.report.add(layer_name(n), "quantise", n.name, False, reason)

    def _measured(self, n: Node, x: Tensor, weight: Tensor, source: Node, args: Sequence[Any]) -> str | None:
        step, rows = self.found.scales[source], source in self.row_norms
        if rows and n not in self.by_rows:
            return "its input is quantised with one scale per row for other products, but this one does not read whole rows"
        if not bool(step.isfinite()):
            return "its input contains NaNs or infinities for the example inputs"
        codes, scales = _quantised_weight(weight)
        near = (codes.float() * scales.view(-1, *(1,) * (weight.dim() - 1))).to(weight.dtype)
        if rows:
            step = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127.0
        held = ((x.float() / step).round().clamp(-127, 127) * step).to(x.dtype)
        plain = [None, None, "none"]
        if n.target is calls.linear:
            held, x = held[:1024], x[:1024]
            rest: list[Any] = [*plain, [x.shape[0], weight.shape[0]]]
        else:
            rest = [*plain, *args[5:9]]
        error = _relative(n.target(held, near, *rest), n.target(x, weight, *rest))  # pyright: ignore[reportCallIssue]
        if not error <= self.limit:
            return f"its own error in int8 is {error:.1e} of its RMS, more than {self.limit:.0e}: it stays in {x.dtype}"
        self.found.candidates[n] = Candidate(n, source, codes, scales, args[0].shape[0], error, rows)
        return None


def _refusal(n: Node, args: Sequence[Any]) -> str | None:
    """The reason why a product cannot run in int8, apart from its values; None if there is no such reason."""
    x, weight, source = args[0], args[1], n.args[1]
    if not x.numel():
        return "its input is empty"
    if x.dtype == torch.float32:
        return "its input is float32, not 16 bits"
    if not isinstance(source, Node) or source.op != "get_attr" or not isinstance(weight, Tensor):
        return "its weight is computed in every call; int8 needs a constant"
    if n.args[2] is not None and n.args[2].op != "get_attr":  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        return "its bias is computed in every call; int8 needs a constant"
    if n.target is calls.linear:
        if min(weight.shape) < _NARROW:
            return f"its weight {list(weight.shape)} is too small for int8 to save time: both sizes must be at least {_NARROW}"
        if x.shape[0] <= FEW_ROWS:
            return (
                f"its input has only {x.shape[0]} rows, so most of the time is spent reading the weight; int8 kernels with "
                "16-bit activations would halve that"
            )
        return None if weight.shape[1] % 16 == 0 else f"K is {weight.shape[1]}, not a multiple of 16"
    if args[8] != 1:
        return "a convolution with groups, which is not supported in int8"
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        return f"{weight.shape[1]} input and {weight.shape[0]} output channels; wanted multiples of 16"
    return None


def candidates_of(fused: fx.GraphModule, inputs: Sequence[Any], report: Report, limit: float = LARGEST_ERROR) -> Found:
    """Find the products of a graph in 16 bits that may run in int8. For all others the report records the reason.

    Args:
        fused: the graph.
        inputs: flat example inputs.
        report: records the reasons.
        limit: the largest allowed error of a single product.
    """
    observer = _Observer(fused, report, limit)
    with torch.no_grad():
        observer.run(*inputs)
    observer.found.readers = {n: readers_of(n) for n in fused.graph.nodes if n.target is not calls.strided}
    return observer.found


@dataclass(frozen=True)
class Plan:
    """Which calls quantise."""

    products: frozenset[Node]
    """Products with quantised inputs."""
    outputs: frozenset[Node]
    """Those of `products` that write only a quantised result."""
    norms: dict[Node, bool]
    """Layer norm that quantises its result -> whether it also writes the result in 16 bits."""
    quantised: frozenset[Node]
    """16-bit buffers that a separate launch quantises."""
    dequantised: frozenset[Node]
    """Those of `outputs` that a call reads in 16 bits, so that a separate launch dequantises them."""


def planned(found: Found, products: frozenset[Node]) -> Plan:
    """The plan if these products run in int8."""
    outputs = frozenset(n for n in products if n.target is calls.conv or (n.args[3] is None and _whole_columns(found, n)))
    while True:
        kept = frozenset(
            n for n in outputs if _worth(found, n, products, outputs) and _residual_fits(found, n, products, outputs)
        )
        if kept == outputs:
            break
        outputs = kept
    norms, quantised, dequantised = dict[Node, bool](), set[Node](), set[Node]()
    for source in {found.candidates[n].source for n in products}:
        if source in outputs:
            continue
        if any(found.candidates[n].rows for n in products if found.candidates[n].source is source):
            norms[source] = any(not _takes_codes(r, i, products, outputs) for r, i in found.readers[source])
        else:
            quantised.add(source)
    for n in outputs:
        residual = source_of(n.args[3]) if n.target is calls.conv else None
        if residual is not None and residual not in outputs:
            quantised.add(residual)
        if any(not _takes_codes(r, i, products, outputs) for r, i in found.readers[n]):
            dequantised.add(n)
    return Plan(products, outputs, norms, frozenset(quantised), frozenset(dequantised))


def _takes_codes(reader: Node, place: int, products: frozenset[Node], outputs: frozenset[Node]) -> bool:
    return (place == 0 and reader in products) or (place == 3 and reader in outputs and reader.target is calls.conv)


def _worth(found: Found, n: Node, products: frozenset[Node], outputs: frozenset[Node]) -> bool:
    return any(_takes_codes(r, i, products, outputs) for r, i in found.readers[n])


def _whole_columns(found: Found, n: Node) -> bool:
    """Whether the rows of a matrix product's quantised result have no gaps: their width must be a multiple of 16."""
    weight = found.candidates[n].w_scales.shape[0]
    gated = str(n.args[4]).endswith("_mul")
    return (weight // 2 if gated else weight) % 16 == 0


def _residual_fits(found: Found, n: Node, products: frozenset[Node], outputs: frozenset[Node]) -> bool:
    """Whether the residual of a convolution allows a quantised result.

    The residual must be quantised with one scale anyway. With an activation other than relu, the residual must be in 16 bits,
    so the result cannot be quantised.
    """
    if n.target is not calls.conv or n.args[3] is None:
        return True
    source = source_of(n.args[3])
    if n.args[4] not in ("none", "relu") or not isinstance(source, Node):
        return False
    readers = [found.candidates[r] for r, i in found.readers[source] if i == 0 and r in products]
    return source in outputs or (bool(readers) and not any(c.rows for c in readers))
