"""Decides where the sum of a residual block is computed: in the matrix product before it, or in the layer norm after it.

    linear(x, w, b, residual) -> layer_norm      or      linear(x, w, b) -> add_layer_norm(., residual) -> (norm, sum)

If one of our own kernels computes the product, it reads the residual in its epilogue, which costs little. A library can add
either a bias or a matrix, but not both. So after a library product the sum would be a separate launch, and the norm would read
its result again. In this case it is better if the norm computes the sum. Both ways are timed as a whole (choose.py), each with
the best choice for the product.

There is a third way for a whole sequence of such sums, the residual stream x1 = x0 + W1 a + b1, x2 = x1 + W2 c + b2 ... The
library adds each product, without its bias, to the stream in place. Each norm adds all biases so far to its input:

    x1' = x0 + W1 a;   norm(x1' + b1);   x2' = x1' + W2 c;   norm(x2' + (b1 + b2)) ...

Not supported: sums whose rows are not all read by a norm, in order; and streams that are read by a call other than their norms,
such as the product that is added to them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx import Node

from tilewright.fuse import calls
from tilewright.fuse.check import ANCHOR_NODE, FLOAT_NODE
from tilewright.fuse.parts import FLOAT_PARTS
from tilewright.kernels.gemm.linear import linear_op

__all__ = ["Sum", "in_place", "note_sum", "rewrite", "streams", "ways"]

_COMPARED = (FLOAT_NODE, ANCHOR_NODE, FLOAT_PARTS)
"""Keys in a node's `meta` that record which values it computes."""
_RESIDUAL = 3
"""Position of the argument `residual` of `calls.linear`."""


@dataclass
class Sum:
    """A matrix product with a residual and the norm that reads its result, as a distinct problem of a graph."""

    linear: tuple[Any, ...]
    """x, weight, bias, activation, residual: the arguments of `linear_op` at the first occurrence."""
    norm: tuple[Tensor, Tensor | None, float]
    """The norm's weight, bias and eps."""
    places: list[tuple[Node, Node]] = field(default_factory=list)
    """All (product, norm) pairs of the graph with this problem."""

    @property
    def key(self) -> Any:
        """A key that is equal for equal problems."""
        weight, bias, eps = self.norm
        return linear_op.problem(*self.linear), self.linear[0].shape, weight.dtype, bias is None, eps


def _whole_rows(node: Node, of: Node) -> bool:
    """Whether a node is `of`, or a view of all its rows in order."""
    if node is of:
        return True
    if node.target is not calls.strided or node.args[0] is not of or node.args[3] != 0:
        return False
    size, shape = list(node.args[1]), list(of.args[5])  # pyright: ignore[reportArgumentType]
    dense = [1]
    for n in reversed(size[1:]):
        dense.insert(0, dense[0] * n)
    count = 1
    for n in shape:
        count *= n
    return size[-1:] == shape[-1:] and dense[0] * size[0] == count and list(node.args[2]) == dense  # pyright: ignore


def norm_behind(product: Node) -> Node | None:
    """The layer norm that reads a product's sum; None if there is none, or several."""
    if product.target is not calls.linear or product.args[_RESIDUAL] is None:
        return None
    readers = [reader for user in product.users for reader in (user, *user.users)]
    norms = [n for n in readers if n.target is calls.layer_norm and _whole_rows(n.args[0], product)]  # pyright: ignore
    given = [a for a in norms[0].args[1:3] if isinstance(a, Node)] if len(norms) == 1 else []
    return norms[0] if given and all(a.op == "get_attr" for a in given) else None


def note_sum(found: dict[Any, Sum], product: Node, args: tuple[Any, ...], value_of: Callable[[Any], Any]) -> None:
    """Add a product to the problems `found` if a norm reads its sum. `args` are the arguments of `linear_op`."""
    norm = norm_behind(product)
    if norm is None:
        return
    new = Sum(args, (value_of(norm.args[1]), value_of(norm.args[2]), value_of(norm.args[3])))
    found.setdefault(new.key, new).places.append((product, norm))


def _rows_of(node: Any) -> Any:
    """The product whose rows this node contains, all of them and in order; None if there is no such product."""
    base = node.args[0] if isinstance(node, Node) and node.target is calls.strided else node
    return base if isinstance(base, Node) and base.target is calls.linear and _whole_rows(node, base) else None


def _readers(node: Node) -> list[Node]:
    """The calls that read a node, directly or through views of all its rows."""
    views = [user for user in node.users if user.target is calls.strided and _whole_rows(user, node)]
    return [user for user in node.users if user not in views] + [reader for view in views for reader in view.users]


