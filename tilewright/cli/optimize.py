"""`tilewright optimize`: shows how `optimize` would change a model, fusion by fusion, and the error of its outputs."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say

__all__ = ["optimize"]


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright optimize resnet50@32\n\n"
    "tilewright optimize my_pkg.my_model:build --precision bf16 --out fusions.json\n\n"
    "tilewright optimize small_encoder --device cpu --precision fp32 --json"
)
def optimize(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="known model such as resnet50@32, MODULE:FUNCTION that returns (model, inputs), or FILE.onnx")
    ],
    precision: Annotated[
        str | None,
        typer.Option(
            help="precision: fp32, fp16, bf16, or int8 (fp16 with quantised products); default: fp16 on a GPU, fp32 on a CPU"
        ),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="largest relative RMS error of the outputs; default: depends on the precision")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="on a GPU: first search the best config of every kernel launch; takes minutes")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: the first GPU, or the CPU if there is none")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the report as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON instead of text")] = False,
) -> None:
    """Optimise a model and print a report: each fusion that was made or refused and why, the bytes saved, and the error.

    The exit code is 1 if the outputs differ too much from the float model's, or if no part of the model can be traced.
    """
    with plain_errors(context), ends_on_sigterm():
        if out is not None and (out.is_dir() or not out.parent.is_dir()):
            raise ValueError(f"--out is {out}, wanted a file in an existing folder")
        from tilewright.fuse.settings import PRECISIONS

        if precision is not None and precision not in PRECISIONS:
            raise ValueError(f"--precision is {precision!r}, wanted one of {', '.join(PRECISIONS)}")
        import torch

        from tilewright.bench.compare.models import load_model
        from tilewright.fuse import optimize as optimized
        from tilewright.hw.device import cuda_count, default_device

        if device is not None and device != "cpu" and not (device.startswith("cuda") and cuda_count()):
            raise ValueError(f"--device is {device!r}, but this machine has {'cuda and ' if cuda_count() else 'only '}cpu")
        place = default_device() if device is None else torch.device(device)
        say(f"Loading {model} ...")
        loaded = load_model(model, device=place)
        say(f"Optimising for {place} ...")
        # The report shows fusions and errors. On a CPU, Inductor's compilation would take a minute and change neither.
        compiled = False if place.type == "cpu" else None
        progress = Progress()
        asked = {"tolerance": tolerance, "tune": tune, "compiled": compiled, "progress": progress}
        try:
            report = optimized(loaded.module, loaded.inputs, precision, report=False, **asked).report
        finally:
            progress.end()
        if out is not None:
            out.write_text(report.json() + "\n", encoding="utf-8")
            say(f"Wrote {out}")
        print(report.json() if as_json else report.text())
