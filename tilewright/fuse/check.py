"""Whether an optimised model still computes what the float model does, and which layer is to blame where it does not.

    check = verify(float_graph, fused_graph, inputs, precision="fp16")

Outputs are compared with the float model's, each by two numbers relative to the RMS of the right one: RMS error and largest
error. NaNs and infinities must stand where the float model has them. Integers and flags (of argmax, of a comparison) must be
all the same; where torch's own model in the precision gives others, twice their share may be. A tolerance of yours is the RMS
error, and the share of integers, that is allowed. Above it `Inaccurate` is raised, which names the first layer whose own error
is out of line.

A layer's own error: both graphs are run node by node, and each node of the fused one gets the float model's values for what
comes before it, rounded to its own type. So an error is seen where it arises, not where it arrives. Nodes are compared that say
whose value they compute: `node.meta[FLOAT_NODE]` is the name of a node in the float graph (parts.py: of several).

Not here: whether two models are equally good on a task. An output that is all noise in the float model is noise here too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from tilewright.fuse.naming import layer_name, source_line
from tilewright.fuse.parts import FLOAT_PARTS, Part
from tilewright.hw.tf32 import exact_float32
from tilewright.tune.tolerance import errors

__all__ = [
    "ANCHOR_NODE",
    "FLOAT_NODE",
    "TOLERANCES",
    "Check",
    "Difference",
    "Inaccurate",
    "LayerError",
    "beside",
    "compare_outputs",
    "layer_errors",
    "verify",
]

FLOAT_NODE = "float_node"
"""Key of a fused node's `meta`: the name of the node of the float graph whose value it computes."""
ANCHOR_NODE = "anchor_node"
"""Another, optional: the name of the one that its layer is called by (of a convolution and a relu the convolution)."""


class Tolerance(NamedTuple):
    """How far an output may be from the float model's, relative to its RMS."""

    rms: float
    largest: float
    apart: float = 0.0
    """The share of an output's integers or flags that may be others."""

    @classmethod
    def given(cls, tolerance: float) -> "Tolerance":
        """What a user's number stands for."""
        return cls(tolerance, tolerance * LARGEST_OVER_RMS, tolerance)

    def allows(self, d: "Difference", margin: float = 1.0) -> bool:
        """Whether an output is near enough, by that part of what is allowed."""
        if d.discrete:
            return d.rms <= margin * self.apart
        return d.rms <= margin * self.rms and d.largest <= margin * self.largest


LARGEST_OVER_RMS = 16.0
"""Measured 0.5 to 4 on the models of docs/optimize.md#how-errors-are-judged; a single wrong value is far above."""
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-4 * LARGEST_OVER_RMS),
    "fp16": Tolerance(1e-2, 1e-2 * LARGEST_OVER_RMS),
    "bf16": Tolerance(5e-2, 5e-2 * LARGEST_OVER_RMS),
    "int8": Tolerance(1e-1, 1e-1 * LARGEST_OVER_RMS),
}
"""Precision -> what `verify` allows; torch's own models have 4e-4 to 2e-3 in fp16, 2e-3 to 2e-2 in bf16 (docs/optimize.md)."""


@dataclass(frozen=True)
class Difference:
    """How far one output is from the float model's; inf where its shape, its NaNs or its infinities are others."""

    name: str
    """Its place in what the model returns: "" for a single tensor, ['logits'], [0] ..."""
    rms: float
    """RMS error over the RMS of the right values; for integers and flags the share that differs."""
    largest: float
    """Largest error, each relative to the RMS and its own right value; for integers as `rms`."""
    words: str = ""
    """What is wrong beyond a number."""
    discrete: bool = False
    """Whether it is of integers or flags."""


@dataclass(frozen=True)
class LayerError:
    """What one node of the fused graph adds to the error."""

    node: str
    """Name in the fused graph."""
    layer: str
    """The user's name of it (`layer1.0.conv1`), else the float graph's."""
    line: str
    """The user's line, "model.py:12", or "" where it is not known."""
    own: float
    """RMS error with the float model's values as its inputs, relative to the RMS of the right values."""
    words: str = ""
    """What is wrong beyond a number."""


