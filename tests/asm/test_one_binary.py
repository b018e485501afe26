"""One problem, one binary: neither how many rows a call has nor, for most ops, where they start, makes Triton compile anew.

A running server meets new numbers of rows all the time. If an argument of a kernel is 1 for one of them, or a multiple of 16
for some, Triton specialises on that, and the server compiles in the middle of a request. Nothing is compiled here: the test
asks Triton how it would specialise the arguments of each launch.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.asm.signatures import Signature, padded, signatures
from tilewright.asm.compile import stand_in
from tilewright.asm.representatives import _TABLE
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.op import Impl, Inputs, Op
from tilewright.ops import ALL

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter specialises nothing")

LAYOUTS = ((0, 0), (1, 0), (8, 0), (0, 1))
"""Elements between the rows of every operand, and rows between its blocks."""
COUNTS = {"M": (1, 2, 3, 16, 17), "T": (1, 2, 3, 16, 17), "B": (1, 2, 3), "KV": (255, 256)}
"""Dimensions that change from step to step of a server."""

STRIDES_OF_A_MODEL = {
    "attention", "attention_backward", "biased_attention", "block_scaled_linear", "cast_linear", "grouped_block_scaled_linear",
    "grouped_linear", "grouped_mixed_linear", "grouped_scaled_linear", "grouped_weight_gradient", "linear", "mixed_linear",
    "mla_rope_write", "mx_linear", "quantize_keys_values", "scaled_attention", "scaled_linear",
}  # fmt: skip
"""Ops whose kernels are compiled anew for strides of another kind (1, a multiple of 16, other): those of weights, of heads and
of operands that are views. A model's layers fix them, so a warm-up has met them. The number of rows may not matter here either,
but for the stride of a batch: it is a number of rows, and of another kind only where a single row is no multiple of 16."""

Group = dict[tuple[Any, ...], set[tuple[tuple[str, str], ...]]]


def calls(op: Op) -> Iterator[tuple[Any, ...]]:
    """The op's examples, and some of its representatives with other counts."""
    yield from (example.make(Inputs()) for example in op.examples)
    if op.make is None:
        return
    for dims in _TABLE.get(op.name, ())[:4]:
        yield op.make(Inputs("meta"), **dims)
        for name in dims.keys() & COUNTS.keys():
            yield from (op.make(Inputs("meta"), **{**dims, name: count}) for count in COUNTS[name])


def collect(op: Op, arch: int, across_layouts: bool) -> Group:
    """(implementation, problem, kernel, constants ...) -> the ways in which its run-time arguments were specialised."""
    found: Group = defaultdict(set)
    for plain in calls(op):
        plain = tuple(stand_in(a) for a in plain)
        for layout in LAYOUTS:
            args = tuple(padded(a, *layout) if isinstance(a, Tensor) else a for a in plain)
            for impl in op.impls:
                for key, given in launches(op, impl, args, arch, layout):
                    found[(*key, None if across_layouts else layout)].add(given)
    return found


def launches(
    op: Op, impl: Impl, args: tuple[Any, ...], arch: int, layout: tuple[int, int]
) -> Iterator[tuple[tuple[Any, ...], tuple[tuple[str, str], ...]]]:
    try:
        problem = op.problem(*args)
        if impl.refusal(CARD_OF_ARCH[arch], problem) is not None:
            return
        made = signatures(impl, impl.space.default(CARD_OF_ARCH[arch], problem), args, arch)
    except (AssertionError, RuntimeError, ValueError):
        # The public function makes such a layout ready first.
        assert layout != (0, 0), f"{op.name}/{impl.name} does not launch on dense operands"
        return
    shape = tuple((a.dim(), a.dtype) if isinstance(a, Tensor) else None for a in args)
    for one in made:
        yield (impl.name, problem, shape, one.kernel, one.constants), integers(one)


def integers(signature: Signature) -> tuple[tuple[str, str], ...]:
    """The integer arguments: an address is one of the caller's allocations, at a multiple of 16 bytes."""
    return tuple((name, kind) for name, kind in signature.given if kind.startswith(("i32", "i64", "constexpr 1")))


def differing(found: Group) -> list[str]:
    """impl/kernel: the arguments that were specialised in more than one way for one problem."""
    words = set()
    for (impl, _problem, _shape, kernel, *_), ways in found.items():
        first, *others = sorted(ways)
        for other in others:
            words |= {f"{impl}/{kernel}: {a[0]} is {a[1]} and {b[1]}" for a, b in zip(first, other) if a != b}
    return sorted(words)


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_counts_and_layouts_choose_no_binary(op: Op) -> None:
    fixed = op.name in STRIDES_OF_A_MODEL
    found = collect(op, 90, across_layouts=not fixed) or collect(op, 100, across_layouts=not fixed)
    assert found, "no launch was seen"
    wrong = [words for words in differing(found) if not (fixed and "_batch_stride" in words)]
    assert not wrong, "\n".join(["put these into do_not_specialize, and see kernels/device/row_start.py:", *wrong])


@triton.jit(do_not_specialize=["rows"])
def _planted_kernel(x_ptr, y_ptr, rows, x_row_stride, D: tl.constexpr):
    at = tl.program_id(0) * x_row_stride + tl.arange(0, D)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def test_a_stride_that_triton_specialises_is_found() -> None:
    def launch(config: Any, x: Tensor) -> None:
        _planted_kernel[(x.shape[0],)](x, x, x.shape[0], x.stride(0), D=16)

    impl = Impl(name="planted", launch=launch)
    ways = set()
    for layout in LAYOUTS:
        x = padded(torch.empty(2, 16, device="meta"), *layout)
        ways |= {integers(one) for one in signatures(impl, {}, (x,), 90)}
    found: Group = {("planted", None, None, "_planted_kernel"): ways}
    assert differing(found) == ["planted/_planted_kernel: x_row_stride is i32 and i32 D"]
    assert dict(next(iter(ways)))["rows"] == "i32", "not specialised, though it is 2"
