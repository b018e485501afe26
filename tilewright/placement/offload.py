"""Runs layers that do not fit on a device: some weights stay on the host and are copied while earlier layers are computed.

    resident weights + buffers x the largest streamed layer <= the available memory

`plan` decides which layers stay on the device. Copies share one link and follow one another. A layer starts when its copy and
the layer before it have ended, and a buffer is filled again when the layer in it has ended. If all layers are alike, the
streamed ones are best spread evenly, so that the computation between two of them hides a copy. `timeline` predicts the time of
any choice, with the costs of `cost.py`. The search starts from two greedy choices: in each step, keep the layer on the device
that saves the most time, either in total or per byte. Swaps of two layers then improve the better choice.

`Offloaded` runs such a plan. Its copies go through a `Lane`, which on a card is a separate stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CardLane", "HostLane", "Lane", "Layer", "Offloaded", "Plan", "plan", "timeline"]

ALIGNED = 256
CALLS = 3
"""Number of successive calls after which the timeline is the same in each."""
ROUNDS = 8
"""Most passes over all swaps in the search."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer: the bytes of its weights, and its seconds if the weights are on the device."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which layers stay on the device. `seconds` per call, in a sequence of calls."""

    resident: tuple[bool, ...]
    buffers: int
    seconds: float
    bytes: int
    """Bytes on the device."""

    def explain(self, layers: Sequence[Layer], link_s: Callable[[float], float]) -> list[str]:
        """A line for each layer, and one for the whole: where each layer is and why, and what limits the speed."""
        computed = sum(layer.seconds for layer in layers)
        lines = []
        for layer, resident in zip(layers, self.resident, strict=True):
            where = "on the device" if resident else "on the host"
            moved = f"{link_s(layer.bytes) * 1e3:.3f} ms to copy, {layer.seconds * 1e3:.3f} ms to compute"
            lines.append(f"{layer.name}: {where} ({layer.bytes} bytes, {moved})")
        copied = sum(link_s(layer.bytes) for layer, resident in zip(layers, self.resident, strict=True) if not resident)
        bound = "copying sets the time" if copied > computed else "computing sets the time"
        lines.append(
            f"a call takes {self.seconds * 1e3:.3f} ms: {computed * 1e3:.3f} ms of computing, overlapped with "
            f"{copied * 1e3:.3f} ms of copying, so {bound}; one after the other they would take "
            f"{(computed + copied) * 1e3:.3f} ms"
        )
        return lines


def timeline(
    layers: Sequence[Layer], resident: Sequence[bool], link_s: Callable[[float], float], buffers: int = 2
) -> tuple[float, list[tuple[float, float]]]:
    """(seconds of a call in a sequence of calls, when each layer of it begins and ends, from the call's beginning)."""
    free_s = [0.0] * buffers  # when each buffer may be filled
    link_free_s = now_s = 0.0
    streamed, found, began_s = 0, list[tuple[float, float]](), 0.0
    for _ in range(CALLS):
        began_s, found = now_s, []
        for layer, stays in zip(layers, resident, strict=True):
            start_s = now_s
            if not stays:
                slot = streamed % buffers
                link_free_s = max(link_free_s, free_s[slot]) + link_s(layer.bytes)
                start_s = max(now_s, link_free_s)
            now_s = start_s + layer.seconds
            if not stays:
                free_s[streamed % buffers] = now_s
                streamed += 1
            found.append((start_s - began_s, now_s - began_s))
    return now_s - began_s, found


def plan(layers: Sequence[Layer], memory: int, link_s: Callable[[float], float], buffers: int = 2) -> Plan:
    """Which layers stay on a device with `memory` bytes for weights.

    Args:
        layers: in the order in which they run.
        memory: bytes for weights.
        link_s: bytes -> seconds from host memory to the device.
        buffers: number of buffers for streamed layers; at least two, otherwise nothing overlaps.

    Raises:
        ValueError: the buffers alone do not fit.
    """
    everything = sum(layer.bytes for layer in layers)
    if everything <= memory:
        seconds, _ = timeline(layers, [True] * len(layers), link_s, buffers)
        return Plan(resident=(True,) * len(layers), buffers=0, seconds=seconds, bytes=everything)
    resident = [False] * len(layers)
    if _needed(layers, resident, buffers) > memory:
        largest = max(layers, key=lambda layer: layer.bytes)
        raise ValueError(
            f"{buffers} buffers for the largest layer ({largest.name}, {largest.bytes} bytes) do not fit into the "
            f"memory of {memory} bytes; give more memory, or divide the layer"
        )

    def seconds_of(choice: Sequence[bool]) -> float:
        return timeline(layers, choice, link_s, buffers)[0] if _needed(layers, choice, buffers) <= memory else float("inf")

    best = min((_greedy(layers, seconds_of, by) for by in (0, 1)), key=seconds_of)
    for _ in range(ROUNDS):
        before = seconds_of(best)
        best = _swapped(best, seconds_of)
        if seconds_of(best) >= before - 1e-15:
            break
    return Plan(resident=tuple(best), buffers=buffers, seconds=seconds_of(best), bytes=_needed(layers, best, buffers))


def _needed(layers: Sequence[Layer], resident: Sequence[bool], buffers: int) -> int:
    streamed = max((layer.bytes for layer, stays in zip(layers, resident, strict=True) if not stays), default=0)
    return sum(layer.bytes for layer, stays in zip(layers, resident, strict=True) if stays) + buffers * streamed


def _greedy(layers: Sequence[Layer], seconds_of: Callable[[Sequence[bool]], float], by: int) -> list[bool]:
    """Greedily keep layers on the device until no more fit. Each step takes the layer that saves the most time.

    `by`: 0 compares the time saved per call, 1 the time saved per byte.
    """
    found = [False] * len(layers)
    while True:
        now_s, saved = seconds_of(found), dict[int, float]()
        for index, stays in enumerate(found):
            if not stays:
                found[index] = True
                trial_s = seconds_of(found)
                found[index] = False
                if trial_s < float("inf"):
                    saved[index] = (now_s - trial_s) / (layers[index].bytes if by else 1)
        if not saved:
            return found
        # If no layer saves anything yet, take the largest, because two together may.
        found[max(saved, key=lambda index: (saved[index], layers[index].bytes))] = True


def _swapped(choice: list[bool], seconds_of: Callable[[Sequence[bool]], float]) -> list[bool]:
    """Swap a layer that stays on the device for one that does not, wherever this makes the plan faster."""
    best = list(choice)
    for out in range(len(best)):
        for into in range(len(best)):
            if best[out] and not best[into]:
                trial = list(best)
                trial[out], trial[into] = False, True
                if seconds_of(trial) < seconds_of(best) - 1e-15:
                    best = trial
    return best


# ---- running a plan


class Lane(ABC):
    """Copies concurrent to the computation."""

    @abstractmethod
    def pinned(self, count: int) -> Tensor:
        """Host memory from which to copy, of this many bytes."""

    @abstractmethod
    def buffer(self, count: int) -> Tensor:
        """Device memory to copy to, of this many bytes."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Start a copy after `after` (from `mark`, or None); returns the argument for `wait`."""

    @abstractmethod
    def wait(self, copied: Any) -> None:
        """Let later computation begin only when a copy has ended."""

    @abstractmethod
    def mark(self) -> Any:
        """A mark for the end of all computation so far."""


class HostLane(Lane):
    """A processor: copies are made immediately."""

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def buffer(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        target.copy_(source)

    def wait(self, copied: Any) -> None:
        """Nothing to do: the copy has ended."""

    def mark(self) -> Any:
        return None


class CardLane(Lane):
    """A card: copies use a second stream."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def buffer(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()


class Offloaded(nn.Module):
    """Layers that run one after the other, some of which keep their weights on the host.

    Args:
        layers: each takes the output of the one before. Weights must not change afterwards.
        plan: the plan for them.
        lane: for the device on which they run, and on which `resident` layers already are.
    """

    def __init__(self, layers: Sequence[nn.Module], plan: Plan, lane: Lane):
        super().__init__()
        self._layers, self._lane = list(layers), lane
        self.resident = nn.ModuleList(layer for layer, stays in zip(layers, plan.resident, strict=True) if stays)
        self._streamed = [index for index, stays in enumerate(plan.resident) if not stays]
        self._held = {index: _Held(self._layers[index], lane) for index in self._streamed}
        largest = max((held.bytes for held in self._held.values()), default=0)
        self._memory = [lane.buffer(largest) for _ in range(plan.buffers)]
        self._copied: dict[int, Any] = {}
        self._done = 0
        """Number of streamed layers that were computed, over all calls."""

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output."""
        if self._streamed and not self._copied:
            for number in range(self._done, self._done + len(self._memory)):
                self._fetch(number, None)
        try:
            for index, layer in enumerate(self._layers):
                x = self._run(index, layer, x) if index in self._held else layer(x)
        except BaseException:
            self._copied.clear()  # the next call starts from scratch
            self._done += -self._done % max(1, len(self._streamed))
            raise
        return x

    def _run(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        number = self._done
        self._lane.wait(self._copied.pop(number))
        views = self._held[index].views(self._memory[number % len(self._memory)])
        x = torch.func.functional_call(layer, views, (x,))
        self._done += 1
        self._fetch(number + len(self._memory), self._lane.mark())
        return x

    def _fetch(self, number: int, after: Any) -> None:
        held = self._held[self._streamed[number % len(self._streamed)]]
        target = self._memory[number % len(self._memory)][: held.bytes]
        self._copied[number] = self._lane.copy(target, held.memory, after)


class _Held:
    """A layer's weights in one piece of host memory. The layer itself keeps none."""

    def __init__(self, layer: nn.Module, lane: Lane):
        tensors = dict[str, Tensor]((*layer.named_parameters(), *layer.named_buffers()))
        self._places, at = list[tuple[str, int, torch.dtype, torch.Size]](), 0
        for name, tensor in tensors.items():
            self._places.append((name, at, tensor.dtype, tensor.shape))
            at += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        self.bytes = at
        self.memory = lane.pinned(at)
        for name, view in self.views(self.memory).items():
            view.copy_(tensors[name].detach())
        layer.to("meta")

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The weights by name, in a piece of memory that holds them."""
        return {
            name: memory[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, at, dtype, shape in self._places
        }
