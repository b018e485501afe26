"""`tilewright tune OP dims...`: searches the best config for one problem; `--dry-run` shows what would be measured."""

import json
import sys
from contextlib import ExitStack, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.root import Progress, plain_errors, say
from tilewright.cli.tune import tune

if TYPE_CHECKING:
    from tilewright.tune.candidates import Candidate, Task
    from tilewright.tune.search import Plan, Report

__all__ = ["print_report", "tune_op"]

_EPILOG = (
    "[b]Examples[/b]\n\n"
    "tilewright tune linear M=4096 N=4096 K=4096\n\n"
    "tilewright tune softmax M=8192 N=4096 dtype=fp16 --exhaustive --json\n\n"
    "tilewright tune paged_attention B=64 KV=8192 --card h100 --dry-run"
)


@tune.command(
    "op",
    epilog=_EPILOG,
    help="Measure configs of one problem on this machine and keep the best: `tilewright tune OP M=... N=...`.",
)
def tune_op(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="operator, such as matmul, softmax or paged_attention", metavar="OP")],
    dims: Annotated[
        list[str] | None, typer.Argument(help="dimensions and dtype, such as M=4096 N=4096 K=4096 dtype=bf16")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="number of configs to measure, besides the default and the libraries")] = 8,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="measure every config that has a certificate")] = False,
    time_limit: Annotated[
        float, typer.Option(min=1.0, help="most seconds for compiling one config, and for measuring one")
    ] = 25.0,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="for calls inside `with invariant()`: batch-invariant implementations only")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="search again even if the problem was measured before")] = False,
    card: Annotated[
        str | None, typer.Option(help="with --dry-run: plan for this GPU, such as h100; it need not be in this machine")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would be measured; needs no GPU")] = False,
    database: Annotated[Path | None, typer.Option(help="database file; default: the user's own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Compile the most promising configs, measure the best of them and store every measurement."""
    with plain_errors(context):
        _one_of_the_verbs(op)
        from tilewright.bench.dims import find_op
        from tilewright.bench.op import checked
        from tilewright.hw.cpu import cpu

        found = find_op(op)
        wanted = checked(found, dims or [])
        task = _task(found, wanted, _device(card, dry_run, op, dims or []), invariant)
        if dry_run:
            from tilewright.tune.search import planned

            with _as_measured(task):
                plan = planned(task, top=top, exhaustive=exhaustive)
            _print_plan(plan, as_json)
            return
        from tilewright.tune.database import Database
        from tilewright.tune.search import search

        progress = Progress()
        with Database(database) as rows, _as_measured(task):
            report = search(
                task,
                rows,
                command=(sys.executable, "-m", "tilewright.bench.measuring"),
                workers=cpu().cores,
                top=top,
                exhaustive=exhaustive,
                force=force,
                limit_s=time_limit,
                progress=progress,
            )
            progress.end()
            print_report(report, rows.path, as_json)
        if not report.ranking:
            raise typer.Exit(1)


def _one_of_the_verbs(op: str) -> None:
    """Raise ValueError if the word is not an op, and is nearer to a verb of the group than to any op."""
    from tilewright.bench.dims import ALIASES
    from tilewright.ops import ALL

    ops = [*(known.name for known in ALL), *ALIASES]
    verbs = [command.name for command in tune.registered_commands if command.name and command.name != "op"]
    if op not in ops and (near := get_close_matches(op, [*ops, *verbs], n=1)) and near[0] in verbs:
        raise ValueError(f"{op!r} is neither an operator nor a command of tune; did you mean `tilewright tune {near[0]}`?")


def _device(card: str | None, dry_run: bool, op: str, dims: list[str]) -> Any:
    """The card to tune for. Raises ValueError if nothing can be measured; the message says what can be done instead."""
    from tilewright.hw import env
    from tilewright.hw.device import card_slug, cuda_count, device_named, device_of

    words = " ".join([op, *dims])
    if env.interpreting():
        raise ValueError("TRITON_INTERPRET is set, so Triton interprets kernels instead of compiling them; unset it")
    here = device_of(0) if cuda_count() else None
    if here is None and not (dry_run and card):
        example = f"`tilewright tune {words} --dry-run --card {card_slug(card) if card else 'h100'}`"
        raise ValueError(
            f"this machine has no GPU to measure on. Without one, {example} shows what would be measured, "
            "`tilewright tune import FILE` adds rows measured elsewhere, and `tilewright explain` shows what a GPU "
            "runs"
        )
    if card is None:
        return here
    wanted = device_named(card)
    if here is None:
        return wanted
    if card_slug(here.name) == card_slug(card):
        return here
    if not dry_run:
        raise ValueError(f"--card is {card}, but the GPU of this machine is {here.name}; add --dry-run, or leave out --card")
    return wanted


def _task(op: Any, dims: dict[str, Any], device: Any, invariant: bool) -> "Task":
    from tilewright import op as ops
    from tilewright.tune.candidates import Task

    if invariant and op.rows_in_problem:
        raise ValueError(
            f"{op.name} has nothing to tune with --invariant, because its config must not depend on the number of "
            "rows in a batch; leave out --invariant"
        )
    assert op.make is not None, "checked refuses an op without dimensions"
    args = op.make(ops.Inputs("meta"), **dims)
    with ops.invariant() if invariant else nullcontext():
        refused = op.refusals(device, op.problem(*args))
    task = Task(op=op, dims=dims, args=args, device=device, refused=refused, invariant=invariant)
    if not task.impls:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ValueError(f"{task}: no implementation supports it: {reasons}")
    return task


def _as_measured(task: "Task") -> ExitStack:
    """A scope in which an op's inner calls (such as conv's `linear`) are chosen and compiled as they are when measured.

    The task's arguments are meta tensors. Outside of this scope such a call would use the op's definition, and nothing would be
    compiled.
    """
    from tilewright import op as ops

    scopes = ExitStack()
    scopes.enter_context(ops.on_card(task.device))
    if task.invariant:
        scopes.enter_context(ops.invariant())
    return scopes


# ---- what is printed


def _words(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _head(task: "Task") -> dict[str, Any]:
    return {
        "op": task.op.name,
        "dims": task.plain_dims,
        "problem": json.loads(task.problem_text),
        "card": task.device.name,
        "invariant": task.invariant,
        "refused": dict(task.refused),
    }


def _planned(candidate: "Candidate") -> dict[str, Any]:
    facts = candidate.facts
    names = ("warps", "registers", "spill_bytes", "shared_bytes", "blocks_per_sm")
    return {
        "impl": candidate.impl.name,
        "config": dict(candidate.config),
        "predicted_us": None if candidate.predicted_us is None else round(candidate.predicted_us, 2),
        "kept": candidate.kept,
        "facts": None if facts is None else {name: getattr(facts, name) for name in names},
    }


def _print_plan(plan: "Plan", as_json: bool) -> None:
    task, rows = plan.task, [_planned(candidate) for candidate in plan.first]
    considered = len(plan.first) + len(plan.rest)
    if as_json:
        print(json.dumps({**_head(task), "considered": considered, "dropped": dict(plan.dropped), "candidates": rows}))
        return
    table = _table("impl", "config", "predicted us", "registers", "shared bytes", "blocks an SM", "why")
    for row in rows:
        facts = row["facts"] or {}
        figures = (str(facts.get(name, "")) for name in ("registers", "shared_bytes", "blocks_per_sm"))
        predicted = "" if row["predicted_us"] is None else f"{row['predicted_us']:.2f}"
        why = "" if not row["kept"] else "the default" if row["config"] else "nothing to choose"
        table.add_row(row["impl"], _words(row["config"]), predicted, *figures, why)
    print(f"{task}: {len(rows)} of {considered} configs would be measured")
    _print(table)
    _say_dropped(plan.dropped, task)


def _say_dropped(dropped: Any, task: "Task") -> None:
    if dropped:
        say("not considered: " + ", ".join(f"{count} ({reason})" for reason, count in dropped.items()))
    for name, reason in task.refused.items():
        say(f"{name} refuses: {reason}")


def _table(*columns: str) -> Any:
    from rich.table import Table

    return Table(*columns)


def _print(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


def _ranked(report: "Report") -> list[dict[str, Any]]:
    return [
        {
            "impl": e.impl,
            "config": json.loads(e.config),
            "us": round(e.us, 3),
            "us_spread": round(e.us_spread, 3),
            "verified": e.verified,
            "predicted_us": e.load().resources.get("predicted_us"),
        }
        for e in report.ranking
    ]


def print_report(report: "Report", path: Path, as_json: bool) -> None:
    """Print the result of a search: the current candidates, best first, those that failed, and the winner's margin."""
    ranking, decided = _ranked(report), report.verdict
    failed = [row for row in report.rows if row.status != "ok"]
    for note in report.notes:
        say(note)
    if as_json:
        answer = {
            **_head(report.task),
            "how": report.how,
            "considered": report.considered,
            "dropped": dict(report.dropped),
            "compiled": report.compiled,
            "ranking": ranking,
            "failed": [{"impl": r.impl, "config": dict(r.config), "status": r.status, "error": r.error} for r in failed],
            "ahead_of": decided and decided[0].impl,
            "margin": decided and round(decided[1].margin, 4),
            "noise": decided and round(decided[1].noise, 4),
            "clear": decided and decided[1].clear,
            "notes": report.notes,
            "seconds": round(report.seconds, 1),
            "database": str(path),
        }
        print(json.dumps(answer))
        return
    how = {"known": "measured before; --force searches anew", "verified again": "the best of earlier versions, measured again"}
    print(f"{report.task}: {how.get(report.how, 'searched')}, {report.seconds:.1f} s")
    table = _table("", "impl", "config", "us", "predicted us", "")
    for place, row in enumerate(ranking[:12], 1):
        predicted = "" if row["predicted_us"] is None else f"{row['predicted_us']:.2f}"
        us = f"{row['us']:.2f} ± {row['us_spread']:.2f}"
        table.add_row(str(place), row["impl"], _words(row["config"]), us, predicted, "in turns" if row["verified"] else "")
    for row in failed[:12]:
        table.add_row("", row.impl, _words(row.config), row.status, "", row.error.splitlines()[0][:80] if row.error else "")
    _print(table)
    if not ranking:
        say("nothing could be measured, because every candidate failed")
    elif decided:
        print(f"{ranking[0]['impl']} is ahead of {decided[0].impl} {decided[1]}")
    else:
        print(f"{ranking[0]['impl']} is the only implementation that could be measured")
    measured = sum(row.status == "ok" and not row.verified for row in report.rows)
    say(f"{report.considered} configs considered, {report.compiled} compiled, {measured} measured; rows in {path}")
    _say_dropped(report.dropped, report.task)
