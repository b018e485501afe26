"""Schedules stages that depend on each other on devices of different kinds.

The basis is HEFT (Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous
computing", IEEE TPDS 13(3), 2002). It places the stages in the order of their upward rank. Each stage goes to the device where
it ends first, in a gap of the device's timetable if one is large enough.

HEFT is greedy, which costs up to a half on small graphs. So its schedule is improved by local search: the insertion is repeated
with one or two ranks or devices changed, as long as the last stage ends earlier. The search starts from a few orders, and from
all stages on one device, which is best if transfers are expensive.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

__all__ = ["Graph", "Placed", "Timetable", "schedule"]

ROUNDS = 40
"""Most rounds of local search for each start."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Stages and the dependencies between them.

    Args:
        seconds: stage -> seconds on each device; infinite for a device that cannot run it.
        edges: (stage, later stage) -> bytes that the later stage needs from the earlier one.
        transfer_s: (bytes, from device, to device) -> seconds. Not called for a transfer within a device, which takes no time.

    Raises:
        ValueError: an edge with an unknown stage, rows of different lengths, or a cycle.
    """

    seconds: Mapping[str, Sequence[float]]
    edges: Mapping[tuple[str, str], float] = field(default_factory=dict)
    transfer_s: Callable[[float, int, int], float] = lambda count, source, target: 0.0

    def __post_init__(self) -> None:
        names = set(self.seconds)
        for edge in self.edges:
            if not names.issuperset(edge):
                raise ValueError(f"the edge {edge} names an unknown stage; the stages are {', '.join(sorted(names))}")
        if len({len(row) for row in self.seconds.values()}) > 1:
            raise ValueError("every stage needs a time for the same number of devices, and the numbers differ")
        self.order()

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(next(iter(self.seconds.values()))) if self.seconds else 0

    def before(self) -> dict[str, list[str]]:
        """Stage -> the stages that have to end before it starts."""
        found: dict[str, list[str]] = {name: [] for name in self.seconds}
        for source, target in self.edges:
            found[target].append(source)
        return found

    def order(self) -> list[str]:
        """The stages in topological order. Raises ValueError for a cycle."""
        needs = {name: set(sources) for name, sources in self.before().items()}
        found: list[str] = []
        while needs:
            free = sorted(name for name, sources in needs.items() if not sources)
            if not free:
                raise ValueError(
                    f"the stages {', '.join(sorted(needs))} wait for each other in a cycle; remove one of the edges "
                    "between them"
                )
            found += free
            needs = {name: sources.difference(free) for name, sources in needs.items() if name not in free}
        return found


@dataclass(frozen=True, slots=True)
class Placed:
    """The device and the time at which a stage runs."""

    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timetable:
    """A schedule. `placed`: stage -> its device and time."""

    placed: dict[str, Placed]

    @property
    def seconds(self) -> float:
        """The time at which the last stage ends."""
        return max((one.end_s for one in self.placed.values()), default=0.0)

    def explain(self, graph: Graph, names: Sequence[str]) -> list[str]:
        """A line for each stage, in the order of their starts: its device and time, and its seconds on the other devices."""
        lines = []
        for stage, one in sorted(self.placed.items(), key=lambda item: (item[1].start_s, item[1].end_s)):
            others = ", ".join(
                f"{name} {seconds * 1e3:.3f} ms"
                for name, seconds in zip(names, graph.seconds[stage])
                if name != names[one.device]
            )
            span = f"{one.start_s * 1e3:.3f} to {one.end_s * 1e3:.3f} ms"
            lines.append(f"{stage}: {names[one.device]}, {span} (alone elsewhere: {others or 'nowhere else'})")
        return lines


def schedule(graph: Graph, seed: int = 0) -> Timetable:
    """A timetable in which the last stage ends early. Raises ValueError for a stage that no device can run.

    `seed`: seed of the random choices in the search.
    """
    for name, row in graph.seconds.items():
        if not row or min(row) == float("inf"):
            raise ValueError(f"the stage {name} cannot run on any device")
    before = graph.before()
    best: Timetable | None = None
    rng = random.Random(seed)
    starts = _starts(graph, rng)
    able = [d for d in range(graph.devices) if max(map(itemgetter(d), graph.seconds.values())) < float("inf")]
    alone = [dict.fromkeys(graph.seconds, device) for device in able]
    for ranks, fixed in [*((ranks, {}) for ranks in starts), *((starts[0], one) for one in alone)]:
        found = _improved(graph, before, ranks, fixed, rng)
        if best is None or found.seconds < best.seconds:
            best = found
    return best or Timetable({})


def _starts(graph: Graph, rng: random.Random) -> list[dict[str, float]]:
    """Upward ranks of the stages in four versions: from a stage's mean, least and largest seconds, and from a noisy mean."""
    devices = range(graph.devices)
    pairs = [(a, b) for a in devices for b in devices if a != b]

    def ranks(weigh: Callable[[Sequence[float]], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in reversed(graph.order()):
            row = [seconds for seconds in graph.seconds[name] if seconds < float("inf")]
            after = 0.0
            for (source, target), count in graph.edges.items():
                if source == name:
                    mean = sum(graph.transfer_s(count, *pair) for pair in pairs) / len(pairs) if pairs else 0.0
                    after = max(after, mean + found[target])
            found[name] = weigh(row) + after
        return found

    def mean(row: Sequence[float]) -> float:
        return sum(row) / len(row)

    return [ranks(mean), ranks(min), ranks(max), ranks(lambda row: mean(row) * rng.uniform(0.5, 1.5))]


def _insert(graph: Graph, before: Mapping[str, list[str]], ranks: Mapping[str, float], fixed: Mapping[str, int]) -> Timetable:
    """The placement phase of HEFT: by decreasing rank, as far as dependencies allow, each stage where it ends first.

    `fixed`: stage -> its device; other stages may run on any device.
    """
    placed: dict[str, Placed] = {}
    busy: list[list[tuple[float, float]]] = [[] for _ in range(graph.devices)]
    left = set(graph.seconds)
    while left:
        free = [name for name in left if all(source in placed for source in before[name])]
        name = max(free, key=lambda one: (ranks[one], one))
        best: Placed | None = None
        for device in [fixed[name]] if name in fixed else range(graph.devices):
            seconds = graph.seconds[name][device]
            if seconds == float("inf"):
                continue
            ready = 0.0
            for source in before[name]:
                there = placed[source]
                moved = 0.0
                if there.device != device:
                    moved = graph.transfer_s(graph.edges[source, name], there.device, device)
                ready = max(ready, there.end_s + moved)
            start = _gap(busy[device], ready, seconds)
            if best is None or start + seconds < best.end_s:
                best = Placed(device, start, start + seconds)
        assert best is not None, "schedule() has checked that every stage can run on some device"
        placed[name] = best
        busy[best.device].append((best.start_s, best.end_s))
        busy[best.device].sort()
        left.remove(name)
    return Timetable(placed)


def _gap(busy: Sequence[tuple[float, float]], ready: float, seconds: float) -> float:
    """The earliest start, at `ready` or later, of a free interval of this many seconds."""
    start = ready
    for begin, end in busy:
        if begin - start >= seconds:
            return start
        start = max(start, end)
    return start


def _improved(
    graph: Graph, before: Mapping[str, list[str]], ranks: dict[str, float], fixed: dict[str, int], rng: random.Random
) -> Timetable:
    """Change the devices of one or two stages, or swap two ranks, as long as that helps. `fixed` is the initial placement."""
    best = _insert(graph, before, ranks, fixed)
    names = sorted(graph.seconds)
    for _ in range(ROUNDS):
        changed = False
        for moved in _moves(graph, names, rng):
            trial = {**{one: placed.device for one, placed in best.placed.items()}, **moved}
            found = _insert(graph, before, ranks, trial)
            if found.seconds < best.seconds - 1e-15:
                best, changed = found, True
        for one, other in itertools.combinations(names, 2):
            swapped = {**ranks, one: ranks[other], other: ranks[one]}
            for keep in ({name: placed.device for name, placed in best.placed.items()}, {}):
                found = _insert(graph, before, swapped, keep)
                if found.seconds < best.seconds - 1e-15:
                    best, ranks, changed = found, swapped, True
        if not changed:
            break
    return best


def _moves(graph: Graph, names: Sequence[str], rng: random.Random) -> list[dict[str, int]]:
    """The changes to try, in random order: another device for one stage, or one device for two stages joined by an edge."""
    able = {name: [d for d in range(graph.devices) if graph.seconds[name][d] < float("inf")] for name in names}
    found = [{name: device} for name in names for device in able[name]]
    found += [{a: device, b: device} for a, b in graph.edges for device in able[a] if device in able[b]]
    rng.shuffle(found)
    return found
