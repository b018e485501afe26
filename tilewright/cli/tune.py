"""`tilewright tune export | import | merge | freeze | show`: manages the measured configs.

The search itself is `tilewright tune OP ...`: a word that is not one of these commands is taken as the name of an op.
"""

import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tilewright.cli.root import app, plain_errors, say

if TYPE_CHECKING:
    from tilewright.tune.database import Database
    from tilewright.tune.ranking import Entry

__all__ = ["tune"]


class _VerbOrOp(TyperGroup):
    """`tilewright tune linear ...` runs the hidden command `op` with all the words, where there is one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # click's types, or typer's own copy of them
        if args and args[0] not in self.commands and "op" in self.commands:
            return "", self.commands["op"], args
        return super().resolve_command(ctx, args)


tune = typer.Typer(
    cls=_VerbOrOp,
    no_args_is_help=True,
    help="Find the fastest kernel config of an operator, and keep, exchange, freeze and show the measurements.",
)
app.add_typer(tune, name="tune")

_File = Annotated[Path | None, typer.Option("--database", help="Database file; default: the user's own.")]
_Card = Annotated[str | None, typer.Option("--card", help="Only rows of this GPU: its name, or a short form such as h100.")]
_Op = Annotated[str | None, typer.Option("--op", help="Only rows of this operator.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@tune.command("export")
def tune_export(
    context: typer.Context,
    out: Annotated[Path | None, typer.Argument(help="Output file; default: stdout.")] = None,
    op: _Op = None,
    card: _Card = None,
    database: _File = None,
) -> None:
    """Write the measurements of the database as JSON lines.

    Example: tilewright tune export h100.jsonl --card h100
    """
    from tilewright.tune.database import Database
    from tilewright.tune.exchange import export_rows

    with plain_errors(context), Database(database, read_only=True) as source:
        equal = _chosen(source, op, card)
        if out is None:
            count = export_rows(source, sys.stdout, **equal)
            sys.stdout.flush()
        else:
            with open(out, "w", encoding="utf-8") as file:
                count = export_rows(source, file, **equal)
        say(f"{count} rows")


@tune.command("import")
def tune_import(
    context: typer.Context,
    files: Annotated[list[str], typer.Argument(help="JSON lines files; - means stdin.")],
    database: _File = None,
    as_json: _Json = False,
) -> None:
    """Add measurements from JSON lines files to the database. Rows that it has already are skipped.

    If a file has an invalid line, nothing of that file is added. Example: tilewright tune import h100.jsonl
    """
    from tilewright.tune.database import Database
    from tilewright.tune.exchange import import_rows

    with plain_errors(context), Database(database) as target:
        for name in files:
            if name == "-":
                added = import_rows(target, sys.stdin.buffer, "stdin")
            else:
                with open(name, "rb") as file:
                    added = import_rows(target, file, name)
            _say_added(name, added, as_json)


@tune.command("merge")
def tune_merge(
    context: typer.Context,
    others: Annotated[list[Path], typer.Argument(help="Databases to read; they are not changed.")],
    database: _File = None,
    as_json: _Json = False,
) -> None:
    """Add the measurements of other databases. Example: tilewright tune merge /mnt/node7/tune.sqlite"""
    from tilewright.tune.database import Database
    from tilewright.tune.exchange import merge

    with plain_errors(context), Database(database) as target:
        for other in others:
            _say_added(str(other), merge(target, other), as_json)


@tune.command("freeze")
def tune_freeze(
    context: typer.Context,
    card: _Card = None,
    op: _Op = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output file; default: tune/tables/CARD.json of the package.")
    ] = None,
    database: _File = None,
    as_json: _Json = False,
) -> None:
    """Write the best config of every problem and implementation on one GPU to a table file.

    All ranks of a job can read the file, so that they choose the same kernels.

    Example: tilewright tune freeze --card h100 --out h100.json
    """
    from tilewright.hw.device import card_slug
    from tilewright.tune.database import Database
    from tilewright.tune.frozen import TABLES, FrozenTable, freeze, write_table

    with plain_errors(context), Database(database, read_only=True) as source:
        entries = source.entries(**_chosen(source, op, card))
        text = freeze(entries)
        path = out or TABLES / f"{card_slug(entries[0].card)}.json"
        write_table(path, text)
        table = FrozenTable(path, check=True)
        facts = {"path": str(path), "card": table.card, "rows": len(table.entries()), "sha256": table.sha256}
        print(json.dumps(facts) if as_json else "  ".join(f"{name} {value}" for name, value in facts.items()))


@tune.command("show")
def tune_show(
    context: typer.Context,
    op: Annotated[str | None, typer.Argument(help="Only rows of this operator; default: all operators.")] = None,
    card: _Card = None,
    table: Annotated[Path | None, typer.Option("--table", help="Show a frozen table instead of the database.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every measurement, including failed ones.")] = False,
    database: _File = None,
    as_json: _Json = False,
) -> None:
    """Show the fastest implementation of each problem and its margin. The vendor's library is one of the implementations.

    The margin is how much longer the next implementation takes. The noise is the part of it that the spread of both explains.

    Example: tilewright tune show linear --card h100
    """
    from tilewright.tune.database import Database
    from tilewright.tune.frozen import FrozenTable

    with plain_errors(context):
        if table is not None:
            if everything or card or database:
                raise ValueError("--table shows a whole frozen table; leave out --all, --card and --database")
            entries = FrozenTable(table, check=True).entries()
            if op is not None:
                _known("op", op, sorted({e.op for e in entries}))
            _show(_winners([e for e in entries if op in (None, e.op)]), as_json)
            return
        with Database(database, read_only=True) as source:
            equal = _chosen(source, op, card)
            if everything:
                _show([_measurement(json.loads(row.json())) for row in source.rows(**equal)], as_json)
            else:
                _show(_winners(source.entries(**equal)), as_json)


def _say_added(name: str, added: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"from": name, "rows": added.rows, "new": added.new}))
    else:
        say(f"{name}: {added.rows} rows, {added.new} of them new")


def _known(what: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=3) or known
        wanted = f"wanted one of {', '.join(near)}" if near else "there are no rows at all"
        raise ValueError(f"there are no rows of {what} {name!r}; {wanted}")


def _chosen(database: "Database", op: str | None, card: str | None) -> dict[str, Any]:
    """The values of `--op` and `--card` as values of columns. Raises ValueError with the nearest names."""
    from tilewright.hw.device import card_slug

    equal = {}
    if op is not None:
        _known("op", op, database.values("op"))
        equal["op"] = op
    if card is not None:
        cards = database.values("card")
        found = [name for name in cards if card in (name, card_slug(name))]
        if not found:
            _known("card", card, [*map(card_slug, cards), *cards])
        if len(found) > 1:
            raise ValueError(f"--card {card} matches several GPUs: {', '.join(found)}; give the whole name")
        equal["card"] = found[0]
    return equal


def _winners(entries: "list[Entry]") -> list[dict[str, Any]]:
    """One dict for each problem and implementation, the winner with its margin first."""
    from tilewright.tune.ranking import ranked, verdict

    groups: dict[Any, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (e.op, e.card, e.problem, e.invariant)):
        groups.setdefault((entry.op, entry.card, entry.problem, entry.invariant), []).append(entry)
    rows = []
    for group in groups.values():
        best = ranked(group)
        best = [e for i, e in enumerate(best) if e.impl not in {b.impl for b in best[:i]}]
        decided = verdict(best)
        for entry in best:
            won = entry is best[0] and decided
            rows.append(
                {
                    "op": entry.op,
                    "card": entry.card,
                    "problem": json.loads(entry.problem),
                    "invariant": entry.invariant,
                    "impl": entry.impl,
                    "config": json.loads(entry.config),
                    "us": round(entry.us, 3),
                    "us_spread": round(entry.us_spread, 3),
                    "ahead_of": won[0].impl if won else None,
                    "margin": round(won[1].margin, 4) if won else None,
                    "noise": round(won[1].noise, 4) if won else None,
                    "wins": str(won[1]) if won else "alone" if entry is best[0] else "",
                    "versions": entry.stack._asdict(),
                    "date": entry.date,
                }
            )
    return rows


def _measurement(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "card": row["environment"]["card"], "wins": row["status"] + (f": {row['error']}" if row["error"] else "")}


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def words(values: Any) -> str:
        return " ".join(f"{name}={value}" for name, value in values.items()) if isinstance(values, dict) else str(values)

    table = Table("op", "problem", "impl", "config", "us", "wins", "card")
    last = None
    for row in rows:
        problem = words(row["problem"]) + (" invariant" if row["invariant"] else "")
        head = (row["op"], problem) if (row["card"], row["op"], problem) != last else ("", "")
        last = (row["card"], row["op"], problem)
        us = "" if row["us"] is None else f"{row['us']:.2f} ± {row['us_spread']:.2f}"
        # As Text, so that text from a file is not interpreted as markup.
        cells = (*head, row["impl"], words(row["config"]), us, row["wins"], row["card"] if head[0] else "")
        table.add_row(*(Text(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 220).print(table if rows else "no rows")
