"""Conformance of every op in `ops.ALL`, generated: op x example x implementation.

Without a GPU the implementations run under Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/test_ops.py`. Run without
it on a machine without a GPU, only what needs no kernel is checked here (schema, fake, tracing).
"""

import pytest
import torch

from tests import conformance
from tilewright.hw.device import device_of
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.ops import ALL

INDEX = 0 if torch.cuda.is_available() else -1
DEVICE = device_of(INDEX)
TORCH_DEVICE = "cuda" if INDEX == 0 else "cpu"

# In the interpreter a run takes long: every third example. All run without it, and with kernels on a GPU.
REGISTERED = [
    pytest.param(op, ex, id=f"{op.name}-{ex.label}") for op in ALL for ex in op.examples[:: 3 if conformance.INTERPRETED else 1]
]
RUNS = [
    pytest.param(op, ex, impl, id=f"{op.name}-{ex.label}-{impl.name}") for op in ALL for ex in op.examples for impl in op.impls
]


@pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")
@pytest.mark.parametrize(("op", "example", "impl"), RUNS)
def test_matches_definition(op: Op, example: Example, impl: Impl) -> None:
    args = example.make(Inputs(TORCH_DEVICE))
    problem = op.problem(*args)
    if reason := impl.refusal(DEVICE, problem):
        pytest.skip(f"{impl.name} {reason}")
    conformance.check(op, impl, impl.space.default(DEVICE, problem), args)


@pytest.mark.parametrize(("op", "example"), REGISTERED)
def test_torch_registration(op: Op, example: Example) -> None:
    """Schema, fake and dispatch agree with what runs on this device."""
    args = example.make(Inputs(TORCH_DEVICE))
    # torch's check of the schema multiplies every argument, and float8 has no multiplication. In the interpreter a run takes
    # long, and conformance says of every implementation what that check says of one: it writes and returns what is declared.
    float8 = any(isinstance(a, torch.Tensor) and a.is_floating_point() and a.itemsize == 1 for a in args)
    left_out = float8 or conformance.INTERPRETED
    torch.library.opcheck(
        op.dispatched, args, test_utils=("test_faketensor",) if left_out else ("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_cost_counts_every_byte(op: Op) -> None:
    """No op claims fewer bytes than its outputs take, or no work at all."""
    for example in op.examples:
        args = example.make(Inputs())
        result = conformance.flat(op.reference(*conformance.fresh(args)))
        cost = op.cost(*args)
        assert cost.bytes >= sum(t.nbytes for t in result)
        assert cost.bytes > 0 or not any(t.numel() for t in result)


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_traces_whole(op: Op) -> None:
    """torch.compile takes a call of the op as one graph."""
    args = conformance.fresh(op.examples[0].make(Inputs(TORCH_DEVICE)))
    want = conformance.flat(op.run(*conformance.fresh(args)))
    with conformance.quiet_compile():
        got = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*args)
    for g, w in zip(conformance.flat(got), want, strict=True):
        assert torch.equal(conformance.bits(g), conformance.bits(w))
