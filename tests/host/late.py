"""A stand-in for a GPU that computes when it is told to, a model on it, and a model's process without the process around it."""

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.host import computing
from tilewright.host.arena import ALIGN, NOT_BEGUN, SECONDS, TRAFFIC, Arena
from tilewright.host.computing import Computing
from tilewright.host.config import ModelConfig
from tilewright.host.intake import Intake, Reads, packets
from tilewright.host.loaded import Loaded
from tilewright.host.tensors import Signature, TensorSpec
from tilewright.host.turns import Turns

WIDTH = 4
CAPACITY = 4 * WIDTH * 8
"""Bytes of the inputs of eight rows."""
SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, WIDTH)),), (TensorSpec("output", "FP32", (-1, WIDTH)),), True)
STEPS = 2
"""Steps of a batch: it is computed, and its outputs are copied."""
BEHIND = ["begin 1", "end 1", "begin 2", "answer", "end 2", "answer"]
"""What happens if the second batch is there when the first one ends."""
LOST = "CUDA error: an illegal memory access was encountered"


class OnGpu(Tensor):
    """A tensor on a `Gpu`."""

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.clone().as_subclass(Tensor)


class Gpu:
    """A stream: what is begun is done in its order, and not before `finish`. `log` names batches by their first number."""

    def __init__(self) -> None:
        self.log = list[str]()
        self.steps = deque[Callable[[], object]]()
        self.begun = 0
        """Number of steps that were begun."""
        self.waits = threading.Event()
        """Set while the process waits for it."""
        self.lost = False
        self._guard = threading.Condition()

    def begin(self, step: Callable[[], object]) -> None:
        with self._guard:
            self.steps.append(step)
            self.begun += 1

    def finish(self, *, batches: int | None = None) -> None:
        """Do what was begun, or so many batches of it whose outputs have a place."""
        with self._guard:
            steps = len(self.steps) if batches is None else STEPS * batches
            for _ in range(steps):
                self.steps.popleft()()
            self._guard.notify_all()

    def lose(self) -> None:
        """Everything that is begun or waited for from now on raises."""
        with self._guard:
            self.lost = True
            self._guard.notify_all()

    def wait(self, until: int | None = None) -> None:
        """Wait for so many steps, or for all that were begun."""
        with self._guard:
            until = self.begun if until is None else until
            self.waits.set()
            assert self._guard.wait_for(lambda: self.lost or self.begun - len(self.steps) >= until, 20), "nobody finishes it"
            self.waits.clear()
            if self.lost:
                raise RuntimeError(LOST)


class Mark:
    """An event: the steps of a `Gpu` that were begun before it."""

    def __init__(self, gpu: Gpu):
        self._gpu, self._steps = gpu, gpu.begun

    def synchronize(self) -> None:
        self._gpu.wait(self._steps)

    def query(self) -> bool:
        return self._gpu.begun - len(self._gpu.steps) >= self._steps

    def elapsed_time(self, end: "Mark") -> float:
        return float(end._steps - self._steps)