def streams(graph: fx.Graph, places: list[tuple[Node, Node]]) -> list[list[tuple[Node, Node]]]:
    """The sequences of (product, norm) that may be computed in place.

    In such a sequence the residual of each product is the previous sum, and no other call except norms reads that sum.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    norms, after = dict(places), dict[Node, Node]()
    for product in norms:
        before = _rows_of(product.args[_RESIDUAL])
        others = [] if before is None else [r for r in _readers(before) if r is not product]
        plain = product.args[4] == "none" and all(isinstance(a, Node) and a.op == "get_attr" for a in product.args[1:3])
        x: Any = product.args[0]
        plain = plain and before is not (x.args[0] if x.target is calls.strided else x)  # x + W x would read what it overwrites
        if plain and before is not None and all(r.target is calls.layer_norm and order[r] < order[product] for r in others):
            after[before] = product
    found = []
    for start in [node for node in after if node not in after.values()]:
        run, here = [], after.get(start)
        while here is not None:
            run.append((here, norms[here]))
            here = after.get(here)
        last = run[-1][0]
        if all(reader is norms[last] for reader in _readers(last)):
            found.append(run)
    return found


def in_place(module: fx.GraphModule, run: list[tuple[Node, Node]]) -> None:
    """Rewrite a graph so that the sums of a stream are computed in place."""
    due: Tensor | None = None
    for product, norm in run:
        bias = getattr(module, str(product.args[2].target)).double()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        due = bias if due is None else due + bias
        name = f"{product.name}_due"
        module.register_buffer(name, due.to(getattr(module, str(norm.args[1].target)).dtype), persistent=False)  # pyright: ignore
        x, weight, _, residual, _, shape = product.args[:6]
        with module.graph.inserting_before(product):
            total = module.graph.call_function(calls.added_in_place, (x, weight, residual, shape))
        with module.graph.inserting_before(norm):
            shift = module.graph.get_attr(name)
            normed = module.graph.call_function(calls.shifted_layer_norm, (norm.args[0], shift, *norm.args[1:]))
        total.meta = {k: v for k, v in product.meta.items() if k not in _COMPARED}
        normed.meta = dict(norm.meta)
        for old, new in ((norm, normed), (product, total)):
            old.replace_all_uses_with(new)
            module.graph.erase_node(old)


def ways(
    problem: Sum, sets: list[tuple[Any, ...]], before: calls.Choice | None, apart: list[calls.Choice]
) -> list[Callable[[int], Any]]:
    """The functions to time, each of which includes the norm.

    In order: the product computes the sum; the sum is computed in place; and for each choice in `apart`, a product with this
    choice and without the residual, after which the norm computes the sum.
    """
    weight, bias, eps = problem.norm

    def product_adds(i: int) -> Any:
        y = calls.run(linear_op, sets[i], before)
        return calls.layer_norm(y, weight, bias, eps, y.shape), y

    def norm_adds(choice: calls.Choice) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            *product, residual = sets[i]
            y = calls.run(linear_op, (*product, None), choice)
            return calls.add_layer_norm(y, residual, weight, bias, eps, y.shape, y.shape)

        return call

    stream = problem.linear[4].clone()

    def added(i: int) -> Any:
        x, w, b, _, _ = sets[i]
        y = calls.added_in_place(x, w, stream, stream.shape)
        return calls.shifted_layer_norm(y, weight if b is None else b, weight, bias, eps, y.shape)

    return [product_adds, added, *(norm_adds(choice) for choice in apart)]


def rewrite(graph: fx.Graph, product: Node, norm: Node, choice: calls.Choice) -> None:
    """Rewrite a graph so that the norm computes the sum, and the product has the given choice."""
    args = list(product.args)
    residual, args[_RESIDUAL] = args[_RESIDUAL], None
    product.args = (*args[:6], choice)
    weight, bias, eps, shape = norm.args[1:5]
    with graph.inserting_after(product):
        both = graph.call_function(calls.add_layer_norm, (product, residual, weight, bias, eps, shape, args[5]))
    with graph.inserting_after(both):
        total = graph.call_function(calls.part, (both, 1))
        normed = graph.call_function(calls.part, (both, 0))
    both.meta = {key: norm.meta[key] for key in ("nn_module_stack", "stack_trace") if key in norm.meta}
    for made, old in ((total, product), (normed, norm)):
        made.meta = {key: old.meta[key] for key in _COMPARED if key in old.meta}
    for key in _COMPARED:
        product.meta.pop(key, None)  # the product's value no longer equals a value of the float model
    product.replace_all_uses_with(total, delete_user_cb=lambda user: user is not both)
    norm.replace_all_uses_with(normed)
    rows = norm.args[0]
    graph.erase_node(norm)
    if isinstance(rows, Node) and rows.target is calls.strided and not rows.users:
        graph.erase_node(rows)
