"""Kernels and the layers that they are of, from traces as torch.profiler writes them; and on a GPU from the profiler itself."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.bench.compare.synthetic import resnet50
from tilewright.bench.compare.claims import table
from tilewright.bench.compare.engine import EngineError, Settings
from tilewright.bench.compare.engines.kernel_records import RANGE, Kernel, kernels_of, matched
from tilewright.bench.compare.engines.optimize import Optimize
from tilewright.bench.compare.engines.torch_engines import Eager, Graph
from tilewright.bench.compare.results import Counter


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7, "args": args}


def trace(*, late: float = 0.0) -> dict[str, Any]:
    """Two runs of a convolution in a block and a product; kernels run later than they are launched."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for run, at in enumerate((0.0, 1000.0)):
        events += [
            event("user_annotation", "tilewright run", at, 500),
            event("user_annotation", f"{RANGE}", at + 10, 300),
            event("user_annotation", f"{RANGE}block", at + 20, 100),
            event("user_annotation", f"{RANGE}block.conv", at + 30, 50),
            event("cuda_driver", "cuLaunchKernelEx", at + 40, 5, correlation=10 * run + 1),
            event("cuda_runtime", "cudaLaunchKernel", at + 90, 5, correlation=10 * run + 2),
            event("cuda_runtime", "cudaLaunchKernel", at + 200, 5, correlation=10 * run + 3),
            event("gpu_memset", "Memset (Device)", at + 620 + late, 1.0, correlation=10 * run + 3),
            event("kernel", "conv", at + 600, 12.0 + run, correlation=10 * run + 1),
            event("kernel", "relu", at + 615, 3.0, correlation=10 * run + 2),
        ]
    events.append(event("kernel", "somebody else's", 5.0, 9.0, correlation=99))
    return {"traceEvents": events}


def test_a_kernel_is_of_the_innermost_range_it_was_launched_in() -> None:
    runs = kernels_of(trace())
    assert [[(k.name, k.layer, k.us) for k in run] for run in runs] == [
        [("conv", "block.conv", 12.0), ("relu", "block", 3.0), ("Memset (Device)", "", 1.0)],
        [("conv", "block.conv", 13.0), ("relu", "block", 3.0), ("Memset (Device)", "", 1.0)],
    ]


def test_a_replay_takes_over_the_owners() -> None:
    owners = kernels_of(trace())
    replays = [[k._replace(layer="", us=k.us + 1) for k in run] for run in owners]
    counters, operations = matched(owners, [*replays, *replays[:1]])
    assert [(c.name, c.kind, c.seconds) for c in counters] == [
        ("1: block.conv", "conv", pytest.approx(13e-6)),
        ("2: block", "relu", pytest.approx(4e-6)),
        ("3: ", "Memset (Device)", pytest.approx(2e-6)),
    ]
    assert [o.scope for o in operations] == ["block.conv", "block", ""]


def test_what_is_not_exact_is_refused() -> None:
    owners = kernels_of(trace())
    other = [[k if i else k._replace(name="fused") for i, k in enumerate(run)] for run in owners]
    with pytest.raises(EngineError, match="first different at 0"):
        matched(owners, other)
    shorter = [run[:-1] for run in owners]
    with pytest.raises(EngineError, match=r"3 and 2 kernels, first different at 2"):
        matched(owners, shorter)
    together = [[Kernel("a", 0.0, 10.0, "x"), Kernel("b", 5.0, 10.0, "y")]]
    with pytest.raises(EngineError, match="overlap with others for 5"):
        matched(together, together)


def test_the_report_divides_what_both_sides_kernels_take() -> None:
    from dataclasses import replace

    c = resnet50()
    sides = [
        replace(side, counters_exact=True, counters=[
            Counter(name=str(i), seconds=seconds, layers=s.layers) for i, s in enumerate(c.segments)
        ])
        for side, seconds in ((c.ours, 1e-6), (c.baseline, 3e-6))
    ]  # fmt: skip
    found = table(replace(c, ours=sides[0], baseline=sides[1]))
    assert found is not None
    assert found.columns[-1] == "speed-up by their kernels"
    assert {row[-1] for row in found.rows if row[0] != "of no segment"} == {"3.00×"}
    found = table(replace(c, ours=sides[0], baseline=replace(sides[1], counters_exact=False)))
    assert found is not None
    assert "speed-up by their kernels" not in found.columns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: there are no kernels to record")
@pytest.mark.parametrize("kind", [Eager, Graph, Optimize])
def test_every_kernel_of_an_open_engine_has_its_layer(kind: Any) -> None:
    device = torch.device("cuda")
    settings = Settings(device=device, threads=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.LayerNorm(512)).to(device).eval()
    built = kind("fp16", settings).build(model, (torch.randn(64, 256, device=device),), "whole")
    counters = built.counters()
    assert {o.scope for o in built.operations} >= {"0", "2", "3"}
    assert sum(c.seconds for c in counters) > 1e-6
    built.close()
