"""Schedules against the shortest ones: random graphs of three to six stages over two or three unlike devices."""

import itertools
import random

import pytest

from tests.placement.brute import shortest
from tilewright.placement.schedule import Graph, Timetable, schedule


def drawn(seed: int) -> Graph:
    rng = random.Random(seed)
    devices, count = rng.choice((2, 2, 3)), rng.randint(3, 6)
    names = [f"s{i}" for i in range(count)]
    fast = [rng.uniform(0.3, 3) for _ in range(devices)]
    seconds = {name: [rng.uniform(1, 10) * f * rng.uniform(0.5, 2) for f in fast] for name in names}
    share = rng.uniform(0.2, 0.8)
    edges = {(a, b): rng.uniform(0, 8) for i, a in enumerate(names) for b in names[i + 1 :] if rng.random() < share}
    link = rng.uniform(0.2, 1.5)
    return Graph(seconds=seconds, edges=edges, transfer_s=lambda count, source, target: count * link)


def check(graph: Graph, found: Timetable) -> None:
    """That a timetable is one: nothing runs twice at a time, nothing before what it needs has come."""
    assert found.placed.keys() == graph.seconds.keys()
    for name, one in found.placed.items():
        assert one.end_s == pytest.approx(one.start_s + graph.seconds[name][one.device])
    for (source, target), count in graph.edges.items():
        a, b = found.placed[source], found.placed[target]
        moved = graph.transfer_s(count, a.device, b.device) if a.device != b.device else 0.0
        assert b.start_s >= a.end_s + moved - 1e-9
    for device in range(graph.devices):
        spans = sorted((one.start_s, one.end_s) for one in found.placed.values() if one.device == device)
        assert all(begin >= end - 1e-9 for (_, end), (begin, _) in itertools.pairwise(spans))


def ratios(seeds: range) -> list[float]:
    found = []
    for seed in seeds:
        graph = drawn(seed)
        table = schedule(graph)
        check(graph, table)
        found.append(table.seconds / shortest(graph, table.seconds))
    return found


def test_within_a_tenth_of_the_shortest() -> None:
    found = ratios(range(100))
    print(f"mean {sum(found) / len(found):.4f}, worst {max(found):.4f}")
    assert max(found) <= 1.10


@pytest.mark.long
def test_within_a_tenth_of_the_shortest_a_thousand_times() -> None:
    found = ratios(range(1000))
    print(f"1,000 graphs: mean {sum(found) / len(found):.4f}, worst {max(found):.4f}, {sum(r > 1.0001 for r in found)} above 1")
    assert max(found) <= 1.10


def test_small_work_stays_and_large_work_goes() -> None:
    def transfer(count: float, source: int, target: int) -> float:
        return 1e-5 + count / 1e10

    small = Graph(
        seconds={"read": [1e-4, float("inf")], "model": [2e-4, 4e-4]}, edges={("read", "model"): 1e5}, transfer_s=transfer
    )
    large = Graph(
        seconds={"read": [1e-4, float("inf")], "model": [2e-2, 6e-4]}, edges={("read", "model"): 1e5}, transfer_s=transfer
    )
    assert [schedule(graph).placed["model"].device for graph in (small, large)] == [0, 1]
    lines = schedule(large).explain(large, ["cpu", "cuda:0"])
    assert lines[1].startswith("model: cuda:0, ")
    assert "cpu 20.000 ms" in lines[1]


@pytest.mark.parametrize(
    ("seconds", "edges", "words"),
    [
        ({"a": [1.0]}, {("a", "b"): 1.0}, "names an unknown stage"),
        ({"a": [1.0], "b": [1.0]}, {("a", "b"): 1.0, ("b", "a"): 1.0}, "wait for each other"),
        ({"a": [1.0], "b": [1.0, 2.0]}, {}, "the same number of devices"),
        ({"a": [float("inf")]}, {}, "cannot run on any device"),
    ],
)
def test_a_bad_graph_is_one_sentence(seconds: dict, edges: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schedule(Graph(seconds=seconds, edges=edges))
