"""Launches for one row that start early: which kernels wait and release, compiled for a card that is not here."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tilewright.asm.compile import Binary, record, stand_in
from tilewright.hw import env
from tilewright.hw.device import device_named
from tilewright.kernels.attention.paged.rope_cache_write import rope_kv_write_op
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.norm.rms_norm import add_rms_norm_op
from tilewright.op import Inputs, Op, early_launches, on_card

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(env.interpreting(), reason="Triton interprets kernels in this process, and compiles none")


def rows(inputs: Inputs, count: int, *sizes: int) -> tuple[torch.Tensor, ...]:
    return tuple(inputs.randn(count, size, dtype=BF16) for size in sizes)


def product(inputs: Inputs, count: int, computed: str = "") -> tuple[Any, ...]:
    weight, bias = inputs.randn(256, 512, dtype=BF16), inputs.randn(256, dtype=BF16)
    kept = (t if name == computed else Parameter(t, requires_grad=False) for name, t in (("weight", weight), ("bias", bias)))
    return (*rows(inputs, count, 512), *kept, "none", None)


def norm(inputs: Inputs, count: int) -> tuple[Any, ...]:
    return (*rows(inputs, count, 512, 512), inputs.randn(512, dtype=BF16), 1e-6)


def rotation(inputs: Inputs, count: int) -> tuple[Any, ...]:
    q, k, v = (inputs.randn(count, heads, 64, dtype=BF16) for heads in (4, 2, 2))
    caches = (inputs.randn(3, 2, 16, 64, dtype=BF16) for _ in range(2))
    positions = torch.arange(count)
    return q, k, v, positions, inputs.randn(40, 2, 32), *caches, positions, None, None, 1e-6, False, None, None


CASES: dict[str, tuple[Op, Callable[[Inputs, int], tuple[Any, ...]], bool]] = {
    "linear": (linear_op, product, True),
    "add_rms_norm": (add_rms_norm_op, norm, True),
    "rope_kv_write": (rope_kv_write_op, rotation, False),
}
"""Op, its arguments for a number of rows, and whether launches behind it may start early."""


def compiled(op: Op, args: tuple[Any, ...], card: str, early: bool) -> Binary:
    """The one kernel of a call on a card."""
    device, args = device_named(card), tuple(map(stand_in, args))
    with on_card(device), early_launches() if early else nullcontext():
        choice = op.choose(device, op.problem(*args))
        (binary,) = record(choice.impl, choice.config, args, device.arch)
    return binary


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("card", "count", "early"), [("h100", 1, True), ("h100", 1, False), ("h100", 2, True), ("a100", 1, True)]
)
def test_one_row_waits_inside_of_the_scope_alone(name: str, card: str, count: int, early: bool) -> None:
    op, arguments, releases = CASES[name]
    code = compiled(op, arguments(Inputs(), count), card, early).ptx
    starts_early = early and count == 1 and card == "h100"
    assert ("griddepcontrol.wait" in code) == starts_early
    if starts_early:
        assert ("griddepcontrol.launch_dependents" in code) == releases
    elif name != "linear" or card == "a100":
        assert "griddepcontrol" not in code


def test_weights_are_asked_for_before_the_wait() -> None:
    before, after = compiled(linear_op, product(Inputs(), 1), "h100", True).ptx.split("griddepcontrol.wait")
    assert "ld.global" in before
    assert "ld.global" in after


@pytest.mark.parametrize("computed", ["weight", "bias"])
def test_what_the_launch_before_may_have_computed_is_not_fetched_before_the_wait(computed: str) -> None:
    """As in routers of experts, which cast their weight to float32 in each step."""
    assert "griddepcontrol.wait" not in compiled(linear_op, product(Inputs(), 1, computed), "h100", True).ptx