@dataclass(frozen=True)
class Check:
    """What `verify` found."""

    precision: str
    tolerance: Tolerance
    outputs: tuple[Difference, ...]
    layers: tuple[LayerError, ...] = ()
    """Filled where an output is out of tolerance."""
    native: tuple[Difference, ...] = ()
    """How far torch's own model is off in this precision; filled where the table alone would not allow the outputs."""

    @property
    def failed(self) -> tuple[Difference, ...]:
        """The outputs that are too far off."""
        return tuple(d for d in self.outputs if not self.tolerance.allows(d))

    @property
    def worst(self) -> Difference:
        """The output that is farthest off."""
        return max(self.outputs, key=lambda d: (d.rms, d.largest))

    @property
    def guilty(self) -> LayerError | None:
        """The first layer whose own error alone would break the tolerance, else the one that adds most."""
        over = (layer for layer in self.layers if not layer.own <= self.tolerance.rms)
        return next(over, max(self.layers, key=lambda layer: layer.own, default=None))

    def to_json(self) -> dict[str, Any]:
        """As plain values; what is not finite as text."""
        return {
            "precision": self.precision,
            "tolerance": self.tolerance._asdict(),
            "outputs": [_plain(asdict(d)) for d in self.outputs],
            "layers": [_plain(asdict(layer)) for layer in self.layers],
            "native": [_plain(asdict(d)) for d in self.native],
        }

    def __str__(self) -> str:
        if not self.outputs:
            return "no output to compare"
        each = "output{0.name}: RMS error {0.rms:.2e}, largest {0.largest:.2e}{1}"
        lines = [each.format(d, f" ({d.words})" if d.words else "") for d in self.outputs]
        limit = f"may be {_limits(self)}"
        limit += "; torch's own model has half of that" if self.native else ""
        return "\n".join([*lines, limit])


class Inaccurate(ValueError):
    """An optimised model is too far from the float model; `check` has the numbers."""

    def __init__(self, check: Check):
        self.check = check
        off = check.failed[0]
        words = off.words or f"relative RMS error {off.rms:.2e}, largest {off.largest:.2e}"
        text = (
            f"output{off.name} of the optimised model is too far from the float model's: {words}; wanted at most "
            f"{_limits(check, off.discrete)}. {_blame(check)} "
            "Take a wider precision, or allow it with tolerance=..."
        )
        super().__init__(text)


def _limits(check: Check, discrete: bool = False) -> str:
    allowed = check.tolerance
    if discrete:
        return f"{allowed.apart:.2%} of the values in {check.precision}"
    return f"{allowed.rms:.2e} and {allowed.largest:.2e} in {check.precision}"


def _blame(check: Check) -> str:
    guilty = check.guilty
    if guilty is None:
        return "No layer can be named: the fused graph says of no node which value it computes."
    where = guilty.layer + (f" ({guilty.line})" if guilty.line else "")
    words = guilty.words or f"own error {guilty.own:.2e}"
    if not guilty.own <= check.tolerance.rms:
        return f"The guilty layer is {where}: {words}."
    return f"No single layer is: errors add up over {len(check.layers)} of them, most from {where} ({words})."


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


# ---- outputs


def _difference(name: str, want: Any, got: Any) -> Difference:
    if isinstance(want, float) and isinstance(got, float):  # of `.item()` and `.tolist()`: rounded as tensors are
        want, got = torch.tensor(want, dtype=torch.float64), torch.tensor(got, dtype=torch.float64)
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        same = type(want) is type(got) and want == got
        return Difference(name, 0.0, 0.0) if same else Difference(name, math.inf, math.inf, f"got {got!r}, wanted {want!r}")
    if want.shape != got.shape:
        words = f"got shape {list(got.shape)}, wanted {list(want.shape)}"
        return Difference(name, math.inf, math.inf, words)
    if want.is_complex() and got.is_complex():
        want, got = torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj())
    if not want.is_floating_point():
        if got.is_floating_point() or got.is_complex() != want.is_complex():
            return Difference(name, math.inf, math.inf, f"got {got.dtype}, wanted {want.dtype}", True)
        apart = float((want != got.to(want.device)).double().mean()) if want.numel() else 0.0
        return Difference(name, apart, apart, f"{apart:.2%} of the values differ" if apart else "", True)
    got = got.to(want.device)
    largest, rms = errors(got, want)
    return Difference(name, rms, largest, _not_finite(want, got) if rms == math.inf else "")


