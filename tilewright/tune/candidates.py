"""The candidates of a search: each implementation that accepts a problem, with each config of its space, best guess first.

A config is a candidate if its certificate states that it compiles without spilling registers. If an implementation has no
certificate for the card, all its configs are candidates. The order is that of the analytical model if it has a prediction;
otherwise it is by distance from the default config.

This module may not import `tilewright.op`; operators are arguments.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilewright.asm.certificate import ConfigFacts, config_facts, config_key
from tilewright.hw.device import Device
from tilewright.tune.record import canonical, problem_json
from tilewright.tune.source import source_hash
from tilewright.tune.space import Config
from tilewright.tune.unmeasured import rank

__all__ = ["Candidate", "Key", "Task", "candidates", "order"]

Key = tuple[str, str]
"""Implementation name, and config as canonical JSON."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem to tune."""

    op: Any
    """A `tilewright.op.Op`."""
    dims: Mapping[str, Any]
    """The dimensions that `op.make` was called with."""
    args: tuple[Any, ...]
    """The arguments that it made, on meta tensors."""
    device: Device
    refused: Mapping[str, str]
    """Implementation -> why it refuses the problem on this card, in the scope of the tuning."""
    invariant: bool = False

    @cached_property
    def problem(self) -> Any:
        """The summary of the arguments on which choices depend."""
        return self.op.problem(*self.args)

    @cached_property
    def problem_text(self) -> str:
        """The same as text, as in rows of the database."""
        return problem_json(self.problem)

    @cached_property
    def impls(self) -> dict[str, Any]:
        """The implementations that accept the problem, by name, best first."""
        return {impl.name: impl for impl in self.op.impls if impl.name not in self.refused}

    @cached_property
    def sources(self) -> dict[str, str]:
        """Implementation -> the hash of its source."""
        return {name: source_hash(impl.launch.__module__) for name, impl in self.impls.items()}

    @cached_property
    def plain_dims(self) -> dict[str, Any]:
        """The dimensions as JSON values: a dtype is its name."""
        return {k: v if isinstance(v, bool | int | float | str | None) else _name(v) for k, v in self.dims.items()}

    @property
    def words(self) -> list[str]:
        """The dimensions as words of a command line."""
        return [f"{name}={'none' if value is None else value}" for name, value in self.plain_dims.items()]

    def __str__(self) -> str:
        return f"{self.op.name} {' '.join(self.words)}{' invariant' if self.invariant else ''} on {self.device.name}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One implementation with one config."""

    impl: Any
    config: Config
    kept: bool
    """Always measured, whatever the model predicts: the config of an untuned program, and libraries, which have one config."""
    facts: ConfigFacts | None
    """From the certificate; None if it has no entry."""
    predicted_us: float | None = None

    @property
    def key(self) -> Key:
        """A key that differs between different candidates."""
        return self.impl.name, canonical(dict(self.config))


def candidates(task: Task) -> tuple[list[Candidate], Counter[str]]:
    """(candidates in the order of the spaces, reason -> number of configs that are excluded)."""
    found: list[Candidate] = []
    dropped: Counter[str] = Counter()
    for place, impl in enumerate(task.impls.values()):
        known = config_facts(task.op.name, impl.name, task.device.arch)
        default = dict(impl.space.default(task.device, task.problem))
        others = impl.space.configs(task.device, task.problem) if impl.space.axes else ()
        for config in [default, *(c for c in others if c != default)]:
            facts = known.get(config_key(config))
            kept = config == default and (place == 0 or not impl.space.axes)
            if (fault := _fault(facts, bool(known))) is not None and not kept:
                dropped[fault] += 1
            else:
                found.append(Candidate(impl=impl, config=config, kept=kept, facts=facts))
    return found, dropped


def _fault(facts: ConfigFacts | None, certified: bool) -> str | None:
    """The reason, from its certificate, why a config should not be measured; None if it should be."""
    if facts is None:
        return "not certified" if certified else None
    if facts.error is not None:
        return "does not compile"
    return "spills" if facts.spill_bytes else None


def order(task: Task, found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the model's predictions: those that must be measured first, then those that should be fastest.

    Candidates without a prediction come last, by distance from their default. If an implementation has no predictions at all,
    its default must be measured. Raises ValueError for a card without known ceilings.
    """
    ranking = rank(task.op.name, task.device, task.problem, task.args, tuple(task.impls.values()))
    seconds = {(r.impl.name, canonical(dict(r.config))): r.seconds for r in ranking}
    told = {name for name, _ in seconds}
    defaults = {name: dict(impl.space.default(task.device, task.problem)) for name, impl in task.impls.items()}

    def completed(c: Candidate) -> Candidate:
        predicted = seconds.get(c.key)
        kept = c.kept or (c.impl.name not in told and c.config == defaults[c.impl.name])
        return replace(c, kept=kept, predicted_us=None if predicted is None else 1e6 * predicted)

    def far(c: Candidate) -> int:
        default = defaults[c.impl.name]
        return sum(default.get(name) != value for name, value in c.config.items())

    return sorted(
        map(completed, found),
        key=lambda c: (not c.kept, math.inf if c.predicted_us is None else c.predicted_us, far(c)),
    )
