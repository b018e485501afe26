"""Learning rate schedules: pure functions of the step.

step     0 for the first update; from `steps` on, the last value is used
warmup   number of steps in which the rate grows linearly to `peak`: step s has peak (s + 1) / warmup, so the rate is never zero
floor    the rate after the last step
"""

import math

__all__ = ["SCHEDULES", "constant", "cosine", "linear", "warmup_stable_decay"]


def constant(step: int, *, steps: int, warmup: int = 0, peak: float, floor: float = 0.0) -> float:
    """Warm-up, then `peak` forever; `floor` is not used."""
    _check(step, steps, warmup, peak, floor)
    return _warm(step, warmup, peak)


def linear(step: int, *, steps: int, warmup: int = 0, peak: float, floor: float = 0.0) -> float:
    """Warm-up, then a straight line from `peak` to `floor`."""
    _check(step, steps, warmup, peak, floor)
    if step < warmup:
        return _warm(step, warmup, peak)
    return peak + (floor - peak) * _share(step, warmup, steps)


def cosine(step: int, *, steps: int, warmup: int = 0, peak: float, floor: float = 0.0) -> float:
    """Warm-up, then half a cosine from `peak` to `floor` (Loshchilov and Hutter, "SGDR", 2017, without restarts)."""
    _check(step, steps, warmup, peak, floor)
    if step < warmup:
        return _warm(step, warmup, peak)
    return floor + (peak - floor) * (1 + math.cos(math.pi * _share(step, warmup, steps))) / 2


def warmup_stable_decay(
    step: int, *, steps: int, warmup: int = 0, decay: int | None = None, peak: float, floor: float = 0.0
) -> float:  # fmt: skip
    """Warm-up, then constant at `peak`, then a straight line to `floor` over the last `decay` steps (default: a tenth of
    `steps`).

    Hu et al., "MiniCPM", 2024: a run can continue from its stable phase, whatever number of steps was planned.

    Raises:
        ValueError: warm-up and decay together are longer than the run, or a value is invalid.
    """
    decay = steps // 10 if decay is None else decay
    _check(step, steps, warmup, peak, floor)
    if decay < 0 or warmup + decay > steps:
        raise ValueError(
            f"a warm-up of {warmup} steps and a decay of {decay} steps do not fit into a run of {steps} steps; make one "
            "of them shorter"
        )
    if step < warmup:
        return _warm(step, warmup, peak)
    return peak + (floor - peak) * _share(step, steps - decay, steps)


SCHEDULES = {"constant": constant, "cosine": cosine, "linear": linear, "wsd": warmup_stable_decay}
"""Name in a config -> the function."""


def _warm(step: int, warmup: int, peak: float) -> float:
    return peak * min(1.0, (step + 1) / warmup) if warmup else peak


def _share(step: int, start: int, end: int) -> float:
    """The share of the way from `start` to `end` that is covered at `step`: 0 to 1."""
    if step < start:
        return 0.0
    return min(1.0, (step - start) / (end - start)) if end > start else 1.0


def _check(step: int, steps: int, warmup: int, peak: float, floor: float) -> None:
    if step < 0 or steps < 1:
        raise ValueError(f"step is {step} and steps is {steps}; step must be at least 0, and steps at least 1")
    if not 0 <= warmup <= steps:
        raise ValueError(f"warmup is {warmup}, wanted 0 to the number of steps, {steps}")
    if not 0 <= floor <= peak < math.inf:
        raise ValueError(
            f"the peak learning rate is {peak} and the floor {floor}; wanted 0 <= floor <= peak, with a finite peak"
        )
