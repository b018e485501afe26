"""`python -m tests.simulation --steps 1000000`: episodes until the engine has made so many steps, each step checked.

A failure prints the seed of its episode, is shrunk, and is written as one line of JSON that `--replay FILE` runs again.
Exit code 0: all promises held; 1: one was broken.
"""

import argparse
import gc
import sys
import time
from collections import Counter
from pathlib import Path

from tests.simulation.scenario import Scenario, draw_scenario, from_json, to_json
from tests.simulation.shrink import shrink
from tests.simulation.world import run_scenario


def broken(scenario: Scenario) -> str | None:
    """What promise a scenario breaks, None where it keeps all."""
    try:
        run_scenario(scenario)
    except AssertionError as error:
        return str(error) or "an assertion without words"
    return None


def _report(scenario: Scenario, why: str, out: Path) -> None:
    print(f"\nepisode {scenario.seed} broke a promise: {why}\nshrinking ...", flush=True)
    small = shrink(scenario, lambda one: (broken(one) or "")[:30] == why[:30])
    out.write_text(to_json(small) + "\n")
    print(f"{len(small.clients)} clients of {len(scenario.clients)}: {broken(small)}")
    for client in small.clients[:8]:
        print(f"  {client}"[:300])
    print(f"run it again: python -m tests.simulation --replay {out}")


def simulate(steps: int, seed: int, out: Path, *, progress: bool) -> int:
    """Episodes of consecutive seeds; the exit code."""
    gc.collect()
    gc.freeze()  # each episode ends with a collection: what was there before is not looked at again and again
    start, done, episode = time.monotonic(), Counter[str](), seed * 1_000_003
    while done["steps"] < steps:
        scenario = draw_scenario(episode)
        try:
            outcome = run_scenario(scenario)
        except AssertionError as error:
            _report(scenario, str(error), out)
            return 1
        done.update(steps=outcome.steps, preemptions=outcome.preemptions, answers=outcome.answers, episodes=1, **outcome.ends)
        episode += 1
        if progress and done["episodes"] % 50 == 0:
            rate = done["steps"] / (time.monotonic() - start)
            print(f"\r{done['steps']:,} of {steps:,} steps, {rate:,.0f} a second", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    print(
        f"{'' if not progress else chr(10)}no promise broken in {seconds:.0f} s: "
        + ", ".join(f"{n:,} {k}" for k, n in done.items())
    )
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of the engine, over all episodes")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--replay", type=Path, help="run the scenario of this file, and nothing else")
    parser.add_argument("--episode", type=int, help="run the episode of this seed, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("simulation-failure.json"), help="where a shrunk failure is written")
    given = parser.parse_args()
    if given.replay is None and given.episode is None:
        return simulate(given.steps, given.seed, given.out, progress=sys.stderr.isatty())
    scenario = from_json(given.replay.read_text()) if given.replay else draw_scenario(given.episode)
    why = broken(scenario)
    if why is not None and given.episode is not None:
        _report(scenario, why, given.out)
    else:
        print(why or "no promise broken")
    return int(why is not None)


if __name__ == "__main__":
    sys.exit(main())
