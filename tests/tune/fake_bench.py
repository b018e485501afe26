"""A measuring process without a GPU: `python -m tests.tune.fake_bench`. Its op adds one; its configs misbehave by name.

Times are told, not measured, so that a test knows who wins: `TIMES`, in microseconds.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tune.rows import CARD
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.candidates import Task
from tilewright.tune.measure import Timing
from tilewright.tune.record import Environment, versions
from tilewright.tune.space import Config, Space
from tilewright.tune.worker import Call, Ground, serve

__all__ = ["CARD_HERE", "COMMAND", "TIMES", "task"]

COMMAND = (sys.executable, "-m", "tests.tune.fake_bench")
CARD_HERE = Device(kind="cuda", name=CARD, arch=90, sms=132, smem_bytes=232448, l2_bytes=1 << 16, memory_bytes=80 << 30)
TIMES = {"fast": 5.0, "close": 5.01, "slow": 9.0, "library": 6.0}
CONFIGS = ("close", "fast", "slow", "lost", "crash", "hang", "wrong", "forgets", "writes", "raises", "spills")
ACCUMULATE = 1.0
"""What a launch adds to the argument that it may write."""

_last_us = 0.0


def _reference(x: Tensor, total: Tensor, n: int) -> Tensor:
    total += ACCUMULATE
    return x + 1


def _launch(config: Config, x: Tensor, total: Tensor, n: int) -> Tensor:
    global _last_us
    how = config.get("how", "library")
    _last_us = TIMES.get(how, 7.0)
    result = torch.empty_like(x)
    if x.is_meta:
        return result
    match how:
        case "crash":
            os._exit(9)
        case "hang":
            time.sleep(600)
        case "raises":
            raise RuntimeError("no such\x1b[31m luck")
        case "writes":
            x.zero_()
        case "forgets":
            result[:-1] = x[:-1] + 1
            return result
    result.copy_(x + (1.5 if how == "wrong" else 1))
    # What is written in place must be right again at every launch that is checked: a copy that was not restored is not.
    total += ACCUMULATE
    return result


def _problem(x: Tensor, total: Tensor, n: int) -> tuple[str, int]:
    return "add", x.shape[0]


def _arguments(inputs: Inputs, *, M: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return inputs.randn(M, dtype=dtype), inputs.randn(4), M


OP = Op(
    name="test_add_one",
    reference=_reference,
    fake=lambda x, total, n: torch.empty_like(x),
    mutates=("total",),
    problem=_problem,
    cost=lambda x, total, n: Cost(flops=x.numel(), bytes=2 * x.nbytes),
    examples=(Example("small", lambda inputs: _arguments(inputs, M=8)),),
    make=_arguments,
    impls=(
        Impl(
            name="kernel",
            launch=_launch,
            space=Space(default=lambda device, problem: {"how": "close"}, axes={"how": CONFIGS}),
            batch_invariant=True,
        ),
        Impl(name="library", launch=_launch),
    ),
)


def task(m: int = 64, *, invariant: bool = False, configs: Sequence[str] = CONFIGS) -> Task:
    """A problem of it, of which these configs are candidates."""
    args = _arguments(Inputs("meta"), M=m)
    space = Space(default=lambda device, problem: {"how": configs[0]}, axes={"how": tuple(configs)})
    op = Narrowed(OP, Impl(name="kernel", launch=_launch, space=space, batch_invariant=True))
    refused = {"library": "is not batch-invariant"} if invariant else {}
    return Task(op=op, dims={"M": m}, args=args, device=CARD_HERE, refused=refused, invariant=invariant)


class Narrowed:
    """The op with another kernel in place of its first."""

    def __init__(self, op: Op, kernel: Impl):
        self._op, self.impls = op, (kernel, *op.impls[1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


class ScriptedTimer:
    """A `Timer` that launches as often as it must, and answers what the launch says that it takes."""

    def __init__(self, pause_s: float):
        self._pause_s = pause_s

    def once(self, call: Call) -> tuple[Any, float]:
        return call(0), _last_us

    def time(self, call: Call, sets: int, *, replays: int = 8, hopeless_us: float = float("inf")) -> Timing:
        time.sleep(self._pause_s)
        for i in range(sets):
            call(i)
        return Timing(_last_us, 0.1)

    def in_turns(self, calls: Sequence[Call], sets: int, *, rounds: int = 20) -> list[Timing]:
        return [self.time(call, sets) for call in calls]


def ground(pause_s: float = 0.0) -> Ground:
    def arguments(op: Op, words: Sequence[str], seed: int) -> tuple[Any, ...]:
        values = dict(word.split("=") for word in words)
        return _arguments(Inputs("cpu", seed), M=int(values["M"]))

    return Ground(
        op={OP.name: OP}.__getitem__,
        arguments=arguments,
        timer=ScriptedTimer(pause_s),
        environment=Environment(card=CARD, sms=132, clocks="none", policy="told", **versions()),
        l2_bytes=CARD_HERE.l2_bytes,
        synchronise=lambda: None,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(lambda: ground(*map(float, sys.argv[1:])))
