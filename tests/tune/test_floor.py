"""A predicted time is never below the floor that the card's ceilings give, whatever the problem, the card and the dtype."""

import itertools
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from tilewright.asm.certificate import config_facts, config_key
from tilewright.bench.explain import explain
from tilewright.bench.op import unit_of
from tilewright.hw import env
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import device_named
from tilewright.hw.roofline import roof
from tilewright.op import Inputs, Op
from tilewright.ops import ALL
from tilewright.tune.model import predict
from tilewright.tune.unmeasured import rank

CARDS = ("a100", "h100", "h200", "b200", "l4", "rtx-4090")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRODUCTS = [
    *({"M": n, "N": n, "K": n} for n in (64, 512, 1793, 4096, 16384)),
    *({"M": m, "N": 28672, "K": 8192} for m in (1, 16, 256, 4096)),
    *({"M": m, "N": 4095, "K": 4097} for m in (8, 2048)),
]
ROWS = [{"M": m, "N": n} for m, n in ((1, 64), (100, 4096), (8192, 16384), (64, 131072))]
PROBLEMS = {"linear": PRODUCTS, "softmax": ROWS, "rms_norm": ROWS, "add_rms_norm": ROWS, "layer_norm": ROWS}
OPS = {op.name: op for op in ALL}


def predictions(op: Op, card: str, args: tuple[Any, ...]) -> Iterator[tuple[str, float]]:
    """Of every implementation that takes the problem: with its default config, and with the first ones of its space."""
    device = device_named(card)
    problem = op.problem(*args)
    for impl in op.impls:
        if impl.work is None or impl.refusal(device, problem) is not None:
            continue
        facts = config_facts(op.name, impl.name, device.arch)
        first = impl.space.configs(device, problem) if impl.space.axes else ()
        for config in (impl.space.default(device, problem), *islice(first, 8)):
            work, fact = impl.work(device, config, *args), facts.get(config_key(config))
            if work.unit not in ceilings(device).flops or not (work.library or (fact is not None and fact.error is None)):
                continue
            try:
                yield f"{impl.name} {config}", predict(device, work, None if work.library else fact).seconds
            except ValueError:
                continue  # no block fits an SM


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("card", CARDS)
def test_no_prediction_is_below_its_floor(name: str, card: str) -> None:
    op, checked = OPS[name], 0
    assert op.make is not None
    found = ceilings(device_named(card))
    for dims in PROBLEMS[name]:
        for dtype in DTYPES:
            args = op.make(Inputs("meta"), **dims, dtype=dtype)
            floor_s = roof(op.cost(*args), found, unit_of(args, found.flops)).seconds
            for what, seconds in predictions(op, card, args):
                # A vector of N columns that all rows share may count once less in a kernel's work.
                assert seconds >= 0.98 * floor_s, f"{card} {name} {dims} {dtype} {what}"
                checked += 1
    assert checked


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_ranked_times_are_not_below_it_either_and_keep_their_order(card: str) -> None:
    op, device = OPS["linear"], device_named(card)
    assert op.make is not None
    args = op.make(Inputs("meta"), M=4096, N=4096, K=4096)
    floor_s = roof(op.cost(*args), ceilings(device), "bf16").seconds
    impls = [impl for impl in op.impls if impl.refusal(device, op.problem(*args)) is None]
    ranked = list(rank("linear", device, op.problem(*args), args, impls))
    assert ranked[0].seconds == pytest.approx(floor_s)
    assert ranked[0].impl.name in ("vendor", "sm90")
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(ranked))


@pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("n", [1024, 4096, 8192])
@pytest.mark.parametrize("card", ["a100", "h100"])
def test_explain_tells_no_time_below_its_floor(card: str, n: int) -> None:
    said = explain(OPS["linear"], {"M": n, "N": n, "K": n}, device_named(card))
    assert said["predicted"]["us"] >= said["roofline"]["floor_us"] * (1 - 1e-9)
    assert math.isfinite(said["predicted"]["us"])


@pytest.mark.parametrize("op", [op for op in ALL if any(impl.work for impl in op.impls)], ids=lambda op: op.name)
def test_every_example_of_every_op_can_be_ranked_with_all_that_takes_it(op: Op) -> None:
    """Whoever says its work says it for the config that it has, be it the only one."""
    device = device_named("h100")
    for example in op.examples:
        args = example.make(Inputs())
        problem = op.problem(*args)
        allowed = [impl for impl in op.impls if impl.refusal(device, problem) is None]
        assert all(ranked.seconds >= 0 for ranked in rank(op.name, device, problem, args, allowed))