class Late(Loaded):
    """Doubles rows on a `Gpu`, into a tensor that the next call overwrites; -1 as the first number of any row raises.

    So does -2, in a way that costs the device. -4 becomes NaN.
    """

    gpu: Gpu
    at_once: bool

    @classmethod
    def on(cls, gpu: Gpu, *, at_once: bool = True) -> "Late":
        """`at_once`: whether a call only replays a graph."""
        found = cls(None, SIGNATURE, torch.device("cuda"), ())  # pyright: ignore[reportArgumentType]
        found.gpu, found.at_once, found.results = gpu, at_once, torch.zeros(8, WIDTH)
        return found

    results: Tensor

    def moved(self, inputs: list[Tensor]) -> list[Tensor]:
        return inputs

    def replays(self, inputs: list[Tensor]) -> bool:
        return self.at_once

    @property
    def copies_inputs(self) -> bool:
        return self.at_once

    def begin(self, inputs: list[Tensor]) -> list[Tensor]:
        (x,) = inputs
        marks, results = x[:, 0].tolist(), self.results[: len(x)]
        self.gpu.log.append(f"begin {marks[0]:g}")
        if -1.0 in marks:
            raise RuntimeError("a poisoned row")
        if -2.0 in marks:
            self.gpu.lost = True
            raise RuntimeError(LOST)

        def compute() -> None:
            results.copy_(torch.where(x[:, :1] == -4, torch.nan, 2 * x))
            self.gpu.log.append(f"end {marks[0]:g}")

        self.gpu.begin(compute)
        return [results.as_subclass(OnGpu)]

    def call(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs = self.begin(inputs)
        self.gpu.finish()
        return [x.cpu() for x in outputs]

    def bring(self, outputs: list[Tensor], places: list[Tensor]) -> None:
        def copy() -> None:
            for place, x in zip(places, outputs, strict=True):
                place.copy_(x.as_subclass(Tensor))

        self.gpu.begin(copy)

    def mark(self) -> Any:
        return Mark(self.gpu)

    def wait(self, mark: Any = None) -> None:
        self.gpu.wait() if mark is None else mark.synchronize()


class Deferred(Loaded):
    """A model on the host whose calls are done when the process waits for them, as if it was a graph on a GPU."""

    steps: list[Callable[[], object]]

    @classmethod
    def of(cls, loaded: Loaded) -> "Deferred":
        found = cls(*loaded)
        found.steps = []
        return found

    def replays(self, inputs: list[Tensor]) -> bool:
        return True

    @property
    def copies_inputs(self) -> bool:
        return True

    def begin(self, inputs: list[Tensor]) -> list[Tensor]:
        shapes = super().begin([x.clone() for x in inputs])
        outputs = [torch.full_like(x, 77) for x in shapes]

        def compute() -> None:
            for place, x in zip(outputs, Loaded.begin(self, inputs), strict=True):
                place.copy_(x)

        self.steps.append(compute)
        return [x.as_subclass(OnGpu) for x in outputs]

    def call(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs = self.begin(inputs)
        self.wait()
        return [x.cpu() for x in outputs]

    def bring(self, outputs: list[Tensor], places: list[Tensor]) -> None:
        self.steps.append(lambda: Loaded.bring(self, [x.as_subclass(Tensor) for x in outputs], places))

    def wait(self, mark: Any = None) -> None:
        for step in self.steps:
            step()
        self.steps.clear()


class _Noted(socket.socket):
    """A channel that notes what is sent."""

    log: list[str]

    def send(self, data: Any, flags: int = 0) -> int:
        self.log.append("not begun" if data == NOT_BEGUN else "answer")
        return super().send(data, flags)


class Process:
    """The server's side of a model's process with two memories; the process is a thread of this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loaded: Late, **config: Any):
        monkeypatch.setattr(computing, "page_locked", lambda memory: lambda: None)
        self.gpu, self.log = loaded.gpu, loaded.gpu.log
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ahead, ahead = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        noted = _Noted(fileno=theirs.detach())
        noted.log = self.log
        self.arenas = [Arena.create(CAPACITY + ALIGN + CAPACITY) for _ in range(2)]
        for arena in self.arenas:
            arena.begin_by(CAPACITY)
        self.places = [Computing(loaded, ModelConfig(source="a:b", **config), arena, CAPACITY) for arena in self.arenas]
        self.intake = Intake(noted, ahead, self.arenas, CAPACITY)
        self.sent = list[tuple[int, list[float]]]()
        self._ends = noted, ahead
        self.turns = Turns(noted, self.intake, self.places, None)
        self._thread = threading.Thread(target=self.turns.run, daemon=True)
        self._thread.start()
        self.channel.settimeout(20)

    def send(self, *values: float, parts: list[int] | None = None, behind: bool = False) -> None:
        """Send a batch of rows of these values. `behind`: another batch is there, and it returns when this one is, too."""
        number = 1 - self.sent[-1][0] if behind else 0
        self.arenas[number].begin_by(CAPACITY)
        for row, value in enumerate(values):
            struct.pack_into(f"{WIDTH}f", self.arenas[number].view, 4 * WIDTH * row, *[value] * WIDTH)
        words = {"parts": parts or [len(values)], "inputs": [[0, [len(values), WIDTH]]]}
        (packet,) = packets(number, json.dumps(words).encode(), Reads())
        self.sent.append((number, list(values)))
        (self.ahead if behind else self.channel).send(packet)

    def arrived(self) -> None:
        """Wait until a batch that was sent behind another one has been read."""
        while not self.intake._arrived.qsize():
            threading.Event().wait(0.001)

    def recall(self) -> None:
        """Recall the last batch."""
        self.arenas[self.sent[-1][0]].recall(CAPACITY)

    def answer(self) -> Any:
        """The next answer: (first number of each row, errors); None: the batch was not begun."""
        data = self.channel.recv(1 << 16)
        number, values = self.sent.pop(0)
        if data == NOT_BEGUN:
            return None
        said = json.loads(data[TRAFFIC.size + SECONDS.size :])
        if not said["outputs"]:
            return None, said["errors"]
        ((at, _, shape),) = said["outputs"]
        assert shape == [len(values), WIDTH]
        found = torch.frombuffer(bytearray(self.arenas[number].view), dtype=torch.float32, offset=at, count=shape[0] * WIDTH)
        assert found.view(shape).eq(found.view(shape)[:, :1]).logical_or(found.view(shape).isnan()).all()
        return found.view(shape)[:, 0].tolist(), said["errors"]

    def ended(self) -> bool:
        """Whether the process ends, as it does if the device is lost."""
        self._thread.join(20)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the process."""
        assert self.gpu.lost or not self.sent, "an answer is missing"
        self.channel.close()
        self.ahead.close()
        assert self.ended()


class Makes:
    """Makes processes, and ends them after the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch, self.made = monkeypatch, list[Process]()

    def __call__(self, *, at_once: bool = True, warm: bool = True, **config: Any) -> Process:
        """`warm`: it has computed a batch in each memory, so that the places of outputs are known."""
        found = Process(self._monkeypatch, Late.on(Gpu(), at_once=at_once), **config)
        self.made.append(found)
        if warm:
            two_there(found, [8], [9])
            assert both_answered(found) == ([16], [18])
            found.log.clear()
        return found


def two_there(
    one: Process, first: list[float], second: list[float], parts: list[int] | None = None, parts_behind: list[int] | None = None
) -> None:
    """A batch is begun, and another one is behind it. `parts`: rows of the requests of each."""
    one.send(*first, parts=parts)
    assert one.gpu.waits.wait(20)
    one.send(*second, parts=parts_behind, behind=True)
    one.arrived()


def both_answered(one: Process) -> tuple[list[float], list[float]]:
    """The outputs of two batches that are there."""
    one.gpu.waits.clear()
    one.gpu.finish()
    found, errors = one.answer()
    assert not errors
    assert one.gpu.waits.wait(20)
    one.gpu.finish()
    other, errors = one.answer()
    assert not errors
    return found, other
