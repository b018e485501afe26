"""Orders candidates by the analytical model: `tune` measures the first ones if nothing has been measured yet.

A running program does not use this. According to docs/regret.md, its default config is as good as the model's first candidate.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilewright.asm.certificate import config_facts
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import Device
from tilewright.tune.constants import constants_of
from tilewright.tune.model import Held, Work, columns_of, held_by, least_seconds, library_seconds, seconds_of
from tilewright.tune.space import Config, Space

__all__ = ["Candidate", "Ranked", "rank"]


class Candidate(Protocol):
    """The part of `tilewright.op.Impl` that is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def space(self) -> Space: ...
    @property
    def work(self) -> Callable[..., Work] | None: ...
    @property
    def batch_invariant(self) -> bool: ...


class Ranked(NamedTuple):
    """A candidate with its predicted time."""

    impl: Any
    config: Config
    seconds: float
    spills: bool


class _Certified(NamedTuple):
    """The certified configs of one implementation on one architecture."""

    configs: list[dict[str, Any]]
    columns: dict[str, np.ndarray]
    held: Held


@cache
def _certified(op_name: str, impl_name: str, arch: int) -> _Certified | None:
    """The configs that compile and fit; None without a certificate."""
    rows = [
        (json.loads(key), held)
        for key, facts in config_facts(op_name, impl_name, arch).items()
        if facts.error is None and (held := held_by(arch, facts)).resident
    ]
    if not rows:
        return None
    configs = [config for config, _ in rows]
    held = Held(*(np.array(column, float) for column in zip(*(held for _, held in rows), strict=True)))
    return _Certified(configs, columns_of(configs), held)


_COLUMNS = [(at, name) for at, name in enumerate(Work._fields) if name not in ("unit", "library")]


class _Predicted(NamedTuple):
    """The certified configs of one implementation, with predicted times."""

    impl: Any
    certified: _Certified | None
    seconds: np.ndarray


def _predicted(op_name: str, device: Device, args: Sequence[Any], impls: Sequence[Candidate]) -> list[_Predicted]:
    """Everything that can be predicted, in one evaluation of the formula."""
    found, c = ceilings(device), constants_of(device.arch)
    libraries, owns, works = [], [], []
    for impl in impls:
        if impl.work is None:
            continue
        certified = _certified(op_name, impl.name, device.arch)
        if certified is not None:
            owns.append((impl, certified))
            works.append(impl.work(device, certified.columns, *args))
        elif not impl.space.axes and not impl.batch_invariant and (work := impl.work(device, {}, *args)).library:
            libraries.append(_Predicted(impl, None, np.array([library_seconds(work, found, c)])))
    if not owns:
        return libraries
    ends = list(accumulate(len(certified.configs) for _, certified in owns))
    places = [slice(start, end) for start, end in zip([0, *ends], ends)]
    held = Held(*(_joined(column, places) for column in zip(*(certified.held for _, certified in owns), strict=True)))
    columns = {name: _joined([work[at] for work in works], places) for at, name in _COLUMNS}
    unit = next((w.unit for w in works if w.unit != "fp32"), "fp32")
    seconds = seconds_of(Work(**columns, unit=unit), held, device, found, c)
    own = [_Predicted(impl, certified, seconds[place]) for (impl, certified), place in zip(owns, places, strict=True)]
    return libraries + own


def _joined(parts: Sequence[Any], places: Sequence[slice]) -> Any:
    """One array from numbers and arrays, or a number if all are the same number."""
    first = parts[0]
    if not any(isinstance(part, np.ndarray) for part in parts) and all(part == first for part in parts):
        return first
    joined = np.empty(places[-1].stop)
    for part, place in zip(parts, places, strict=True):
        joined[place] = part
    return joined


def rank(op_name: str, device: Device, problem: Any, args: Sequence[Any], impls: Sequence[Candidate]) -> Iterator[Ranked]:
    """Candidates with a prediction, fastest first: certified configs that are possible for the problem, and libraries.

    Args:
        op_name: as in `Op.name`.
        device: the card.
        problem: the result of `Op.problem`.
        args: arguments of the op, or tensors like them on "meta".
        impls: the implementations that accept the problem.
    """
    least = _least(op_name, device, problem, args, impls)
    for ranked in _ordered(_predicted(op_name, device, args, impls), device, problem):
        yield ranked._replace(seconds=max(ranked.seconds, least))


def _least(op_name: str, device: Device, problem: Any, args: Sequence[Any], impls: Sequence[Candidate]) -> float:
    """The lower bound of `least_seconds` for the candidate with the least work; 0 without candidates. It is used for all of
    them."""
    found, least = ceilings(device), []
    for impl in impls:
        certified = _certified(op_name, impl.name, device.arch)
        if impl.work is None or (certified is None and impl.space.axes):
            continue
        work = impl.work(device, impl.space.default(device, problem) if certified is None else certified.columns, *args)
        least.append(float(np.min(least_seconds(work, found))))
    return min(least, default=0.0)


def _ordered(predicted: Sequence[_Predicted], device: Device, problem: Any) -> Iterator[Ranked]:
    if not predicted:
        return
    first = np.cumsum([0, *(len(p.seconds) for p in predicted)]).tolist()
    seconds = np.concatenate([p.seconds for p in predicted])
    for at in np.argsort(seconds, kind="stable").tolist():
        owner = bisect_right(first, at) - 1
        impl, certified, _ = predicted[owner]
        if certified is None:
            yield Ranked(impl, {}, float(seconds[at]), False)
            continue
        place = at - first[owner]
        config = certified.configs[place]
        if impl.space.refusal(device, problem, config) is None:
            yield Ranked(impl, config, float(seconds[at]), bool(certified.held.spill_bytes[place]))
