"""`tilewright place`: finds the fastest device of this machine for each batch size of a model."""

import dataclasses
import json
from typing import Annotated

import typer

from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say

__all__ = ["place"]


@app.command(
    epilog="[b]Examples[/b]\n\ntilewright place tabular_mlp\n\ntilewright place my_pkg.my_model:build --max-batch 256 --explain"
)
def place(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="MODULE:FUNCTION that returns (model, inputs), FILE.onnx, or a known model such as resnet50")
    ],
    max_batch: Annotated[int, typer.Option(min=1, help="largest batch size to measure")] = 64,
    explain: Annotated[
        bool, typer.Option("--explain", help="show the time on every device for each batch size, and the reasons")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Measure a model on the CPU and GPUs of this machine, and print which device is fastest for which batch sizes."""
    with plain_errors(context), ends_on_sigterm():
        from tilewright.bench.compare.models import load_model
        from tilewright.bench.place import place as placed
        from tilewright.bench.place import sizes_up_to

        sizes_up_to(max_batch)
        say(f"Loading {model} ...")
        loaded, progress = load_model(model), Progress()
        try:
            found = placed(loaded.module, loaded.inputs, max_batch, progress)
        finally:
            progress.end()
        if as_json:
            print(json.dumps(dataclasses.asdict(found)))
            return
        for device, error in zip(found.devices, found.errors, strict=True):
            print(f"{device.name}: the prediction is off by {error:.0%} (median of the sizes that were measured)")
        for first, name in found.spans:
            print(f"from {first} rows on: {name}")
        if explain:
            print(*found.lines, sep="\n")
