"""Builds every variant on both engines, checks the results, and times them in turns until the claim is decided.

A variant counts only after its outputs were compared with the same variant in float64, run eagerly. Wrong numbers, other
shapes, a crash or a hang stop the comparison, with a message that has the engine, the variant and both values; the layer is
found by bisecting prefixes.

Then there are rounds. In each, every variant of both engines runs once, in a new random order. A turn is one untimed call,
which refills the caches after the other engine's turn, and a timed batch of calls. Batches are long enough for the clock (at
least a millisecond), and short enough for a few hundred rounds in the available time.

Nothing is fitted here, and no run is left out except those of the first two rounds, which are for warming up.
"""

import copy
import gc
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from tilewright.bench.compare.engine import (
    Built,
    Counting,
    Cutting,
    Engine,
    EngineError,
    Launching,
    Queued,
    Settings,
    flat_outputs,
    is_stepwise,
    limited,
)
from tilewright.bench.compare.fairness import apart, relative_error, yardsticks
from tilewright.bench.compare.results import Counter, Run
from tilewright.fuse.trace import line_of

if TYPE_CHECKING:
    from tilewright.bench.compare.attribution import Design
    from tilewright.bench.compare.plan import Plan
    from tilewright.bench.compare.variants import Variant

__all__ = ["Clock", "Contender", "build_all", "build_everywhere", "race", "truth_of"]

_LEAST_BATCH_S, _MOST_BATCH_S = 1e-3, 50e-3
_ROUNDS = 200
"""The intended number of rounds, which is enough for a bootstrap and can be shown in a report."""
_WARM_UP_ROUNDS = 2
_LEAST_ROUNDS = 3
"""Fewest rounds for a result: an interrupt before that ends the comparison."""
_FIRST_LOOK = 8
_PACES, _PACE_CALLS = 9, 4
_SETTLE_S = 3.0
"""Seconds before rounds count and before the verdict is checked, because clocks rise at first: a side's first rounds were 10 %
slower (H100, 8 rounds in 1.5 s). At most a tenth of the available time."""
_MOST_AHEAD = 8
"""Most calls of a batch by the device's clock: each waits for its host first, and their times agree to 0.3 %."""
_LONG_CALL_S = 5e-3
"""The time of a call this long does not depend on the contents of the caches."""
_NEEDED_SHARE, _SPARE_SHARE = 0.8, 0.5
"""Shares of the budget for building the variants that are needed to tell layers apart, and for further variants."""
# Largest error before an engine's numbers count as wrong: five times what bf16 loses over 70 layers; and, for an engine that
# says it computes in 8 or 4 bits, what no rounding explains.
_WRONG_FLOAT, _WRONG_CODES = 0.1, 0.5
_WRONG_ROUNDED = 2.0
"""... or this many times what PyTorch's own rounding costs that very program: 64 convolutions in a row may forget what they
were given (ResNet-50's layer3.1.conv2: 0.02 off in float32, 0.11 in float16)."""
_CODES = ("int8", "uint8", "fp8", "mxfp8", "int4", "fp4", "mxfp4")

Progress = Callable[[str], None]
Clock = Literal["call", "host", "device"]


