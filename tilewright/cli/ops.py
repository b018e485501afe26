"""`tilewright ops`: lists the operators, and their implementations for each card."""

import inspect
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.root import app, plain_errors

if TYPE_CHECKING:
    from tilewright.hw.device import Device
    from tilewright.op import Op

__all__ = ["operators"]

Row = dict[str, Any]


@app.command(
    "ops",
    epilog="[b]Examples[/b]\n\ntilewright ops\n\ntilewright ops attention\n\ntilewright ops --card rtx-4090 --json",
)
def operators(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="operator, or part of its name; default: all operators")] = None,
    card: Annotated[
        list[str] | None, typer.Option(help="GPU, such as h100; may be given several times; default: a100, h100 and b200")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """List the operators, what each computes, and its implementations on each GPU."""
    with plain_errors(context):
        from tilewright.hw.device import device_named
        from tilewright.ops import ALL

        devices = [device_named(each) for each in card or ["a100", "h100", "b200"]]
        found = [op for op in ALL if name is None or name in op.name]
        if not found:
            raise ValueError(f"no operator has {name!r} in its name; `tilewright ops` lists all {len(ALL)}")
        rows = [row(op, devices) for op in found]
        if as_json:
            print(json.dumps(rows, indent=1))
        else:
            _print(rows, devices)


def row(op: "Op", devices: list["Device"]) -> Row:
    """A description of an operator, made without running it.

    Returns its name, what it computes, all implementations, and for each card the implementations that accept at least one of
    the operator's examples, in the order in which they are tried.
    """
    from tilewright.op import Inputs

    problems = {op.problem(*example.make(Inputs())) for example in op.examples}
    cards = {
        device.name: [impl.name for impl in op.impls if any(impl.refusal(device, problem) is None for problem in problems)]
        for device in devices
    }
    return {"name": op.name, "what": _what(op), "implementations": [impl.name for impl in op.impls], "cards": cards}


def _what(op: "Op") -> str:
    """The first sentence of the docstring of an operator's public function, or of the file that defines the operator."""
    from tilewright import ops

    public = getattr(ops, op.name, None) if op.name in ops.__all__ else None
    text = inspect.getdoc(public) or ""
    if not text or text.startswith("Without gradients"):
        text = inspect.getdoc(sys.modules[op.cost.__module__]) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _print(rows: list[Row], devices: list["Device"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("operator", "what it computes", *[device.name for device in devices])
    for each in rows:
        table.add_row(each["name"], each["what"], *[" ".join(each["cards"][device.name]) or "-" for device in devices])
    Console(width=None if sys.stdout.isatty() else 160).print(table, markup=False)
