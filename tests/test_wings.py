"""The plan of `tilewright/kernels`: which folder may import which, and what the rest of the package may import of it."""

import ast
from collections.abc import Iterator

import pytest

from tests.source import Source, planted, sources
from tests.test_layers import name_of

KERNELS = "tilewright.kernels"

# The toolkits, from the bottom up: each may import those before it, and no wing.
TOOLKITS = ("launch", "device", "hopper")

# Wing -> the wings that it imports.
WINGS: dict[str, tuple[str, ...]] = {
    "attention": (),
    "conv": ("gemm",),  # a convolution of 1 x 1 is a product; the Hopper kernel is the product's with other operands
    "dedup": (),
    "elementwise": (),
    "embedding": (),
    "experts": (),
    "gemm": (
        "elementwise",
        "experts",
        "quantize",
    ),  # what follows cuBLAS's product; what puts rows in order, or quantises, before
    "layout": (),
    "norm": (),
    "optimizer": (),
    "quantize": ("elementwise", "norm"),  # behind which its fused forms quantise
    "reduce": (),
    "sampling": (),
    "softmax": (),
    "spatial": (),
}

# Beside op files, what the rest of the package may import: what public functions check, calls that are made again, and how an
# optimizer's tensors lie in flat memory.
FACES = ("checks", "multi_tensor", "replay")


def place_of(module: str) -> str:
    """The folder of `kernels` that a module is in; "" for a module of none."""
    return module.split(".")[2] if module.startswith(f"{KERNELS}.") else ""


def modules() -> dict[str, Source]:
    return {source.module: source for source in sources("tilewright")}


def op_files() -> set[str]:
    """Modules that make an `Op`."""
    return {
        module
        for module, source in modules().items()
        if place_of(module) and any(isinstance(n, ast.Call) and name_of(n.func) == "Op" for n in source.nodes)
    }


def imported(source: Source, known: dict[str, Source]) -> Iterator[tuple[int, str]]:
    """(line, module of kernels) of every import at any depth."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if place_of(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(KERNELS):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield node.lineno, below if below in known else str(node.module)


def broken(source: Source, known: dict[str, Source], ops: set[str]) -> Iterator[str]:
    here = place_of(source.module)
    for line, module in imported(source, known):
        there, said = place_of(module), f"{source.path}:{line}: imports {module}"
        if here == there:
            continue
        if not here:
            face = module.rpartition(".")[2]
            if there not in ("launch", "device") and module not in ops and face not in FACES:
                yield f"{said}; from outside kernels only op files, {' and '.join(FACES)}, launch/ and device/"
        elif here in TOOLKITS:
            if there not in TOOLKITS[: TOOLKITS.index(here)]:
                yield f"{said}; {here}/ imports {' and '.join(TOOLKITS[: TOOLKITS.index(here)]) or 'no other folder'}"
        elif there not in TOOLKITS and there not in WINGS[here]:
            yield f"{said}; {here}/ may import {', '.join(WINGS[here]) or 'no other wing'}"


def layers_call_ops(source: Source, known: dict[str, Source]) -> Iterator[str]:
    if source.part in ("nn", "models", "quant", "engine", "server", "cli"):
        yield from (f"{source.path}:{line}: imports {m}; {source.part} calls ops" for line, m in imported(source, known))


def test_folders_know_what_they_may() -> None:
    known, ops = modules(), op_files()
    assert ops
    assert not [finding for source in known.values() for finding in broken(source, known, ops)]


def test_layers_call_ops_only() -> None:
    known = modules()
    assert not [finding for source in known.values() for finding in layers_call_ops(source, known)]


def test_every_folder_has_its_place_and_no_two_wings_know_each_other() -> None:
    folders = {place_of(module) for module in modules() if place_of(module)}
    assert folders == {*TOOLKITS, *WINGS}
    waiting = [[wing] for wing in WINGS]
    while waiting:
        path = waiting.pop()
        assert path[-1] not in path[:-1], " -> ".join(path)
        waiting += [[*path, below] for below in WINGS[path[-1]]]


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("tilewright/kernels/norm/a.py", "from tilewright.kernels.softmax import softmax", "norm/ may import no other wing"),
        ("tilewright/kernels/norm/a.py", "def f():\n    import tilewright.kernels.conv.conv", "norm/ may import no other wing"),
        ("tilewright/kernels/norm/a.py", "from tilewright.kernels.launch.shapes import ceil_div", None),
        ("tilewright/kernels/conv/a.py", "from tilewright.kernels.gemm.tile import grouped", None),
        ("tilewright/kernels/gemm/a.py", "from tilewright.kernels.conv.conv import conv_op", "gemm/ may import elementwise"),
        ("tilewright/kernels/launch/a.py", "from tilewright.kernels.device import dot", "launch/ imports no other folder"),
        ("tilewright/kernels/device/a.py", "from tilewright.kernels.hopper import epilogue", "device/ imports launch"),
        ("tilewright/ops/a.py", "from tilewright.kernels.gemm.linear import linear_op", None),
        ("tilewright/ops/a.py", "from tilewright.kernels.gemm import sm90", "only op files"),
        ("tilewright/fuse/a.py", "from tilewright.kernels.hopper.epilogue import activate", "only op files"),
        ("tilewright/nn/a.py", "from tilewright.kernels.norm.rms_norm import rms_norm_op", "nn calls ops"),
    ],
)
def test_what_breaks_a_rule_is_found(path: str, text: str, wanted: str | None) -> None:
    known, source = modules(), planted(path, text)
    found = [*broken(source, known, op_files()), *layers_call_ops(source, known)]
    assert wanted in " ".join(found) if wanted else not found
