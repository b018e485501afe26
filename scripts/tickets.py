"""When programs draw their next tile, and when a launch ends by it: `python scripts/tickets.py`, on any machine.

Tiles of attention under a diagonal differ in length. Programs, one an SM, take them in order: heads go in sections of about a
tile for each SM, in a section the longest tiles first. A program draws its next tile either as it begins one, which reserves
the tile for as long as that one takes, or as it ends it. Printed: the time at which the last program ends over the time that
the work would take if it were spread evenly. A block takes one unit, a tile's beginning and end `fixed` units.
"""

import heapq
import json

SMS = 132

# Label, blocks of the longest tile, heads, query heads of a key/value head, units of a block, fixed units; 16k tokens in all.
LAUNCHES: tuple[tuple[str, int, int, int, float, float], ...] = (
    *((f"forward, 16 heads of 128, {n} keys", n // 128, 262144 // n, 1, 1.0, 1.0) for n in (2**i for i in range(9, 16))),
    *((f"backward, 16 heads of 128, {n} keys", n // 128, 262144 // n, 1, 2.0, 2.5) for n in (2**i for i in range(9, 14))),
    ("backward, 32/8 heads of 128, 2048 keys", 16, 64, 4, 2.0, 2.5),
    ("backward, 32/8 heads of 128, 8192 keys", 64, 16, 4, 2.0, 2.5),
)


def tiles(longest: int, heads: int, group: int, unit: float, fixed: float) -> list[float]:
    """How long each tile takes, in the order in which they are handed out."""
    section = max(1, min(SMS // longest, heads))
    section = -(-heads // -(-heads // section))
    made: list[float] = []
    for start in range(0, heads, section):
        width = min(section, heads - start)
        made += [(longest - block) * group * unit + fixed for block in range(longest) for _ in range(width)]
    return made


def end_of(times: list[float], *, at_begin: bool) -> float:
    """When the last of SMS programs ends; `at_begin`: each draws its next tile as it begins one."""
    if not at_begin:
        free = [0.0] * SMS
        for time in times:
            heapq.heapreplace(free, free[0] + time)
        return max(free)
    end, drawn = 0.0, min(SMS, len(times))
    begins = [(0.0, program, program) for program in range(drawn)]
    while begins:
        start, program, tile = heapq.heappop(begins)
        end = max(end, start + times[tile])
        if drawn < len(times):
            heapq.heappush(begins, (start + times[tile], program, drawn))
            drawn += 1
    return end


def main() -> None:
    for label, longest, heads, group, unit, fixed in LAUNCHES:
        times = tiles(longest, heads, group, unit, fixed)
        even = sum(times) / SMS
        ends = {how: round(end_of(times, at_begin=how == "as one begins") / even, 3) for how in ("as one begins", "as it ends")}
        print(json.dumps({"launch": label, "tiles": len(times)} | ends))


if __name__ == "__main__":
    main()