@dataclass(kw_only=True)
class Contender:
    """One side of the comparison while it runs."""

    name: str
    """The engine as it was named by the user: "optimize:fp16"."""
    engine: Engine
    settings: Settings
    built: dict[str, Built] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    """Variant -> calls of a batch."""
    call_s: dict[str, float] = field(default_factory=dict)
    """Variant -> seconds of one call in the first measurement."""
    errors: dict[str, float] = field(default_factory=dict)
    """Variant -> relative error of its outputs."""
    build_s: float = 0.0
    """Seconds for building all variants."""
    clock: Clock = "call"
    """The clock for all programs except the whole model: a call as a user sees it, the host's part, or the device's part."""
    cold: bool = False
    """Whether each call begins with empty caches, if the device's clock is used."""
    runs: list[Run] = field(default_factory=list)

    def build(self, variant: "Variant", truth: Sequence[Tensor]) -> None:
        """Build, check and warm up a variant. Raises EngineError if this fails or if its answer is wrong."""
        began, what = time.monotonic(), f"{self.name} building {variant.name}"
        built = self._guarded(what, self.settings.build_limit_s, lambda: self._made(variant))
        try:
            answer = self._guarded(f"{self.name} running {variant.name}", self.settings.run_limit_s, built.outputs)
            self.errors[variant.name] = self._checked(variant, answer, truth)
            self.call_s[variant.name] = min(self._time(built, variant.name, 1) for _ in range(3))
        except BaseException:
            built.close()
            raise
        self.built[variant.name] = built
        self.build_s += time.monotonic() - began

    def _made(self, variant: "Variant") -> Built:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the engines do not help a user who compares them
            if isinstance(self.engine, Cutting) and variant.name != "whole":
                return self.engine.build_variant(variant)
            return self.engine.build(variant.module, variant.inputs, variant.name)

    def _time(self, built: Built, name: str, calls: int) -> float:
        clock = built.time
        if self.clock == "host" and name != "whole" and isinstance(built, Launching):
            clock = built.host_time
        if self.clock == "device" and name != "whole" and isinstance(built, Queued):
            clock = partial(built.device_time, cold=self.cold)
        return self._guarded(f"{self.name} running {name}", self.settings.run_limit_s, lambda: clock(calls))

    def _guarded(self, what: str, limit_s: float, step: Callable):
        """Run `step()` within its time limit; its errors get the name of the step."""
        try:
            # A little more than the limit inside a foreign engine, whose own message is more precise.
            with limited(1.1 * limit_s + 1, what):
                return step()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{what} failed: {type(error).__name__}: {str(error)[:600]}") from error

    def _checked(self, variant: "Variant", answer: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
        got, wanted = [tuple(x.shape) for x in answer], [tuple(x.shape) for x in truth]
        if got != wanted:
            raise WrongNumbers(f"{self.name}, {variant.name}: the outputs have shapes {got}, but the model's have {wanted}")
        error = relative_error(answer, truth)
        said = str(self.engine.facts.get("precision", ""))
        limit = _WRONG_CODES if any(word in said for word in _CODES) else _WRONG_FLOAT
        if not error <= limit:
            rounded = max(yardsticks(variant.module, variant.inputs, truth).values(), default=0.0)
            limit = max(limit, _WRONG_ROUNDED * rounded)
        if not error <= limit:
            what = f"wrong numbers, with an error of {error:.3g}, while rounding explains at most {limit:g}"
            raise WrongNumbers(f"{self.name}, {variant.name}: {what}; {_worst(answer, truth)}")
        return error

    def seconds(self, name: str, calls: int) -> float:
        """Seconds of one call of a variant, from a batch of `calls` calls."""
        return self._time(self.built[name], name, calls) / calls

    def pace(self) -> float:
        """The host's share of a call of the whole model; 0 if the engine is not known to start operators one by one."""
        whole = self.built["whole"]
        if not is_stepwise(self.engine) or not isinstance(whole, Launching):
            return 0.0
        return median(whole.host_time(_PACE_CALLS) / _PACE_CALLS / self.seconds("whole", _PACE_CALLS) for _ in range(_PACES))

    def share(self) -> float:
        """The device's share of a call of the whole model, if the host replays a captured graph; else 0."""
        whole = self.built["whole"]
        if not self.engine.facts.get("graph") or not isinstance(whole, Queued):
            return 0.0
        calls = _PACE_CALLS
        return median(whole.device_time(calls, cold=False) / calls / self.seconds("whole", calls) for _ in range(_PACES))

    def take(self, clock: Clock, *, cold: bool = False) -> None:
        """Use this clock from now on, also for variants that are built already."""
        self.clock, self.cold = clock, cold
        for name in self.built:
            self.call_s[name] = min(self.seconds(name, 1) for _ in range(3))

    def counters(self) -> list[Counter]:
        """The counters of the engine's own profiler for the whole model. Raises EngineError if it has none or it fails."""
        built = self.built["whole"]
        if not isinstance(built, Counting):
            raise EngineError(f"{self.name} has no counters of its own")
        return self._guarded(f"{self.name} counting", self.settings.build_limit_s, built.counters)

    def forget(self, names: set[str]) -> None:
        """Close variants that are no longer needed."""
        for name in names:
            self.built.pop(name).close()
            del self.call_s[name], self.errors[name]

    def choose_batches(self, batch_s: float) -> None:
        """Choose for every variant the calls of a batch, so that it takes about `batch_s` seconds."""
        for name, one in self.call_s.items():
            most = _MOST_AHEAD if self.clock == "device" and name != "whole" else math.inf
            self.calls[name] = math.ceil(min(max(batch_s / max(one, 1e-7), 1), most))

    def turn(self, name: str, started: float) -> Run:
        """Run and time a batch of one variant."""
        if self.call_s[name] < _LONG_CALL_S:
            self.seconds(name, 1)
        at = time.monotonic() - started
        return Run(at=at, variant=name, seconds=self.seconds(name, self.calls[name]))


class WrongNumbers(EngineError):
    """An engine's outputs are not the model's."""


def _worst(answer: Sequence[Tensor], truth: Sequence[Tensor]) -> str:
    """The element with the largest error, with both values, as text."""
    offs = [apart(got, want).abs() for got, want in zip(answer, truth, strict=True)]
    offs = [torch.where(off.isnan(), math.inf, off) for off in offs]
    i = max(range(len(offs)), key=lambda k: float(offs[k].max()) if offs[k].numel() else -1.0)
    place = tuple(int(x) for x in torch.unravel_index(offs[i].argmax(), offs[i].shape))
    return f"output {i}, element {list(place)}: {float(answer[i][place]):.6g}, but the model's is {float(truth[i][place]):.6g}"


def truth_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs of `module` in float64, on its device; the module and the inputs are not changed.

    Raises ValueError if its code makes tensors of another type, so that it cannot run in float64."""
    given = (x.double() if x.is_floating_point() else x.clone() for x in inputs)
    with torch.inference_mode():
        try:
            return flat_outputs(copy.deepcopy(module).double()(*given))
        except (RuntimeError, TypeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"outputs are compared with the model in float64, but it does not run in float64: {reason} (at "
                f"{line_of(error)}); where the model creates tensors, give them the dtype of its inputs"
            ) from error


def build_all(
    sides: Sequence[Contender], plans: Sequence["Plan"], budget_s: float, progress: Progress, since: float | None = None
) -> tuple[list[list[str]], float]:
    """Build the variants of each side's plan, the best first, as long as the budget lasts. Existing variants are kept.

    Returns for each side the names of its variants, and the time (`time.monotonic()`) at which the first one was built. The
    budget counts from there (or from `since`), because the first use of libraries, compilers and caches is not a cost of a
    variant. Variants that are needed to tell every layer apart come first, and the sides take turns. If two sides share a plan,
    a variant is built on both or on none. Raises EngineError: see `build_everywhere`.
    """
    began, last = time.monotonic() if since is None else since, 0.0
    ready: list[list[str]] = [[] for _ in sides]
    shared = all(plan is plans[0] for plan in plans)
    turns = [(i, range(len(sides)), plans[0]) for i in range(len(plans[0].variants))] if shared else [
        (i, (k,), plan) for i in range(max(len(plan.variants) for plan in plans))
        for k, plan in enumerate(plans) if i < len(plan.variants)
    ]  # fmt: skip
    turns.sort(key=lambda turn: turn[0] >= len(turn[2].needed))
    for i, where, plan in turns:
        needed, variant, at = len(plan.needed), plan.variants[i], time.monotonic()
        share = _NEEDED_SHARE if i < needed else _SPARE_SHARE
        if not all(variant.name in sides[k].built for k in where):
            if any(ready) and at - began + last > share * budget_s:
                break
            progress(f"building variants {i + 1}/{needed if i < needed else len(plan.variants)}")
            build_everywhere([sides[k] for k in where], variant, [*plan.variants, *plan.rest], plan.design, progress)
            last = time.monotonic() - at
        for k in where:
            ready[k].append(variant.name)
        if since is None and sum(map(len, ready)) == len(where):
            began, last = time.monotonic(), 0.0
    return ready, began


def build_everywhere(
    sides: Sequence[Contender], variant: "Variant", variants: Sequence["Variant"], design: "Design", progress: Progress
) -> None:
    """Build a variant on every side. Raises EngineError, as `Contender.build`.

    If numbers are wrong, the message names the first layer at which the outputs of a prefix, among `variants`, are wrong."""
    truth = truth_of(variant.module, variant.inputs)
    for side in sides:
        if variant.name in side.built:
            continue
        try:
            side.build(variant, truth)
        except WrongNumbers as error:
            progress(f"finding the layer at which {side.name} is wrong")
            raise EngineError(f"{error}{_guilty(side, variant, variants, design)}") from None
    variant.release()


def _guilty(side: Contender, wrong: "Variant", variants: Sequence["Variant"], design: "Design") -> str:
    """ "; first wrong at LAYER", by halving the prefixes among the variants."""
    prefixes: dict[int, str] = {}  # the first program with these layers, which has no additional outputs
    for name, part in design.parts.items():
        if part == tuple(range(len(part))):
            prefixes.setdefault(len(part), name)
    known = {v.name: v for v in variants}
    depths = sorted(k for k, name in prefixes.items() if name in known and 0 < k <= len(wrong.part))
    if wrong.part != tuple(range(len(wrong.part))):
        return f" (layers of this variant: {', '.join(design.layers[i] for i in wrong.part[-3:])})"
    right, low, high, said = 0, 0, len(depths) - 1, ""
    while low < high:
        middle = (low + high) // 2
        variant = known[prefixes[depths[middle]]]
        try:
            side.build(variant, truth_of(variant.module, variant.inputs))
        except WrongNumbers as error:
            high, said = middle, f"; there: {error}"
        except EngineError:  # a prefix that cannot be built shows nothing about its numbers
            break
        else:
            right, low = depths[middle], middle + 1
    suspects = [design.layers[i] for i in range(right, depths[high])]
    shown = f"layer {suspects[0]}" if len(suspects) == 1 else f"one of the layers {suspects[0]} ... {suspects[-1]}"
    return f"; first wrong at {shown}{said}"


def race(
    sides: Sequence[Contender], decided: Callable[[], bool], until: float, seed: int, started: float, progress: Progress,
    look_at_machine: Callable[[], None] = lambda: None,
) -> str:  # fmt: skip
    """Run rounds until `decided()`, which is called whenever their number has doubled, or until `time.monotonic()` is `until`.

    Returns the reason for the end: "decided", "budget" or "interrupted" (Ctrl-C; the measurements are kept).

    Raises KeyboardInterrupt after Ctrl-C if there are too few rounds for a result.
    """
    turns = [(side, name) for side in sides for name in side.built]
    settle_s = min(_SETTLE_S, max(until - time.monotonic(), 0) / 10)
    _choose_batches(sides, until - time.monotonic())
    order, look, rounds, warm = random.Random(seed), _FIRST_LOOK, -_WARM_UP_ROUNDS, time.monotonic() + settle_s
    gc.collect()
    gc.disable()
    try:
        while True:
            order.shuffle(turns)
            look_at_machine()
            cold = time.monotonic() < warm
            found = [(side, side.turn(name, started)) for side, name in turns]
            rounds = min(rounds + 1, 0) if cold else rounds + 1
            if rounds > 0:
                for side, run in found:
                    side.runs.append(run)
            left = until - time.monotonic()
            progress(f"measuring, seconds left: {max(left, 0):.0f}")
            if rounds == look:
                if time.monotonic() >= warm + settle_s and decided():
                    return "decided"
                look *= 2
            if left <= 0 and rounds >= _FIRST_LOOK:
                return "decided" if decided() else "budget"
    except KeyboardInterrupt:
        if rounds < _LEAST_ROUNDS:
            raise
        return "interrupted"
    finally:
        gc.enable()


def _choose_batches(sides: Sequence[Contender], left_s: float) -> None:
    """Choose the length of batches, within limits, so that there is time for `_ROUNDS` rounds."""
    single = sum(min(one, _LONG_CALL_S) for side in sides for one in side.call_s.values())
    turns = sum(len(side.built) for side in sides)
    batch_s = (left_s / _ROUNDS - single) / max(turns, 1)
    for side in sides:
        side.choose_batches(min(max(batch_s, _LEAST_BATCH_S), _MOST_BATCH_S))
