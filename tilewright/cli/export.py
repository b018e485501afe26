"""`tilewright export`: writes a model as a folder that can be served without its code and without a compiler."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say

__all__ = ["export"]

MOST = 1 << 24
"""The largest size of a dimension."""


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright export my_pkg.my_model:build --out models/mine/1\n\n"
    "tilewright export resnet50 --out resnet --precision fp16 --card h100 --max-batch 32\n\n"
    "tilewright export bert.onnx --out bert --shape input_ids=1,128\n\n"
    "tilewright serve ./resnet"
)
def export(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="MODULE:FUNCTION that returns (model, inputs), FILE.onnx, or a known model such as resnet50")
    ],
    out: Annotated[Path, typer.Option(help="new or empty output folder")],
    precision: Annotated[
        str | None, typer.Option(help="precision: fp32, fp16, bf16 or int8; default: fp32, or fp16 with --card")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="most rows in a batch")] = 64,
    sizes: Annotated[
        list[int] | None,
        typer.Option(help="batch size that smaller batches are padded to; may be given several times; default: powers of two"),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,N...", help="shape of an ONNX model's input that has open dimensions; may be given several times"
        ),
    ] = None,
    card: Annotated[str | None, typer.Option(help="also compile the kernels for this GPU, such as h100; needs no GPU")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="number of kernels to compile at a time; default: the number of processor cores")
    ] = None,
) -> None:
    """Export a model as a folder with its optimised graph, its weights and, with --card, its compiled kernels.

    The folder can be served without the model's code. The exit code is 1 if the model cannot be exported; the message names the
    part that cannot.
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
    """The values of --shape, by input. Raises ValueError if one is invalid."""
    found = dict[str, list[int]]()
    for text in given:
        name, _, sizes = text.rpartition("=")
        if not name or not all(size.isdecimal() and 0 < int(size) <= MOST for size in sizes.split(",")):
            raise ValueError(f"--shape is {text!r}, wanted NAME=N,N... with numbers from 1 to {MOST}, as in input_ids=1,128")
        found[name] = [int(size) for size in sizes.split(",")]
    return found
