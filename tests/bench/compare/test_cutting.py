"""Variants cut from one exported graph are what tracing each of them gives: the same operations and numbers, cast or not."""

import copy
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, fx

from tests.bench.compare.test_variants import chain_of, leaves
from tilewright.bench.compare.cutting import Cutter, NotCut, boundaries
from tilewright.bench.compare.specs import Edit
from tilewright.bench.compare.variants import Variant, candidates
from tilewright.fuse import optimize
from tilewright.fuse.trace import Traced, trace

CASES = [
    ("residual", "conv2 x4"),  # a shortcut into the repeated layer
    ("residual", "without conv2"),
    ("written", "prefix to value"),  # two outputs; a number as input, ids
    ("shared", "layer x2"),  # one weight, three layers
    ("stack", "0 ... 3 x2"),
]


@cache
def cutter_of(name: str) -> Cutter:
    return Cutter(chain_of(name))


def variant_of(name: str, variant: str) -> Variant:
    (found,) = (v for v in candidates(chain_of(name)) if v.name == variant)
    return found


def operations(traced: Traced) -> Counter[tuple[str, object]]:
    """Each call with the shape, dtype and order of its result."""
    found = Counter()
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function":
            found[str(node.target), (value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else None] += 1
    return found


@pytest.mark.parametrize(("name", "which"), CASES)
def test_a_cut_is_what_tracing_gives(name: str, which: str) -> None:
    variant = variant_of(name, which)
    cut = cutter_of(name).known(variant)
    got, wanted = trace(cut, variant.inputs), trace(variant.module, variant.inputs)
    assert operations(got) == operations(wanted)
    with torch.no_grad():
        pairs = list(zip(leaves(got.module(*variant.inputs)), leaves(wanted.module(*variant.inputs)), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(a, b) for a, b in zip(leaves(cut(*variant.inputs)), (b for _, b in pairs), strict=True))


def test_a_cast_cut_is_that_of_the_cast_model() -> None:
    """As `optimize` casts what it is given: a deep copy, then the inputs."""
    variant = variant_of("residual", "conv2 x4")
    inputs = tuple(x.bfloat16() for x in variant.inputs)
    got = trace(copy.deepcopy(cutter_of("residual").known(variant)).to(torch.bfloat16), inputs)
    wanted = trace(copy.deepcopy(variant.module).to(torch.bfloat16), inputs)
    assert operations(got) == operations(wanted)
    assert {x.dtype for x in got.state.values() if x.is_floating_point()} == {torch.bfloat16}
    with torch.no_grad():
        a, b = leaves(got.module(*inputs))[0], leaves(wanted.module(*inputs))[0]
    assert torch.equal(a, b)


def test_copies_have_their_own_weights() -> None:
    """Of ballast and of another repeated layer in one program."""
    chain = chain_of("stack")
    (variant,) = (v for v in candidates(chain, Edit(0, 1, 3)) if v.name == "4 x16 with 0 x3")
    state = cutter_of("stack").known(variant).as_traced(variant.inputs, {}).state
    assert sum(name.startswith("copy_") for name in state) == 2 * (2 + 15), "weight and bias of each copy but the first"
    wanted = leaves(variant.module(*variant.inputs))
    got = leaves(cutter_of("stack").known(variant).as_traced(variant.inputs, {}).module(*variant.inputs))
    assert torch.equal(got[0], wanted[0])


def test_optimize_makes_the_same_program_of_it() -> None:
    variant = variant_of("residual", "without conv2")
    cut = cutter_of("residual")
    options = {"precision": "bf16", "report": False, "compiled": False}
    plain, ours = (optimize(m, variant.inputs, **options) for m in (variant.module, cut.known(variant)))
    assert isinstance(ours.fused, fx.GraphModule)
    assert ours.fused.code == plain.fused.code
    assert torch.equal(leaves(ours(*variant.inputs))[0], leaves(plain(*variant.inputs))[0])


def test_what_cannot_be_cut_is_said() -> None:
    chain = chain_of("stack")
    values = boundaries(chain)
    del chain.shapes[values[3]]
    try:
        with pytest.raises(NotCut, match="which are not tensors"):
            Cutter(chain)
    finally:
        chain_of.cache_clear()
