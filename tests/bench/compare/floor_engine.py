"""An engine in this process whose calls cost what is asked for, without waiting: a floor, a beginning, and each product's time.

    Floor("FLOOR_US,BEGIN_US,SPEED[,SEED[,TENSOR_US,KB_IN_US,KB_OUT_US]]")
        seconds = max(FLOOR, BEGIN + borders + sum of products / SPEED), with noise of 1 %
    Hosted("BEGIN_US,SPEED,TAIL_US[,SEED]")
        the host takes BEGIN + sum of products / SPEED; the device up to TAIL more, as large as the last product is; with the
        host ahead the device takes BEGIN + the sum / (2 SPEED)
    Replayed("FLOOR_US,BEGIN_US,SPEED[,SEED[,TENSOR_US,KB_IN_US,KB_OUT_US]]")
        a Floor that says it replays a graph; with the host ahead the device takes 1 us + the sum / SPEED alone

A captured model is one with a floor: its device works while the host does what each call needs. PyTorch eager has none: there
every layer is the host's. Outputs are the model's own.
"""

import random
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.bench.compare.engine import Settings, flat_outputs

__all__ = ["Floor", "Hosted", "Replayed", "seconds_of"]


def seconds_of(rows: int, columns: int) -> float:
    """Of a product at speed 1: a microsecond and some more for its weight."""
    return 1e-6 + 2e-11 * rows * columns


class Floor:
    """See above."""

    def __init__(self, option: str, settings: Settings):
        floor, begin, speed, _, tensor, first, last = [*map(float, option.split(",")), *[0.0] * 4][:7]
        self.border = 1e-6 * tensor, 1e-9 * first, 1e-9 * last
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
        tensor, first, last = self.border
        sizes = [sum(x.nbytes for x in inputs), sum(x.nbytes for x in answer)]
        border = tensor * (len(inputs) + len(answer)) + first * sizes[0] + last * sizes[1]
        return _Built(max(self.floor_s, self.begin_s + border + work), answer, self.random)

    def close(self) -> None:
        pass


class Hosted(Floor):
    """See above."""

    stepwise = True

    def __init__(self, option: str, settings: Settings):
        begin, speed, tail, *seed = option.split(",")
        super().__init__(",".join(["0", begin, speed, *seed]), settings)
        self.tail_s = 1e-6 * float(tail)

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> "_BuiltHosted":
        built = super().build(module, inputs, name)
        last = [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
        tail = self.tail_s * min(1.0, 0.2 + seconds_of(last.out_features, last.in_features) / seconds_of(512, 256))
        ahead = 0.5 * (built.seconds + self.begin_s)
        return _BuiltHosted(built.seconds, tail, ahead, built.answer, self.random)


class Replayed(Floor):
    """See above."""

    def __init__(self, option: str, settings: Settings):
        super().__init__(option, settings)
        self.facts["graph"] = "made up"

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> "_BuiltReplayed":
        built = super().build(module, inputs, name)
        work = sum(seconds_of(m.out_features, m.in_features) for m in module.modules() if isinstance(m, nn.Linear))
        return _BuiltReplayed(built.seconds, 1e-6 + work / self.speed, built.answer, self.random)


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


class _BuiltHosted(_Built):
    def __init__(self, host_s: float, tail_s: float, device_s: float, answer: list[Tensor], noise: random.Random):
        super().__init__(host_s + tail_s, answer, noise)
        self.host_s, self.device_s = host_s, device_s

    def host_time(self, calls: int) -> float:
        return calls * self.host_s * self.noise.lognormvariate(0, 0.01)

    def device_time(self, calls: int, *, cold: bool) -> float:
        return calls * self.device_s * self.noise.lognormvariate(0, 0.01)


class _BuiltReplayed(_Built):
    def __init__(self, seconds: float, device_s: float, answer: list[Tensor], noise: random.Random):
        super().__init__(seconds, answer, noise)
        self.device_s = device_s

    def device_time(self, calls: int, *, cold: bool) -> float:
        return calls * self.device_s * self.noise.lognormvariate(0, 0.01)
