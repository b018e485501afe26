"""`tilewright bench all`: everything that the tables print, into one folder."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.bench import bench, need_gpu
from tilewright.cli.root import TERMINATED, plain_errors, say

__all__ = ["bench_all"]


@bench.command("all")
def bench_all(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="Folder of the set: benchmarks/results/h200.")],
    budget: Annotated[
        float | None, typer.Option(min=0.1, help="Minutes: stop in time, between rows; the same command goes on.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A group, or the first word of several: layers, engine, compare; any.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print groups, rows, seconds and commands.")] = False,
) -> None:
    """Measure what README.md and docs/results.md print, on one card; what is in the folder already is not measured again.

    A folder is of one commit, one card and one set of versions. Exit code 1 where a group failed, 0 also where the budget ended
    before the set was whole. Where the code is a copy without .git, TILEWRIGHT_COMMIT names its commit. Example:

    tilewright bench all --out benchmarks/results/h200 --budget 9
    """
    with plain_errors(context):
        from tilewright.bench.everything import Stopped, measure, table
        from tilewright.bench.plan import chosen

        groups = chosen(only)
        if dry_run:
            print("\n".join(table(groups, out)))
            return
        need_gpu("all")
        try:
            failed, waiting = measure(groups, out, say, budget_s=None if budget is None else 60 * budget)
        except Stopped:
            say(f"terminated; what was measured is in {out}, and the same command goes on")
            raise typer.Exit(TERMINATED) from None
        if failed:
            say(f"failed: {', '.join(failed)}; the same command tries what is left of them again")
            raise typer.Exit(1)
        say(f"left for want of time: {', '.join(waiting)}; the same command goes on" if waiting else f"{out} is whole")
