"""What routing by prefix can bring: `python -m tests.simulation.routing_table` prints round robin, the router and a bound.

The bound is a router that knows the work that is really left, over replicas that share one cache which never gives anything up:
no placement can find more. With users that wait, by the size of the caches and the number of users; and the most requests a
second with 99 % of the first tokens in time, which is what a service can sell.
"""

import argparse
from collections.abc import Callable, Sequence

from tests.paths import SHARED
from tests.simulation.replicas import Outcome, Policy, least_work, prefix_aware, round_robin, simulate
from tilewright.bench.load.schedule import BLOCK_TOKENS, Planned, read_trace

UNBOUNDED = 200_000
"""Pages of a cache that never has to give any up."""
WORDS = "| cache of a replica | {} | round robin | router | bound | router / round robin | bound / round robin |"


def capacity(simulated: Callable[[float], Outcome], ttft_p99: float, low: float = 0.2, high: float = 4.0) -> float:
    """The most requests a second, as the trace has them, at which 99 % have their first token in time; to a hundredth."""
    best = 0.0
    while high - low > 0.01 * low:
        speed = (low + high) / 2
        found = simulated(speed)
        if found.ttft_p99 > ttft_p99:
            high = speed
        else:
            low, best = speed, found.throughput
    return best


def tokens(pages: int) -> str:
    """The size of a cache in words."""
    return f"{pages * BLOCK_TOKENS / 1e6:.2g} million tokens"


def row(cache: str, load: str, plain: float, ours: float, most: float) -> None:
    """A line of a table."""
    ratios = [f"{one / plain:.2f}" if plain else "-" for one in (ours, most)]
    print(f"| {cache} | {load} | {plain:.2f} | {ours:.2f} | {most:.2f} | {ratios[0]} | {ratios[1]} |", flush=True)


def by_users(requests: Sequence[Planned], pages: Sequence[int], users: Sequence[int]) -> None:
    """Requests a second with users that wait for their answers."""
    print(WORDS.format("users that wait") + "\n|---|---|---|---|---|---|---|")
    for many in users:
        most = simulate(requests, least_work, users=many, pages=UNBOUNDED, one_cache=True).throughput
        for size in pages:
            plain, ours = (simulate(requests, one, users=many, pages=size) for one in (round_robin, prefix_aware))
            row(tokens(size), str(many), plain.throughput, ours.throughput, most)


def by_limit(requests: Sequence[Planned], pages: Sequence[int], limits: Sequence[float]) -> None:
    """Requests a second with 99 % of the first tokens within a limit."""
    print("\n" + WORDS.format("TTFT p99 within") + "\n|---|---|---|---|---|---|---|")

    def at(policy: Policy, size: int, limit: float, *, one_cache: bool = False) -> float:
        return capacity(lambda speed: simulate(requests, policy, speed=speed, pages=size, one_cache=one_cache), limit)

    for limit in limits:
        most = at(least_work, UNBOUNDED, limit, one_cache=True)
        for size in pages:
            row(tokens(size), f"{limit:g} s", at(round_robin, size, limit), at(prefix_aware, size, limit), most)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="of the trace, from its beginning")
    parser.add_argument("--pages", type=int, nargs="*", default=[1600, 6000, 12_000], help="of 512 tokens")
    parser.add_argument("--users", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--limits", type=float, nargs="*", default=[10, 15, 30])
    asked = parser.parse_args()
    requests = read_trace(SHARED / "data" / "traces" / "mooncake-conversation.jsonl.xz", limit=asked.requests)
    by_users(requests, asked.pages, asked.users)
    by_limit(requests, asked.pages, asked.limits)


if __name__ == "__main__":
    main()
