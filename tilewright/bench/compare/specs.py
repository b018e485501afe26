"""The programs that can be made of a model's layers, as data: ranges of layers, some left out or repeated.

variants.py explains the purpose of each kind; plan.py decides which of them to build.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from tilewright.bench.compare.layers import Chain

__all__ = ["Edit", "Spec", "alone", "heavy_specs", "label", "repeatable", "span_of", "specs"]

_REPEATS = (2, 4, 8, 16)
_HEAVY_REPEATS = (0, 16, 64)
_DEPTHS = (1, 2, 4, 8)
_NEAR = 4  # layers that a short program has beside its ballast
_SAME_GROUP = 2  # layers of one group that are left out or repeated: a second one tests what the first says of all


@dataclass(frozen=True)
class Edit:
    """The layers [start, stop) run `times` times in a row; 0: they are left out."""

    start: int
    stop: int
    times: int


@dataclass(frozen=True)
class Spec:
    """The layers [start, stop) with edits of different layers, in order. Also returns the values live after `giving` layers."""

    name: str
    start: int
    stop: int
    edits: tuple[Edit, ...] = ()
    giving: int = 0


def specs(chain: Chain) -> Iterator[Spec]:
    """All programs that are worth trying; not all of them can be built."""
    layers, count = chain.layers, len(chain.layers)
    yield Spec("whole", 0, count)
    for stop in range(1, count):
        yield Spec(f"prefix to {layers[stop - 1].name}", 0, stop)
    many = _most_tensors(chain)
    for start, period, times in _phased(chain, _periodic([layer.signature for layer in layers])):
        block = label(chain, Edit(start, start + period, 1))
        for depth in _DEPTHS:
            if depth < times:
                edit = Edit(start + depth * period, start + times * period, 0)
                yield Spec(f"{depth} of {times} blocks {block}", 0, count, (edit,))
                if many <= edit.start:  # short, so that what is given out is a larger share
                    named = f"{depth} of {times} blocks {block}, giving {layers[many - 1].name}"
                    yield Spec(named, 0, count, (edit,), giving=many)
        for repeats in _REPEATS[:2]:
            yield Spec(f"{block} x{repeats}", 0, count, (Edit(start, start + period, repeats),))
    members: dict[int, int] = {}
    for i, (layer, group) in enumerate(zip(layers, chain.groups, strict=True)):
        members[group] = members.get(group, 0) + 1
        if members[group] > _SAME_GROUP:
            continue
        yield Spec(f"without {layer.name}", 0, count, (Edit(i, i + 1, 0),))
        for times in _REPEATS:
            yield Spec(f"{layer.name} x{times}", 0, count, (Edit(i, i + 1, times),))
        if members[group] == 1:
            yield Spec(f"only {layer.name}", i, i + 1)
            yield Spec(f"only {layer.name} x{_REPEATS[-1]}", i, i + 1, (Edit(i, i + 1, _REPEATS[-1]),))
            if i + 2 <= count:
                yield Spec(f"only {layer.name} and {layers[i + 1].name}", i, i + 2)
    for start in range(1, count):
        yield Spec(f"end from {layers[start].name}", start, count)
    for stop in _giving(chain):
        yield Spec(f"whole giving {layers[stop - 1].name}", 0, count, giving=stop)


def heavy_specs(chain: Chain, ballast: Edit, near: Sequence[Edit] = ()) -> Iterator[Spec]:
    """The programs with `ballast` (ballast.py), and short ones around each layer of `near`, which is their ballast."""
    yield from _heavy_anywhere(chain, ballast)
    layers, count = chain.layers, len(chain.layers)
    for edit in near:
        own, name = (edit,), label(chain, edit)
        more = f" with {name} x{edit.times}"
        for start in range(max(1, edit.start - _NEAR), edit.start):
            yield Spec(f"{layers[start].name} to {name}{more}", start, edit.stop, own)
        yield Spec(f"only {name} x{edit.times}", edit.start, edit.stop, own)
        for stop in range(edit.stop + 1, min(edit.stop + _NEAR, count) + 1):
            yield Spec(f"{name} to {layers[stop - 1].name}{more}", edit.start, stop, own)


def _heavy_anywhere(chain: Chain, ballast: Edit) -> Iterator[Spec]:
    layers, count, heavy = chain.layers, len(chain.layers), (ballast,)
    more = f" with {label(chain, ballast)} x{ballast.times}"
    yield Spec(f"whole{more}", 0, count, heavy)
    twice = replace(ballast, times=2 * ballast.times)
    yield Spec(f"whole with {label(chain, ballast)} x{twice.times}", 0, count, (twice,))
    for stop in _giving(chain):
        yield Spec(f"whole{more}, giving {layers[stop - 1].name}", 0, count, heavy, giving=stop)
    for stop in range(ballast.stop, count):
        yield Spec(f"prefix to {layers[stop - 1].name}{more}", 0, stop, heavy)
    for start in range(1, ballast.start + 1):
        yield Spec(f"end from {layers[start].name}{more}", start, count, heavy)
    first, last = layers[ballast.start].name, layers[ballast.stop - 1].name
    for start in range(1, ballast.start + 1):
        yield Spec(f"{layers[start].name} to {last}{more}", start, ballast.stop, heavy)
    for stop in range(ballast.stop + 1, count):
        yield Spec(f"{first} to {layers[stop - 1].name}{more}", ballast.start, stop, heavy)
    for i, layer in enumerate(layers):
        if ballast.start <= i < ballast.stop:
            continue
        for times in _HEAVY_REPEATS:
            what = f"{layer.name} x{times}" if times else f"without {layer.name}"
            edits = (Edit(i, i + 1, times), ballast) if i < ballast.start else (ballast, Edit(i, i + 1, times))
            yield Spec(what + more, 0, count, edits)


def _giving(chain: Chain) -> list[int]:
    """Cuts whose values a whole model may give out too: of the largest, of one about half as large, of the most tensors.

    The last tells what a tensor costs: behind ViT-B/16's qkv are three, and without this its time was 19 us +- 6.6 (H100).
    """
    sizes = {stop: sum(chain.size(n) for n in chain.live(stop) if n in chain.shapes) for stop in range(1, len(chain.layers))}
    if not sizes:
        return []
    largest = max(sizes, key=sizes.__getitem__)
    return sorted({largest, min(sizes, key=lambda stop: abs(sizes[stop] - 0.5 * sizes[largest])), _most_tensors(chain)})


def _most_tensors(chain: Chain) -> int:
    """The first of the cuts at which most values are live."""
    return max(range(1, len(chain.layers)), key=lambda stop: len(chain.live(stop)), default=1)


def alone(chain: Chain, edit: Edit) -> Spec:
    """A program with only the layers of an edit."""
    many = f" x{edit.times}" if edit.times > 1 else ""
    return Spec(f"only {label(chain, edit)}{many}", edit.start, edit.stop, (edit,))


def label(chain: Chain, edit: Edit) -> str:
    """The names of the layers of an edit."""
    first, last = chain.layers[edit.start].name, chain.layers[edit.stop - 1].name
    return first if first == last else f"{first} ... {last}"


def repeatable(chain: Chain) -> list[Edit]:
    """Layers that can be repeated several times in a row; if there are none, the smallest such blocks. One edit for each."""
    count = len(chain.layers)
    for length in range(1, count + 1):
        found = [i for i in range(count - length + 1) if span_of(chain, i, i + length) is not None]
        if found:
            return [Edit(i, i + length, 1) for i in found]
    return []


def _phased(chain: Chain, runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first layer, layers of a block, blocks) of runs, from the first layer on at which a block takes and makes one value."""
    for start, stop, period in runs:
        for first in range(start, start + period):
            times = (stop - first) // period
            if times >= 2 and span_of(chain, first, first + period) is not None:
                yield first, period, times
                break


