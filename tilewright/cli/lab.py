"""`tilewright lab`: experiments on small models."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.root import Progress, app, plain_errors

if TYPE_CHECKING:
    from tilewright.train.lab.coordinates import Coordinates
    from tilewright.train.lab.gradient_flow import Flow

__all__ = ["lab"]

lab = typer.Typer(no_args_is_help=True, help="Small experiments that show how training behaves; a laptop is enough.")
app.add_typer(lab, name="lab")


@lab.command(
    "gradient-flow",
    epilog="[b]Examples[/b]\n\n"
    "tilewright lab gradient-flow --norm pre,post,peri,deepnorm,none --layers 6,12,24,48 --svg flow.svg\n\n"
    "tilewright lab gradient-flow --norm pre,post --layers 12 --steps 100 --out flow.json",
)
def gradient_flow_command(
    context: typer.Context,
    norm: Annotated[
        str, typer.Option(help="placement of the norms: pre, post, peri, deepnorm or none; separate several with commas")
    ] = "pre,post",
    layers: Annotated[str, typer.Option(help="numbers of layers, separated by commas")] = "6,12,24",
    width: Annotated[int, typer.Option(help="hidden size, a multiple of 16")] = 64,
    batch: Annotated[int, typer.Option(help="sequences in one training step")] = 16,
    length: Annotated[int, typer.Option(help="length of a sequence in tokens")] = 32,
    steps: Annotated[int, typer.Option(help="training steps; 0: measure at initialisation only")] = 0,
    lr: Annotated[float, typer.Option(help="learning rate of AdamW")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="steps during which the learning rate grows linearly from 0")] = 0,
    seed: Annotated[int, typer.Option(help="seed of the weights and data")] = 0,
    out: Annotated[Path | None, typer.Option(help="write all numbers to this JSON file")] = None,
    svg: Annotated[Path | None, typer.Option(help="draw the numbers into this SVG file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all numbers as JSON instead of a table")] = False,
) -> None:
    """Measure gradients, activations and updates in each layer of a small transformer, at initialisation and during training.

    The training data come from a Markov chain.
    """
    with plain_errors(context):
        from tilewright.train.lab.chart import specification
        from tilewright.train.lab.chart import svg as drawn
        from tilewright.train.lab.gradient_flow import FlowConfig, gradient_flow

        configs = [
            FlowConfig(
                norm=name, layers=depth, width=width, batch=batch, length=length, steps=steps, lr=lr, warmup=warmup, seed=seed
            )
            for name in norm.split(",") for depth in _numbers("layers", layers)
        ]  # fmt: skip
        progress = Progress()
        flows: list[Flow] = []
        for config in configs:
            flows.append(gradient_flow(config, say=progress))
            # Write after each run, so that an interrupted series leaves its results.
            if out is not None:
                out.write_text(json.dumps([flow.as_json() for flow in flows], indent=1) + "\n")
        if svg is not None:
            svg.write_text(drawn(specification(flows)))
        if as_json:
            print(json.dumps([flow.as_json() for flow in flows]))
        else:
            _print(flows)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} is {text!r}, wanted integers separated by commas, such as 6,12,24") from None


def _print(flows: "list[Flow]") -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table("norm", "layers", "step", "loss", "stream, first", "last", "gradient, first", "last", "one token's, last")
    for flow in flows:
        for snapshot in flow.snapshots:
            ends = [values[i] for values in (snapshot.activations, snapshot.gradients) for i in (0, -1)]
            figures = [snapshot.loss, *ends, snapshot.per_token[-1]]
            words = (f"{figure:.4g}" for figure in figures)
            table.add_row(flow.config.norm, str(flow.config.layers), str(snapshot.step + 1 if flow.config.steps else 0), *words)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@lab.command(
    "coordinate-check",
    epilog="[b]Examples[/b]\n\n"
    "tilewright lab coordinate-check --svg coordinates.svg\n\n"
    "tilewright lab coordinate-check --widths 128,256,512,1024 --base 128 --json",
)
def coordinate_check_command(
    context: typer.Context,
    widths: Annotated[str, typer.Option(help="hidden sizes, multiples of 16, separated by commas")] = "64,128,256,512",
    base: Annotated[int, typer.Option(help="hidden size at which muP equals the standard parametrisation")] = 64,
    layers: Annotated[int, typer.Option(help="number of layers of each model")] = 2,
    batch: Annotated[int, typer.Option(help="sequences in one training step")] = 8,
    length: Annotated[int, typer.Option(help="length of a sequence in tokens")] = 32,
    steps: Annotated[int, typer.Option(help="number of training steps")] = 4,
    lr: Annotated[float, typer.Option(help="learning rate of AdamW at the base width")] = 3e-3,
    seeds: Annotated[int, typer.Option(help="number of models of each hidden size, each with its own seed")] = 3,
    out: Annotated[Path | None, typer.Option(help="write all numbers to this JSON file")] = None,
    svg: Annotated[Path | None, typer.Option(help="draw the numbers into this SVG file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all numbers as JSON instead of a table")] = False,
) -> None:
    """Check how activations change with the hidden size in a few training steps, with and without muP.

    The table shows the change as a power of the hidden size. An exponent of 0 means that a step changes wide and narrow models
    equally, so that one learning rate suits both. `tilewright train` turns muP on with mup_base.
    """
    with plain_errors(context):
        from tilewright.train.lab.chart import coordinates_specification
        from tilewright.train.lab.chart import svg as drawn
        from tilewright.train.lab.coordinates import CoordinatesConfig, coordinate_check

        progress = Progress()
        checks = [
            coordinate_check(
                CoordinatesConfig(
                    mup=mup, widths=tuple(_numbers("widths", widths)), base=base, layers=layers, batch=batch, length=length,
                    steps=steps, lr=lr, seeds=seeds,
                ),
                say=progress,
            )
            for mup in (True, False)
        ]  # fmt: skip
        progress.end()
        found = [check.as_json() for check in checks]
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")
        if svg is not None:
            svg.write_text(drawn(coordinates_specification(checks)))
        if as_json:
            print(json.dumps(found))
        else:
            _print_slopes(checks)


def _print_slopes(checks: "list[Coordinates]") -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table("place", "muP", "usual")
    both = [check.slopes() for check in checks]
    for place in both[0]:
        table.add_row(place, *(f"{slopes[place]:+.3f}" for slopes in both))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
