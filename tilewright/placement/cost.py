"""The time of a piece of work on a device: one cost model for processors and cards.

    seconds = launches x launch_s + max(bytes / bytes_per_s, flops / flops_per_s)^p-norm + transferred / link_bytes_per_s

Bytes and FLOPs overlap, but not completely: the p-norm with p = 4 is the larger of the two times, or up to 19 % more if they
are equal. Small work does not reach a device's rates. This is described by `launch_s`, and by a rate that grows with the work
up to its ceiling: rate(flops) = ceiling x flops / (flops + half_flops), where half_flops is the work at which half of the
ceiling is reached (Hockney's n-1/2, "Parallel Computers", 1981).

The model is fitted to measurements of one kind of work (an operation, a model) on one device, about 20 from small to large. The
fit minimises the squared logarithm of predicted over measured time, so that a relative error counts the same everywhere.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["DeviceCost", "Measurement", "Work", "fit"]

_NORM = 4
MIN_MEASUREMENTS = 5


@dataclass(frozen=True, kw_only=True)
class Work:
    """A piece of work. `bytes` are read and written in the device's own memory."""

    flops: float
    bytes: float
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Work and the seconds that it took."""

    work: Work
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """A device with its constants for one kind of work. `link_bytes_per_s` and `link_s`: transfers from and to host memory."""

    name: str
    launch_s: float
    flops_per_s: float
    bytes_per_s: float
    half_flops: float = 0.0
    link_bytes_per_s: float = math.inf
    link_s: float = 0.0

    def seconds(self, work: Work) -> float:
        """Seconds for work whose inputs are on the device."""
        arithmetic = (work.flops + self.half_flops) / self.flops_per_s if work.flops else 0.0
        memory = work.bytes / self.bytes_per_s
        return work.launches * self.launch_s + (arithmetic**_NORM + memory**_NORM) ** (1 / _NORM)

    def transfer_s(self, count: float) -> float:
        """Seconds to transfer this many bytes between the device and the host; 0 for data in host memory."""
        return self.link_s + count / self.link_bytes_per_s if count and self.link_bytes_per_s < math.inf else 0.0

    def explain(self, work: Work) -> str:
        """The prediction and its parts, as text."""
        arithmetic = (work.flops + self.half_flops) / self.flops_per_s if work.flops else 0.0
        parts = {"launch": work.launches * self.launch_s, "bytes": work.bytes / self.bytes_per_s, "FLOPs": arithmetic}
        bound = max(parts, key=parts.__getitem__)
        said = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in parts.items())
        return f"{self.name}: {self.seconds(work) * 1e6:.1f} us ({said}; limited by {bound})"


def fit(
    name: str, measurements: Sequence[Measurement], *, link_bytes_per_s: float = math.inf, link_s: float = 0.0
) -> DeviceCost:
    """The cost model that fits the measurements best.

    A coarse search over the logarithms of the four unknowns, then the Levenberg-Marquardt method (damped Gauss-Newton) from the
    best of them.

    Raises:
        ValueError: too few measurements, or one that took no time.
    """
    if len(measurements) < MIN_MEASUREMENTS:
        raise ValueError(
            f"{name}: fit() needs at least {MIN_MEASUREMENTS} measurements, from small to large, and got {len(measurements)}"
        )
    if min(one.seconds for one in measurements) <= 0:
        raise ValueError(
            f"{name}: every measurement needs a time above 0 seconds, and one has {min(one.seconds for one in measurements)}"
        )
    flops, moved, launches, seconds = (
        np.array([getter(one) for one in measurements], float)
        for getter in (
            lambda one: one.work.flops,
            lambda one: one.work.bytes,
            lambda one: one.work.launches,
            lambda one: one.seconds,
        )
    )
    target = np.log(seconds)

    def predicted(logs: np.ndarray) -> np.ndarray:
        launch, rate, bandwidth, half = np.exp(logs)
        arithmetic = np.where(flops > 0, (flops + half) / rate, 0.0)
        return np.log(launches * launch + (arithmetic**_NORM + (moved / bandwidth) ** _NORM) ** (1 / _NORM))

    start_launch = math.log(float((seconds / launches).min()))
    top_rate = math.log(max(float((flops / seconds).max()), 1.0))
    top_bandwidth = math.log(max(float((moved / seconds).max()), 1.0))
    some_flops = math.log(max(float(np.median(flops)), 1.0))
    starts = [
        np.array([start_launch + a, top_rate + b, top_bandwidth + c, some_flops + d])
        for a in (-0.2, -2.0)
        for b in (0.1, 0.7)
        for c in (0.1, 0.7)
        for d in (-9.0, -3.0)
    ]
    solved = [_least_squares(predicted, target, start) for start in starts]
    best, _ = min(solved, key=lambda one: one[1])
    launch, rate, bandwidth, half = map(float, np.exp(best))
    return DeviceCost(
        name=name,
        launch_s=launch,
        flops_per_s=rate,
        bytes_per_s=bandwidth,
        half_flops=half,
        link_bytes_per_s=link_bytes_per_s,
        link_s=link_s,
    )


def _least_squares(
    predicted: Callable[[np.ndarray], np.ndarray], target: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, float]:
    at, damping = start, 1e-2
    error = float(((predicted(at) - target) ** 2).sum())
    for _ in range(60):
        here = predicted(at)
        jacobian = np.stack([(predicted(at + step) - here) / 1e-5 for step in 1e-5 * np.eye(len(at))], axis=1)
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(
            normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(at))), jacobian.T @ (target - here)
        )
        trial = at + np.clip(step, -1.0, 1.0)
        found = float(((predicted(trial) - target) ** 2).sum())
        if found < error:
            done = error - found < 1e-10 * error
            at, error, damping = trial, found, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return at, error
