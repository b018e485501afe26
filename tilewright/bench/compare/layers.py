"""Divides a user's model into a chain of layers: an anchor (convolution, product, norm, pooling ...) with the elementwise
operations after it.

The model is traced symbolically, which keeps its modules, or by torch.export if its Python code does not allow that. Parameters
are the model's own, never copied. Layers have the user's module paths. In-place operations are replaced by out-of-place ones,
and sizes by
numbers: the chain is valid only for the shapes of the example inputs.

Refused (Untraceable has the reason): models in training mode; models that cannot be traced in any way (tracing.py), unless
their layers are not needed; models whose trace computes something else than they do; and models that fail, draw random numbers,
return no tensor or compute nothing.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tilewright.bench.compare.tracing import (
    CONTAINERS,
    TRACE_ERRORS,
    Untraceable,
    copies,
    difference,
    exported,
    flat,
    functional,
    opaque,
    out_of_place,
    symbolic,
)  # fmt: skip
from tilewright.fuse.trace import line_of

__all__ = ["Chain", "Layer", "trace"]

Shape = tuple[tuple[int, ...], torch.dtype]

_HERE = str(Path(__file__).parent)
"""A line in here is not the user's."""

_BEHIND = frozenset(
    """getitem getattr setitem cat concat concatenate hstack vstack stack dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_dropout batch_norm hardswish prelu glu softsign logsigmoid log_sigmoid pad repeat tile type_as float half bfloat16
    double int long bool type size dim len numel truediv floordiv contiguous pixel_shuffle pixel_unshuffle arange zeros ones
    full zeros_like ones_like full_like empty tril triu expand_as view_as reshape_as cpu cuda channel_shuffle swapaxes rrelu
    relu6 hardsigmoid tanhshrink softshrink hardshrink threshold layout lt le gt ge eq ne and or not _to_copy
    _native_batch_norm_legit_no_training select_scatter slice_scatter fill
    """.split()  # noqa: SIM905
)
"""What joins the layer before it, besides what torch tags as pointwise and what is a view."""

