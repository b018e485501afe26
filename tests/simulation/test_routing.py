"""Routing on public traces, four simulated replicas: against round robin and power of two choices."""

import pytest

from tests.paths import SHARED
from tests.simulation.replicas import Outcome, Policy, least_work, power_of_two, prefix_aware, round_robin, simulate, sticky
from tilewright.bench.load.schedule import Planned, read_trace

PAGES = 12_000
"""Blocks of 512 tokens in a replica's cache: a server of several cards, or one that keeps pages in host memory too."""


def trace(name: str, limit: int | None = None) -> list[Planned]:
    path = SHARED / "data" / "traces" / name
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    return read_trace(path, limit=limit)


def said(name: str, one: Outcome) -> str:
    first = f"TTFT p50 {one.ttft_p50:.3f} s, p99 {one.ttft_p99:.2f} s"
    return f"{name}: {first}, {one.throughput:.3f} requests/s, {one.hit_share:.1%} of prompts cached"


def test_conversations_wait_less_and_more_are_served() -> None:
    """64 users that wait for their answers, the first 4,000 requests of the trace."""
    requests = trace("mooncake-conversation.jsonl.xz", 4000)
    plain, ours = (simulate(requests, policy, users=64, pages=PAGES) for policy in (round_robin, prefix_aware))
    print(said("round robin", plain), said("router", ours), sep="\n")
    assert ours.ttft_p50 <= 0.4 * plain.ttft_p50
    assert ours.throughput >= 1.2 * plain.throughput
    assert ours.ttft_p99 <= plain.ttft_p99


def test_hardly_more_can_be_served() -> None:
    """A router that knows the work that is really left, over replicas that share one cache: what every hit is worth."""
    requests = trace("mooncake-conversation.jsonl.xz", 4000)
    ours = simulate(requests, prefix_aware, users=64, pages=PAGES)
    most = simulate(requests, least_work, users=64, pages=PAGES, one_cache=True)
    print(said("router", ours), said("one cache", most), sep="\n")
    assert ours.throughput >= 0.95 * most.throughput
    for policy in (sticky, least_work):  # hits alone, and even load alone
        assert simulate(requests, policy, users=64, pages=PAGES).throughput <= 0.95 * ours.throughput


def test_nothing_shared_is_as_good_as_power_of_two() -> None:
    requests = trace("azure-2023-conversation.csv", 6000)
    for speed in (4.0, 8.0):
        plain, ours = (simulate(requests, policy, speed=speed) for policy in (power_of_two, prefix_aware))
        assert ours.ttft_p50 <= 1.05 * plain.ttft_p50
        assert ours.throughput >= 0.95 * plain.throughput


def capacity(requests: list[Planned], policy: Policy, ttft_p99: float) -> float:
    """The most requests a second, as the trace has them, at which 99 % have their first token in time."""
    best = 0.0
    for tenths in range(5, 20):
        found = simulate(requests, policy, speed=tenths / 10, pages=PAGES)
        if found.ttft_p99 > ttft_p99:
            break
        best = found.throughput
    return best


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_trace() -> None:
    requests = trace("mooncake-conversation.jsonl.xz")
    for load in ({"speed": 1.4}, {"users": 64}):
        plain, other, ours = (
            simulate(requests, policy, pages=PAGES, **load) for policy in (round_robin, power_of_two, prefix_aware)
        )
        print(load, said("round robin", plain), said("power of two", other), said("router", ours), sep="\n")
        assert ours.ttft_p50 <= 0.4 * plain.ttft_p50
    plain, ours = (capacity(requests, policy, 15.0) for policy in (round_robin, prefix_aware))
    print(f"99 % within 15 s: round robin {plain:.2f} requests/s, router {ours:.2f}")
    assert ours >= 1.4 * plain
