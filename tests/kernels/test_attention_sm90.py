"""Attention by hand for Hopper, on a Hopper card: every config at tile edges, and rows that do not know their batch.

Elsewhere these kernels are compiled and certified, and everything else about them is tested without them.
"""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import conformance
from tilewright import ops
from tilewright.hw.device import CARD_OF_ARCH, device_of
from tilewright.kernels.attention import attention
from tilewright.kernels.attention.attention import attention_op
from tilewright.kernels.attention.backward import backward as attention_backward
from tilewright.kernels.attention.backward.backward import attention_backward_op
from tilewright.kernels.attention.reference import Bends, by_group, inverted, scores_of
from tilewright.op import Inputs, Op, invariant
from tilewright.tune.tolerance import Poisoned, errors

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
pytestmark = pytest.mark.skipif(DEVICE.kind != "cuda" or DEVICE.arch != 90, reason="no Hopper card here")

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def configs(op: Op, example: Any, dims: tuple[tuple[int, int], ...]) -> list[Any]:
    """Each config of `sm90` for each of the head dims."""
    impl = op.impls[0]
    found = []
    for dim, value_dim in dims:
        problem = op.problem(*example("", ((64, 64),), (1, 1), dim, value_dim=value_dim).make(Inputs("cpu")))
        for config in impl.space.configs(CARD_OF_ARCH[90], problem):
            label = "-".join(f"{name}={value}" for name, value in config.items())
            found.append(pytest.param(dim, value_dim, config, id=f"{dim}/{value_dim}-{label}"))
    return found


@pytest.mark.parametrize(("dim", "value_dim", "config"), configs(attention_op, attention.attention_example, DIMS))
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "left": 100, "sinks": True}], ids=str)
def test_forward_at_tile_edges(dim: int, value_dim: int, config: Any, mask: dict[str, Any]) -> None:
    """One less, just, and one more than a tile or a block of keys, on either side; masks that end at and round one."""
    lengths = ((127, 129), (128, 128), (129, 127), (193, 191), (64, 65), (1, 129), (2, 1), (0, 5), (7, 0))
    example = attention.attention_example("", lengths, (2, 1), dim, value_dim=value_dim, packed=True, lse=True, **mask)
    conformance.check(attention_op, attention_op.impls[0], config, example.make(Inputs("cuda", seed=5)))


SQUARE = tuple(pair for pair in DIMS if pair[0] == pair[1])


def _rounded_as_the_kernel_rounds(args: tuple[Any, ...]) -> list[Tensor]:
    """dq, dk and dv in float64, of weights and their gradients that are rounded once, as operands of the last products.

    A rounding of a weight counts in every element of its sum: the largest of all their errors has no bound of a few roundings
    (two float64 definitions, with and without it, are up to 0.0164 of the RMS apart here), so that is no error of the kernel's.
    """
    do, q, k, v, out, lse, *_ = args
    scale, causal, _, left, *_, sinks, _ = args[10:]
    groups, dtype = k.shape[2], q.dtype
    bends = Bends(left, 0 if causal else None, sinks=sinks)
    of_q, of_k, of_v, of_do, of_out = (by_group(t[0].double(), groups) for t in (q, k, v, do, out))
    scores, _ = scores_of(of_q, of_k, scale, bends)
    weights = (scores - inverted(lse.double().unflatten(0, (groups, -1)))[..., None]).exp()
    changes = (weights * (of_do @ of_v.mT - (of_do * of_out).sum(-1, keepdim=True))).to(dtype).double()
    dq = (changes @ of_k * scale).flatten(0, 1)
    dk, dv = ((changes.mT @ of_q * scale).sum(1), (weights.to(dtype).double().mT @ of_do).sum(1))
    return [t.transpose(0, 1)[None] for t in (dq, dk, dv)]


