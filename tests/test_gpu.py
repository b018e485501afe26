"""What only a GPU can show of the whole: captured models and their replays, graphs beside each other, what calls choose."""

import pytest
import torch
from torch import Tensor, nn

from tests.conformance import bits, flat, fresh, mutated
from tilewright import ops
from tilewright.fuse import optimize
from tilewright.hw.device import device_of
from tilewright.kernels.launch.counters import own_tickets
from tilewright.op import Example, Inputs, Op, prefer
from tilewright.ops import ALL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

SOURCES = ("exact", "bucket", "default", "fixed")


class Net(nn.Module):
    """A convolution, a pool, a linear with its activation, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(16, 32, 3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.linear, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(nn.functional.gelu(self.linear(self.pool(nn.functional.relu(self.conv(x))).flatten(1))))


def test_an_optimised_model_is_captured_and_replayed() -> None:
    torch.manual_seed(0)
    model = Net().eval().cuda()
    first, second = (torch.randn(8, 16, 28, 28, device="cuda") for _ in range(2))
    fast = optimize(model, (first,), report=False)
    assert fast.captured is not None, "on a GPU a graph is captured"
    with torch.no_grad():
        wanted = [model(x) for x in (first, second)]
    got = [fast(x).clone() for x in (first, second, first)]
    assert torch.equal(got[0], got[2]), "a replay depends on its inputs alone"
    for y, want in zip(got, wanted):
        assert float((y.float() - want).norm() / want.norm()) < 3e-3


def test_graphs_with_counters_of_their_own_run_beside_each_other() -> None:
    """Split products on two streams at once, a hundred times: with shared counters they would take each other's parts."""
    made = []
    for seed in (1, 2):
        inputs = Inputs("cuda", seed)
        x, weight = inputs.randn(16, 16384, dtype=torch.bfloat16), inputs.randn(256, 16384, dtype=torch.bfloat16, scale=0.01)
        with torch.inference_mode(), prefer("skinny"):
            want = ops.linear(x, weight)
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with own_tickets(x.device) as held, torch.cuda.graph(graph, stream=stream):
                got = ops.linear(x, weight)
        made.append((stream, graph, got, want, held, x, weight))  # a replay reads its operands
    for _ in range(100):
        for stream, graph, *_ in made:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, got, want, held, *_ in made:
        assert torch.equal(got, want)
        assert not held.any(), "counters are zero between launches"


@pytest.mark.parametrize(
    ("op", "example"), [pytest.param(op, example, id=f"{op.name}-{example.label}") for op in ALL for example in op.examples[:2]]
)
def test_a_call_runs_what_was_chosen(op: Op, example: Example) -> None:
    """The implementation and config that `choose` names, bit for bit."""
    args = example.make(Inputs("cuda"))
    device, problem = device_of(0), op.problem(*args)
    if all(impl.refusal(device, problem) for impl in op.impls):
        pytest.skip(f"no implementation takes it on {device.name}")
    choice = op.choice_for(*args)
    assert choice.source in SOURCES
    called, alone = fresh(args), fresh(args)
    with torch.inference_mode():
        got = flat(op(*called)) + mutated(op, called)
        want = flat(choice.impl.launch(choice.config, *alone)) + mutated(op, alone)
    assert op.chosen(*called).impl is choice.impl
    for g, w in zip(got, want, strict=True):
        assert torch.equal(bits(g), bits(w))