def _not_finite(want: Tensor, got: Tensor) -> str:
    """Which NaNs and infinities are at places of their own."""
    new = int((want.isfinite() & ~got.isfinite()).sum())
    kind = "NaN" if bool((want.isfinite() & got.isnan()).any()) else "infinite"
    if new:
        return f"{new} of {want.numel()} values are {kind} and finite in the float model"
    return "NaNs or infinities of the float model are missing, or others"


def compare_outputs(want: Any, got: Any) -> tuple[Difference, ...]:
    """Every leaf of what a model returned, tuples, dicts and plain numbers alike.

    Args:
        want: the float model's.
        got: the optimised model's.

    Returns:
        One `Difference` a leaf, in order; a single one of inf where the structures differ.
    """
    wanted, structure = pytree.tree_flatten_with_path(want)
    found, other = pytree.tree_flatten(got)
    if structure != other:
        return (Difference("", math.inf, math.inf, f"got the structure {other}, wanted {structure}"),)
    return tuple(_difference(pytree.keystr(path), w, g) for (path, w), g in zip(wanted, found, strict=True))


# ---- layers


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of some nodes."""

    def __init__(self, graph: fx.GraphModule, keep: set[str]):
        super().__init__(graph)
        self.keep, self.values = keep, dict[str, Any]()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.keep:
            # An in-place node behind it would change it.
            self.values[n.name] = value.clone() if isinstance(value, Tensor) else value
        return value


_Pair = tuple[fx.Node, str, Part | None]  # node of the float graph, its anchor's name, its place (None: it is all)


class _Forced(fx.Interpreter):
    """Runs the fused graph; a paired node's value is compared, then the float model's goes on in its place."""

    def __init__(
        self, graph: fx.GraphModule, pairs: Mapping[str, list[_Pair]], values: Mapping[str, Any], named: Mapping[str, fx.Node]
    ):  # fmt: skip
        super().__init__(graph)
        self.pairs, self.values, self.named, self.found = pairs, values, named, list[LayerError]()

    def run_node(self, n: fx.Node) -> Any:
        got = super().run_node(n)
        if n.name not in self.pairs or not isinstance(got, Tensor):
            return got
        forced = torch.empty_like(got).copy_(got)
        for of, anchor, part in self.pairs[n.name]:
            want, seen = self.values[of.name], got if part is None else part.of(got)
            apart = _difference("", want, seen)
            of = self.named.get(anchor, of)
            self.found.append(LayerError(n.name, layer_name(of), source_line(of), apart.rms, apart.words))
            if want.shape == seen.shape:
                (forced if part is None else part.of(forced)).copy_(want)
        return forced


def _pairs(float_graph: fx.GraphModule, fused: fx.GraphModule) -> dict[str, list[_Pair]]:
    """Node of the fused graph -> what it computes of the float one. Raises ValueError: there is no such node."""
    nodes, found = {n.name: n for n in float_graph.graph.nodes}, dict[str, list[_Pair]]()
    for n in fused.graph.nodes:
        whole = [(n.meta[FLOAT_NODE], n.meta.get(ANCHOR_NODE, ""), None)] if FLOAT_NODE in n.meta else []
        for of, anchor, part in [*whole, *((part.node, part.anchor, part) for part in n.meta.get(FLOAT_PARTS, ()))]:
            if of not in nodes:
                raise ValueError(f"{n.name} says that it computes {of!r}, and the float graph has no such node")
            found.setdefault(n.name, []).append((nodes[of], anchor, part))
    return found


def layer_errors(
    float_graph: fx.GraphModule, fused: fx.GraphModule, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> list[LayerError]:
    """The own error of every node of the fused graph that says whose value it computes, in order.

    Args:
        float_graph: the model as it was, functional.
        fused: the optimised one, before it is compiled or captured.
        inputs: the model's, for both.
        kwargs: likewise.

    Raises:
        ValueError: a node names one that the float graph has not.
    """
    pairs = _pairs(float_graph, fused)
    flat = pytree.arg_tree_leaves(*inputs, **(kwargs or {}))
    with torch.no_grad(), exact_float32():
        floats = _Recorder(float_graph, {of.name for found in pairs.values() for of, _, _ in found})
        floats.run(*flat, enable_io_processing=False)
        forced = _Forced(fused, pairs, floats.values, {n.name: n for n in float_graph.graph.nodes})
        forced.run(*flat, enable_io_processing=False)
    return forced.found


# ---- both


def verify(
    float_graph: fx.GraphModule, fused: fx.GraphModule, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *,
    precision: str, tolerance: float | None = None, run: Callable[..., Any] | None = None,
    native: Callable[[], Any] | None = None,
) -> Check:  # fmt: skip
    """Compare an optimised model with the float model on the same inputs.

    A deep model may be further off than `TOLERANCES` says, in whatever hands: where torch's own is, twice its error is allowed.

    Args:
        float_graph: the float model as a graph; a call of it gives the right outputs.
        fused: the optimised one as a graph, for finding the guilty layer.
        inputs: arguments of both.
        kwargs: keyword arguments of both.
        precision: which of `TOLERANCES` holds.
        tolerance: the relative RMS error that is allowed instead; the largest may be 16 times that, and that share of an
            output's integers may differ.
        run: what is called for the optimised outputs (compiled, captured); default: `fused` itself.
        native: gives the outputs of torch's own model in the precision; called where they are needed.

    Returns:
        What was found, in tolerance.

    Raises:
        Inaccurate: an output is out of tolerance.
        ValueError: an unknown precision without a tolerance, a tolerance that is no number of at least 0, or a float model that
            draws random numbers.
    """
    if tolerance is not None and not 0.0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}; wanted a finite number of at least 0, or None")
    if tolerance is None and precision not in TOLERANCES:
        raise ValueError(f"precision is {precision!r}; wanted one of {', '.join(TOLERANCES)}, or a tolerance")
    allowed = TOLERANCES[precision] if tolerance is None else Tolerance.given(tolerance)
    keywords = dict(kwargs or {})
    with torch.no_grad(), exact_float32():
        try:
            want = float_graph(*inputs, **keywords)
        except RuntimeError as error:
            raise ValueError(f"the float model itself fails on the example inputs: {error}") from error
    with torch.no_grad():
        got = (fused if run is None else run)(*inputs, **keywords)
    check = Check(precision, allowed, compare_outputs(want, got))
    if check.failed:
        with torch.no_grad(), exact_float32():
            again = Check(precision, allowed, compare_outputs(want, float_graph(*inputs, **keywords)))
        if again.failed:
            raise ValueError(
                "the float model gives other outputs at every call: it draws random numbers (dropout with training=True?), and "
                "nothing can be compared. Take them out, or optimise the part that is without"
            )
    if check.failed and native is not None and tolerance is None:
        with torch.no_grad():
            check = beside(check, compare_outputs(want, native()))
    if check.failed:
        raise Inaccurate(replace(check, layers=tuple(layer_errors(float_graph, fused, inputs, keywords))))
    return check


def beside(check: Check, native: tuple[Difference, ...]) -> Check:
    """`check` with twice the error of torch's own model allowed, where that is a number and more than the table's."""
    rms, largest = (max((getattr(d, name) for d in native if not d.discrete), default=0.0) for name in ("rms", "largest"))
    apart = max((d.rms for d in native if d.discrete), default=0.0)
    if not math.isfinite(rms + largest + apart):
        return check
    table = check.tolerance
    allowed = Tolerance(max(table.rms, 2 * rms), max(table.largest, 2 * largest), max(table.apart, 2 * apart))
    return replace(check, tolerance=allowed, native=native)