@pytest.mark.parametrize(("dim", "value_dim", "config"), configs(attention_backward_op, attention_backward._example, SQUARE))
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "left": 63, "sinks": True}], ids=str)
def test_backward_at_tile_edges(dim: int, value_dim: int, config: Any, mask: dict[str, Any]) -> None:
    op, impl = attention_backward_op, attention_backward_op.impls[0]
    for lengths in ((127, 129), (129, 128), (65, 63), (193, 257)):
        example = attention_backward._example("", (lengths,), (2, 1), dim, value_dim=value_dim, **mask)
        args = example.make(Inputs("cuda", seed=5))
        with Poisoned():
            got, again = (conformance.outputs(op, impl, config, args) for _ in range(2))
        exact = conformance.oracle(op, args)
        for g, a, definition, rounded in zip(got, again, exact, [*_rounded_as_the_kernel_rounds(args), exact[3]], strict=True):
            assert torch.equal(g, a), f"{lengths}: two runs differ"
            largest, rms = conformance.limits(op, impl, g.dtype)
            (most, _), (_, usual) = errors(g, rounded), errors(g, definition)
            assert most <= largest, f"{lengths}: largest error {most:.3g} of the RMS, limit {largest:.3g}"
            assert usual <= rms, f"{lengths}: RMS error {usual:.3g} of the RMS, limit {rms:.3g}"


def _in_any_order(*args: Any, **options: Any) -> Any:
    return attention_backward._example(*args, deterministic=False, **options)


STAYING = [param for param in configs(attention_backward_op, _in_any_order, SQUARE) if param.values[2]["SETS"]]


@pytest.mark.parametrize(("dim", "value_dim", "config"), STAYING)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "left": 63, "sinks": True}], ids=str)
def test_backward_of_programs_that_stay(dim: int, value_dim: int, config: Any, mask: dict[str, Any]) -> None:
    """Several tiles a program: what has an order has the bits of a program a tile; dq, which has none, its error."""
    op, impl = attention_backward_op, attention_backward_op.impls[0]
    for lengths, count, heads in (((193, 257), 40, (4, 2)), ((129, 128), 9, (2, 2)), ((65, 63), 1, (2, 1))):
        args = _in_any_order("", (lengths,) * count, heads, dim, value_dim=value_dim, **mask).make(Inputs("cuda", seed=5))
        with Poisoned():
            want, got = (conformance.outputs(op, impl, each, args) for each in ({**config, "SETS": 0}, config))
        for w, g in zip(want[1:], got[1:], strict=True):
            assert torch.equal(w, g), f"{lengths}: other bits"
        exact = conformance.oracle(op, args)[0]
        _, usual = errors(got[0], exact)
        assert usual <= conformance.limits(op, impl, got[0].dtype)[1], f"{lengths}: RMS error {usual:.3g} of the RMS"


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True, "window": 100})


@pytest.mark.parametrize(("dims", "options"), list(product(DIMS, OPTIONS)), ids=str)
def test_a_row_does_not_depend_on_its_batch(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """Alone, beside others, beside longer ones, packed, heads first, or as a chunk: the same bits."""
    inputs, rows = Inputs("cuda"), 700
    q, k, v = (inputs.randn(2, rows, h, d, dtype=torch.bfloat16) for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    longer = [torch.cat([t[1], inputs.randn(3000, *t.shape[2:], dtype=t.dtype)]) for t in (q, k, v)]
    cu = inputs.tensor([0, rows, rows + 3000], torch.int32)
    with invariant():
        assert attention_op.choice_for(q, k, v, None, None, rows, rows, 0.1, True, False).impl.name == "sm90_invariant"
        whole: Any = ops.attention(q, k, v, **options)[1]
        others: list[Any] = [ops.attention(q[1:], k[1:], v[1:], **options)[0]]
        others.append(ops.attention(*longer, cu_q=cu, cu_k=cu, max_q=3000, max_k=3000, **options)[:rows])
        first = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        others.append(ops.attention(*first, **options)[1])
        if options:
            ends = (0, 64, 192, 640, 699, rows)
            chunks: list[Any] = [ops.attention(q[1:, a:b], k[1:, :b], v[1:, :b], **options)[0] for a, b in pairwise(ends)]
            others.append(torch.cat(chunks))
    for other in others:
        assert torch.equal(whole, other)
