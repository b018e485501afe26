"""`tilewright compare`: proves, layer by layer, that a model runs faster than on another engine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say

if TYPE_CHECKING:
    from tilewright.bench.compare.results import Comparison

__all__ = ["compare"]

EXIT_CODES = {"pass": 0, "fail": 1, "undecided": 3}
"""2 is for wrong usage."""

_MARKS = {"pass": "[green]✓ pass[/green]", "fail": "[red]✗ fail[/red]", "undecided": "[yellow]? undecided[/yellow]"}


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright compare --model resnet50@32 --ours optimize:fp16 --baseline eager --claim 1.5 --report out.html\n\n"
    "tilewright compare --model my_pkg.my_model:build --ours optimize --baseline onnxruntime\n\n"
    "tilewright compare --model small_cnn --ours optimize --baseline cmd:./their_engine.sh --budget 300 --json"
)
def compare(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="known model, such as resnet50 or vit_b16@32, or MODULE:FUNCTION that returns (model, inputs)")
    ],
    ours: Annotated[str, typer.Option(help="engine: eager, graph, compile, aoti, onnxruntime, openvino, optimize or cmd:...")],
    baseline: Annotated[str, typer.Option(help="engine to compare with; docs/compare.md describes all engines")],
    claim: Annotated[float, typer.Option(help="speedup that every layer must reach")] = 1.5,
    report: Annotated[
        Path | None, typer.Option(help="write a report to this .html, .json, .md or .trace.json (timeline) file")
    ] = None,
    budget: Annotated[float, typer.Option(help="seconds for building and measuring, fewer if the result is clear")] = 120.0,
    beside: Annotated[
        list[str] | None, typer.Option(help="also time the whole model on this engine; may be given several times")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="compare only the model as a whole, not its layers")] = False,
    counters: Annotated[
        bool, typer.Option(help="then read the engines' own performance counters; they do not affect the verdict")
    ] = True,
    seed: Annotated[int, typer.Option(help="seed of the weights and of the order of the runs")] = 0,
    threads: Annotated[int | None, typer.Option(help="threads of each call on a CPU; default: PyTorch's number")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: the first GPU, else the CPU")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON instead of a table")] = False,
) -> None:
    """Time every layer of a model on two engines, and check whether each layer is at least CLAIM times faster.

    Exit codes: 0 pass, 1 fail, 3 undecided. An engine that does not run or gives wrong outputs is an error, also with code 1.
    """
    with plain_errors(context), ends_on_sigterm():
        if report is not None and (report.suffix not in _WRITERS or not report.parent.is_dir()):
            raise ValueError(f"--report is {report}, wanted a file in an existing folder, ending in {', '.join(_WRITERS)}")
        say(f"Loading {model} ...")
        import torch

        from tilewright.bench.compare.models import load_model
        from tilewright.bench.compare.run import compare as run
        from tilewright.hw.device import default_device

        place = default_device() if device is None else torch.device(device)
        loaded = load_model(model, seed=seed, device=place)
        progress = Progress()
        try:
            found = run(
                loaded, ours, baseline, claim,
                budget_s=budget, seed=seed, threads=threads, whole=whole, beside=beside or (), counters=counters,
                progress=progress,
            )  # fmt: skip
        finally:
            progress.end()
        if report is not None:
            _write(found, report)
            say(f"Wrote {report}")
        print(json.dumps(found.to_json())) if as_json else _print(found)
    raise typer.Exit(EXIT_CODES[found.verdict])


_WRITERS = (".html", ".json", ".md")


def _write(found: "Comparison", path: Path) -> None:
    from tilewright.bench.compare import report

    writers = {".html": report.write_html, ".json": report.write_json, ".md": report.write_markdown}
    write = report.write_trace if path.name.endswith(".trace.json") else writers[path.suffix]
    write(found, path)


def _print(found: "Comparison") -> None:
    """Print the verdict, a row for each segment, and the open points of the fairness card."""
    from rich.console import Console
    from rich.table import Table

    from tilewright.bench.compare.figures import between, claim_line, headline, ratio, seconds, subline, sums

    console = Console(highlight=False)
    table = Table("layer", "", title=f"{found.model}: seconds of each layer", title_justify="left")
    for name in (found.ours.engine, found.baseline.engine, "faster", "interval"):
        table.add_column(name, justify="right")
    for segment in found.segments:
        times = seconds(segment.ours.value), seconds(segment.baseline.value)
        table.add_row(segment.name, _MARKS[segment.verdict], *times, ratio(segment.ratio.value), between(segment.ratio))
        for layer in segment.layers if len(segment.layers) > 1 else ():
            table.add_row(f"... {layer}", "", "", "", "", "not timed alone")
    table.add_section()
    whole = seconds(found.ours.whole.value), seconds(found.baseline.whole.value)
    for name, ours, baseline in sums(found):
        table.add_row(name, "", seconds(ours), seconds(baseline))
    table.add_row("whole model", "", *whole, ratio(found.ratio.value), between(found.ratio))
    console.print(table)
    for point in found.card:
        if point.open:
            console.print(f"[yellow]open[/yellow]  {point.name}: ", end="")
            console.print(point.why, markup=False)
    for claim in found.claims:
        console.print(f"whole model: {claim_line(claim)}", markup=False)
    console.print(headline(found), style="bold", markup=False)
    console.print(subline(found), markup=False)
    console.print(f"{_MARKS[found.verdict]}  measured for {found.seconds:.0f} s; ended: {found.environment['ended']}")
