"""An engine in this process whose calls cost what is asked for, without waiting: a floor, a beginning, and each product's time.

    Floor("FLOOR_US,BEGIN_US,SPEED[,SEED]")   seconds = max(FLOOR, BEGIN + sum of products / SPEED), with noise of 1 %

A captured model is one with a floor: its device works while the host does what each call needs. PyTorch eager has none: there
every layer is the host's. Outputs are the model's own.
"""

import random
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.bench.compare.engine import Settings, flat_outputs

__all__ = ["Floor", "seconds_of"]


def seconds_of(rows: int, columns: int) -> float:
    """Of a product at speed 1: a microsecond and some more for its weight."""
    return 1e-6 + 2e-11 * rows * columns


class Floor:
    """See above."""

    def __init__(self, option: str, settings: Settings):
        floor, begin, speed = (float(x) for x in option.split(",")[:3])
        self.floor_s, self.begin_s, self.speed = 1e-6 * floor, 1e-6 * begin, speed
        self.random = random.Random(option)
        self.facts: dict[str, Any] = {
            "precision": "fp32", "device": "cpu", "threads": settings.threads, "graph": False, "copies": "none",
            "clock": "none", "versions": {"floor": "1"},
        }  # fmt: skip
        self.built: list[str] = []

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> "_Built":
        self.built.append(name)
        products = [m for m in module.modules() if isinstance(m, nn.Linear)]
        work = sum(seconds_of(m.out_features, m.in_features) for m in products) / self.speed
        with torch.no_grad():
            answer = flat_outputs(module(*inputs))
        return _Built(max(self.floor_s, self.begin_s + work), answer, self.random)

    def close(self) -> None:
        pass


class _Built:
    def __init__(self, seconds: float, answer: list[Tensor], noise: random.Random):
        self.seconds, self.answer, self.noise = seconds, answer, noise
        self.facts: dict[str, Any] = {"inputs": []}

    def time(self, calls: int) -> float:
        return calls * self.seconds * self.noise.lognormvariate(0, 0.01)

    def outputs(self) -> list[Tensor]:
        return self.answer

    def close(self) -> None:
        pass
