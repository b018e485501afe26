"""`tilewright bench all`: measures all figures of the published tables, into one folder."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.bench import bench, need_gpu
from tilewright.cli.root import TERMINATED, plain_errors, say

__all__ = ["bench_all"]


@bench.command("all")
def bench_all(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results, such as benchmarks/results/h200.")],
    budget: Annotated[
        float | None,
        typer.Option(min=0.1, help="Stop after this many minutes, between two rows; the same command continues later."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure only this group, or all groups whose name begins with this word, such as layers; may be "
            "given several times."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the groups with their rows, seconds and commands.")
    ] = False,
) -> None:
    """Measure everything that README.md and docs/results.md show, on one GPU. Results already in the folder are kept.

    A folder holds results of one commit, one GPU model and one set of versions. The exit code is 1 if a group failed, and 0
    otherwise, also if the time ran out first. If the code has no .git folder, set TILEWRIGHT_COMMIT to its commit. Example:

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
            say(f"terminated; the rows measured so far are in {out}, and the same command continues from there")
            raise typer.Exit(TERMINATED) from None
        if failed:
            say(f"failed: {', '.join(failed)}; the same command measures their missing rows again")
            raise typer.Exit(1)
        say(f"no time was left for: {', '.join(waiting)}; the same command continues" if waiting else f"{out} is complete")