def _periodic(signs: Sequence[str]) -> list[tuple[int, int, int]]:
    """(start, stop, period): runs of two or more equal blocks of at least two layers, the longest first, none overlapping."""
    found = []
    for period in range(2, len(signs) // 2 + 1):
        start = 0
        while start + 2 * period <= len(signs):
            stop = start + period
            while stop < len(signs) and signs[stop] == signs[stop - period]:
                stop += 1
            if stop - start >= 2 * period:
                found.append((start, stop, period))
            start = max(start + 1, stop - period + 1)
    chosen: list[tuple[int, int, int]] = []
    for start, stop, period in sorted(found, key=lambda run: (run[0] - run[1], run[2], run[0])):
        if all(start >= b or stop <= a for a, b, _ in chosen):
            chosen.append((start, stop, period))
    return chosen


def span_of(chain: Chain, start: int, stop: int) -> tuple[fx.Node, fx.Node] | None:
    """(what layers [start, stop) take, what they make) where these look alike and they make nothing else; None where not."""
    inside = [node for layer in chain.layers[start:stop] for node in layer.nodes]
    own, final, anchors = set(inside), set(chain.outputs), {layer.anchor for layer in chain.layers[start:stop]}
    made = [n for n in inside if n in final or any(u not in own for u in n.users)]
    if len(made) != 1 or made[0] not in chain.shapes:
        return None
    order = {node: i for i, node in enumerate(chain.root.graph.nodes)}
    # Only what leads to an anchor: copies that were chained by a shortcut alone would not wait for each other's products.
    above: set[fx.Node] = set()
    for node in reversed(inside):
        if node in anchors or any(user in above for user in node.users):
            above.add(node)
    taken = {x for n in above for x in n.all_input_nodes if x not in own and chain.shapes.get(x) == chain.shapes[made[0]]}
    taken = {x for x in taken if x.op != "get_attr"}
    # Of several the latest: what the layer before made.
    return (max(taken, key=order.__getitem__), made[0]) if taken else None
