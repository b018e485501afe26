"""`tilewright export`: a model as a folder that is served without its code and without a compiler."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say

__all__ = ["export"]

MOST = 1 << 24
"""Of a dimension."""


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright export my_pkg.my_model:build --out models/mine/1\n\n"
    "tilewright export resnet50 --out resnet --precision fp16 --card h100 --max-batch 32\n\n"
    "tilewright export bert.onnx --out bert --shape input_ids=1,128\n\n"
    "tilewright serve ./resnet"
)
def export(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="MODULE:FUNCTION that returns (model, inputs), FILE.onnx, or resnet50 ...")],
    out: Annotated[Path, typer.Option(help="the folder, new or empty")],
    precision: Annotated[str | None, typer.Option(help="fp32, fp16, bf16 or int8; default: fp32, with --card fp16")] = None,
    max_batch: Annotated[int, typer.Option(help="most rows of a batch")] = 64,
    sizes: Annotated[
        list[int] | None, typer.Option(help="rows that batches are padded to, several times; default: powers of two")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,N...", help="of an ONNX model's input whose dimensions are open; may be given several times"
        ),
    ] = None,
    card: Annotated[str | None, typer.Option(help="compile the kernels for this card, such as h100; needs no GPU")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="kernels compiled at a time; default: the processor's cores")] = None,
) -> None:
    """Export a model: its optimised graph as data, its weights, and with --card its compiled kernels.

    Exit code 1 where it cannot be exported; the message says what of it.
    """
    with plain_errors(context), ends_on_sigterm():
        from tilewright.host.config import ModelConfig

        chosen = precision or ("fp32" if card is None else "fp16")
        config = ModelConfig(precision=chosen, max_batch=max_batch, preferred=tuple(sizes or ()))
        from tilewright.bench.compare.models import load_model
        from tilewright.host.export import export as exported
        from tilewright.hw.device import device_named

        on = None if card is None else device_named(card)
        say(f"Loading {model} ...")
        loaded, progress = load_model(model, shapes=_shapes(shape or ())), Progress()
        try:
            signature = exported(
                loaded.module,
                loaded.inputs,
                out,
                config,
                card=on,
                jobs=jobs or len(os.sched_getaffinity(0)),
                progress=progress,
            )
        finally:
            progress.end()
        shapes = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in signature.inputs)
        say(f"Wrote {out}: takes {shapes}; serve it: tilewright serve {out}")


def _shapes(given: Sequence[str]) -> dict[str, list[int]]:
    """--shape of each input. Raises ValueError: it is none."""
    found = dict[str, list[int]]()
    for text in given:
        name, _, sizes = text.rpartition("=")
        if not name or not all(size.isdecimal() and 0 < int(size) <= MOST for size in sizes.split(",")):
            raise ValueError(f"--shape is {text!r}, wanted NAME=N,N... with numbers from 1 to {MOST}, as in input_ids=1,128")
        found[name] = [int(size) for size in sizes.split(",")]
    return found
