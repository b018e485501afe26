"""The shortest timetable of a small graph, by trying everything: the oracle of the scheduler's tests.

Every timetable can be had by placing stages one after the other in an order that respects dependencies, each on some device, no
earlier than what was placed there before. All orders and devices are tried, except where even the longest way that is left,
without transfers and on the fastest devices, would end no earlier than what is known.
"""

from tilewright.placement.schedule import Graph

__all__ = ["shortest"]


def shortest(graph: Graph, bound: float) -> float:
    """Seconds of the best timetable; `bound` is known to be reachable."""
    before, names = graph.before(), graph.order()
    after: dict[str, list[str]] = {name: [t for s, t in graph.edges if s == name] for name in names}
    tail: dict[str, float] = {}
    for name in reversed(names):
        tail[name] = min(graph.seconds[name]) + max((tail[t] for t in after[name]), default=0.0)
    best = bound
    devices = range(graph.devices)
    seen: dict[tuple, list[tuple[float, ...]]] = {}

    def place(left: frozenset[str], ends: dict[str, tuple[int, float]], free: tuple[float, ...]) -> None:
        nonlocal best
        if not left:
            best = min(best, max(end for _, end in ends.values()))
            return
        # The same stages on the same devices, all of them ended and all devices free no earlier: nothing new can come of it.
        key = (left, tuple(sorted((name, device) for name, (device, _) in ends.items())))
        times = (*free, *(ends[name][1] for name in sorted(ends)))
        known = seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(one, times)) for one in known):
            return
        known.append(times)
        for name in sorted(left):
            if any(source in left for source in before[name]):
                continue
            for device in devices:
                ready = free[device]
                for source in before[name]:
                    there, end = ends[source]
                    moved = graph.transfer_s(graph.edges[source, name], there, device) if there != device else 0.0
                    ready = max(ready, end + moved)
                seconds = graph.seconds[name][device]
                if ready + seconds + tail[name] - min(graph.seconds[name]) >= best - 1e-12:
                    continue
                busy = tuple(ready + seconds if one == device else time for one, time in enumerate(free))
                place(left - {name}, {**ends, name: (device, ready + seconds)}, busy)

    place(frozenset(names), {}, (0.0,) * graph.devices)
    return best