_PRODUCTS = frozenset({"matmul", "bmm", "mm", "baddbmm", "einsum", "__matmul__"})


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An anchor and what follows it, in a `Chain`."""

    name: str
    """The anchor's module path, with the function's name if a module has several anchors."""
    kind: str
    """conv, linear, matmul, attention, embedding, norm, pool or other."""
    anchor: fx.Node | None
    """None if a model has no anchor at all."""
    nodes: tuple[fx.Node, ...]
    signature: str
    """Operations, options and shapes; equal for layers that compute the same."""
    flops: float
    bytes: float
    """Bytes of inputs, weights and outputs, each counted once."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A traced model. Layers run in this order; a layer reads what earlier ones have made."""

    model: nn.Module
    root: fx.GraphModule
    inputs: tuple[Tensor, ...]
    layers: tuple[Layer, ...]
    shapes: dict[fx.Node, Shape]
    """Shapes of all nodes that are single tensors."""
    outputs: tuple[fx.Node, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """The group of each layer: layers in a group compute the same, and so do the layers before them."""
        signs = [layer.signature for layer in self.layers]
        found: dict[tuple[str, str], int] = {}
        return tuple(found.setdefault(pair, len(found)) for pair in zip(["", *signs], signs, strict=False))

    def live(self, stop: int) -> list[fx.Node]:
        """Values that layers before `stop` have produced and that later layers, or the caller, read."""
        made = {node: i for i, layer in enumerate(self.layers) for node in layer.nodes}
        final = set(self.outputs)
        return [
            node
            for layer in self.layers[:stop]
            for node in layer.nodes
            if node in final or any(made.get(user, -1) >= stop for user in node.users)
        ]

    def size(self, node: fx.Node) -> int:
        """Size of a node's tensor in bytes."""
        shape, dtype = self.shapes[node]
        return int(torch.Size(shape).numel()) * dtype.itemsize


def trace(model: nn.Module, inputs: tuple[Tensor, ...], *, whole: bool = False) -> Chain:
    """Cut `model` into layers, for inputs of these shapes. The model runs once or twice, and is not changed.

    whole: treat a model that cannot be cut as one layer. Raises Untraceable with the reason.
    """
    if model.training:
        raise Untraceable("the model is in training mode; call model.eval() first")
    with torch.no_grad():
        try:
            wanted, again = (flat(model(*copies(inputs))) for _ in range(2))
        except TRACE_ERRORS as error:
            raise Untraceable(f"the model fails on its own inputs: {_described(error)}") from error
    if different := difference(again, wanted):
        raise Untraceable(
            f"the model gives different outputs in every call (it draws random numbers, or counts calls): {different}"
        )
    if not wanted:
        raise Untraceable("the model returns no tensor, so there is nothing by which two engines can be compared")
    reasons = []
    for way in (symbolic, exported, functional, *([opaque] if whole else [])):
        try:
            root = way(model, inputs)
            out_of_place(root)
            recorder = _Recorder(root)
            with torch.no_grad(), recorder.counter:
                got = flat(recorder.run(*copies(inputs)))
        except TRACE_ERRORS as error:
            reasons.append(f"{way.__name__}: {_described(error)}")
            continue
        if different := difference(got, wanted):
            reasons.append(f"{way.__name__}: the traced program gives other outputs: {different}")
            continue
        if not any(node.op.startswith("call_") for node in root.graph.nodes):
            raise Untraceable("the model computes nothing, because its outputs are its inputs")
        return _chain(model, root, inputs, recorder)
    raise Untraceable("the model cannot be cut into layers (with --whole it is compared as one segment). " + ". ".join(reasons))


def _described(error: Exception) -> str:
    """In one line, with the user's."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:500]} (at {line_of(error, _HERE)})"


# ---- what every node makes


class _Recorder(fx.Interpreter):
    """Runs the graph once: shapes, floating-point operations, and values that are no tensors."""

    def __init__(self, root: fx.GraphModule):
        super().__init__(root)
        self.shapes: dict[fx.Node, Shape] = {}
        self.numbers: dict[fx.Node, Any] = {}
        self.flops: dict[fx.Node, float] = {}
        self.counter = FlopCounterMode(display=False)

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.get_total_flops()
        value = super().run_node(n)
        if n.op not in ("placeholder", "get_attr", "output"):
            tensors = flat(value)
            if not tensors and not isinstance(value, nn.Module):
                self.numbers[n] = tuple(value) if isinstance(value, torch.Size) else value
            counted = self.counter.get_total_flops() - before
            self.flops[n] = max(counted, _attention_flops(self, n)) + sum(x.numel() for x in tensors) * (not _is_view(n))
        if isinstance(value, Tensor):
            self.shapes[n] = (tuple(value.shape), value.dtype)
        return value


def _attention_flops(recorder: _Recorder, node: fx.Node) -> float:
    """Of F.scaled_dot_product_attention, which torch does not count on a CPU."""
    if _base(recorder.module, node) != "scaled_dot_product_attention":
        return 0.0
    q, k, v = (recorder.shapes[a][0] for a in node.all_input_nodes[:3])
    return 2.0 * torch.Size(q[:-1]).numel() * k[-2] * (q[-1] + v[-1])


def _base(root: nn.Module, node: fx.Node) -> str:
    """conv2d, Linear, add ...: the name without namespaces and overloads."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return str(getattr(node.target, "__name__", node.target))


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    return [getattr(packet, o) for o in packet.overloads()] if packet is not None else []


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_module":
        return False
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    return name == "getitem" or any(o.is_view for o in _overloads(name))


def _is_behind(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node joins the layer before it."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if isinstance(
            module, nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd | nn.Identity | nn.Flatten | nn.Unflatten
        ):
            return True
        if type(module).__module__ in (
            "torch.nn.modules.padding",
            "torch.nn.modules.pixelshuffle",
            "torch.nn.modules.channelshuffle",
        ):
            return True
        softmax = nn.Softmax | nn.Softmax2d | nn.LogSoftmax | nn.Softmin | nn.MultiheadAttention
        return type(module).__module__ == "torch.nn.modules.activation" and not isinstance(module, softmax)
    if isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.pointwise in node.target.tags or node.target.is_view:
            return True
    name = _base(root, node)
    name = name if name.startswith("_") else name.rstrip("_")
    return name in _BEHIND or any(torch.Tag.pointwise in o.tags or o.is_view for o in _overloads(name))


# ---- layers


def _chain(model: nn.Module, root: fx.GraphModule, inputs: tuple[Tensor, ...], recorder: _Recorder) -> Chain:
    _fix_numbers(root, recorder.numbers)
    of, anchors = _assign(root)
    count = len(anchors) or 1
    nodes: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in root.graph.nodes:
        if node in of:
            nodes[of[node]].append(node)
    names = _names(model, root, anchors) or ["all"]
    output = root.graph.output_node()
    final = tuple(dict.fromkeys(x for x in tree_leaves(output.args) if isinstance(x, fx.Node)))
    layers = []
    for name, inside in zip(names, nodes, strict=True):
        flops = float(sum(recorder.flops.get(node, 0.0) for node in inside))
        moved = float(_moved_bytes(root, inside, set(final), recorder.shapes))
        signature = _signature(root, inside, recorder.shapes)
        anchor = anchors[len(layers)] if anchors else None
        kind = _kind(root, inside, anchor)
        layers.append(
            Layer(name=name, kind=kind, anchor=anchor, nodes=tuple(inside), signature=signature, flops=flops, bytes=moved)
        )
    return Chain(model=model, root=root, inputs=inputs, layers=tuple(layers), shapes=recorder.shapes, outputs=final)


def _fix_numbers(root: fx.GraphModule, numbers: dict[fx.Node, Any]) -> None:
    for node, value in numbers.items():
        for user in list(node.users):
            swap: Callable[[fx.Node], Any] = lambda n, node=node, value=value: value if n is node else n  # noqa: E731
            user.args, user.kwargs = fx.map_arg(user.args, swap), fx.map_arg(user.kwargs, swap)
    root.graph.eliminate_dead_code()
    root.recompile()


def _assign(root: fx.GraphModule) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """Node -> its layer, and the anchors. What no layer precedes belongs to the first that reads it."""
    of: dict[fx.Node, int] = {}
    anchors: list[fx.Node] = []
    scores: set[int] = set()  # layers of a product with a softmax behind it
    varies: set[fx.Node] = set()
    early = []
    for node in root.graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        if node.op == "placeholder":
            varies.add(node)
            continue
        reads = [of[x] for x in node.all_input_nodes if x in of]
        last, name = max(reads, default=-1), _base(root, node).lower()
        if not any(x in varies for x in node.all_input_nodes):
            early.append(node)  # no input reaches it: a constant of whoever reads it
            continue
        varies.add(node)
        behind = _is_behind(root, node)
        if "softmax" in name and last >= 0 and _base(root, anchors[last]).lower() in _PRODUCTS:
            scores.add(last)
            behind = True
        behind = behind or (name in _PRODUCTS and last in scores and of.get(node.all_input_nodes[0]) == last)
        if not behind:
            anchors.append(node)
            of[node] = len(anchors) - 1
        elif last >= 0:
            of[node] = last
        else:
            early.append(node)
    for node in reversed(early):
        readers = [of[x] for x in node.users if x in of]
        of[node] = min(readers, default=max(len(anchors) - 1, 0))
    return of, anchors


def _names(model: nn.Module, root: fx.GraphModule, anchors: list[fx.Node]) -> list[str]:
    found: list[str] = []
    for node in anchors:
        if node.op == "call_module":
            name = str(node.target)
        else:
            path = [str(where[0]) for where in (node.meta.get("nn_module_stack") or {}).values()]
            inner = path[-1] if path else ""
            base = _base(root, node).strip("_")
            owner = type(model.get_submodule(inner)) if inner and _has(model, inner) else None
            own = owner is not None and owner.__module__.startswith("torch.nn") and not issubclass(owner, CONTAINERS)
            name = inner if own else f"{inner}.{base}" if inner else base
        again = sum(x == name or x.startswith(f"{name}#") for x in found)
        found.append(f"{name}#{again + 1}" if again else name)
    return found


def _kind(root: fx.GraphModule, inside: list[fx.Node], anchor: fx.Node | None) -> str:
    name = _base(root, anchor).lower() if anchor is not None else ""
    if name in _PRODUCTS:
        return "attention" if any("softmax" in _base(root, node).lower() for node in inside) else "matmul"
    words = {"conv": "conv", "linear": "linear", "addmm": "linear", "attention": "attention", "embedding": "embedding"}
    words |= {"norm": "norm", "pool": "pool", "mean": "pool"}
    return next((kind for word, kind in words.items() if word in name), "other")


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _weights(root: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Parameters and buffers that a node reads."""
    found = []
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        found += [*module.parameters(), *module.buffers()]
    for x in node.all_input_nodes:
        if x.op == "get_attr":
            value = operator.attrgetter(str(x.target))(root)
            found += [value] if isinstance(value, Tensor) else []
    return found


def _moved_bytes(root: fx.GraphModule, inside: list[fx.Node], final: set[fx.Node], shapes: dict[fx.Node, Shape]) -> int:
    own = set(inside)
    ends = {x for n in inside for x in n.all_input_nodes if x not in own and x.op != "get_attr"}
    ends |= {n for n in inside if n in final or any(user not in own and user.op != "output" for user in n.users)}
    weights = {
        id(w): min(w.numel() * w.element_size(), _table_bytes(root, n, shapes)) for n in inside for w in _weights(root, n)
    }  # fmt: skip
    return sum(torch.Size(shapes[n][0]).numel() * shapes[n][1].itemsize for n in ends if n in shapes) + int(
        sum(weights.values())
    )


def _table_bytes(root: fx.GraphModule, node: fx.Node, shapes: dict[fx.Node, Shape]) -> float:
    """Most that a node reads of a weight: of a table of embeddings the rows that it gives out."""
    if not _base(root, node).lower().startswith("embedding") or node not in shapes:
        return float("inf")
    return torch.Size(shapes[node][0]).numel() * shapes[node][1].itemsize


def _signature(root: fx.GraphModule, inside: list[fx.Node], shapes: dict[fx.Node, Shape]) -> str:
    place = {node: f"%{i}" for i, node in enumerate(inside)}
    outside: dict[fx.Node, str] = {}

    def spelled(x: fx.Node) -> str:
        if x in place:
            return place[x]
        return outside.setdefault(x, f"${len(outside)}:{shapes.get(x)}")

    lines = []
    for node in inside:
        what = repr(root.get_submodule(str(node.target))) if node.op == "call_module" else str(node.target)
        weights = [tuple(w.shape) for w in _weights(root, node)]
        lines.append(f"{what} {fx.map_arg((node.args, node.kwargs), spelled)} {weights} {shapes.get(node)}")
    return "\n".join(lines)
