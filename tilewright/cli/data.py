"""`tilewright data`: prepares text for training, from archives to token shards."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say

__all__ = ["data"]

data = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn archives and files into clean documents and token shards for training.",
)
app.add_typer(data, name="data")


@data.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright data clean recipe.toml --out cleaned\n\n"
    "tilewright data clean recipe.toml --out cleaned --processes 16 --memory-gb 32\n\n"
    "docs/data.md describes recipes."
)
def clean(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="TOML recipe: input, processing steps and output")],
    out: Annotated[
        Path, typer.Option(help="new folder for the output; with the folder of an interrupted run, that run continues")
    ],
    processes: Annotated[int, typer.Option(min=1, help="number of worker processes")] = 2,
    memory_gb: Annotated[float, typer.Option(min=0.5, help="memory for all processes together, in GiB")] = 4.0,
    executor: Annotated[
        str, typer.Option(help="local (this machine), or ray for several machines that share the output folder")
    ] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON instead of a table")] = False,
) -> None:
    """Read, filter, deduplicate and tokenize texts as a recipe says; write documents, token shards and a report."""
    with ends_on_sigterm(), plain_errors(context):
        from tilewright.data.recipe import load
        from tilewright.data.report import table, write_html
        from tilewright.data.run import run

        progress = Progress()
        memory = int(memory_gb * (1 << 30))
        result = run(load(recipe), out, processes=processes, memory_bytes=memory, executor=executor, say=progress)
        write_html(result.report, out / "report.html")
        progress.end()
        if as_json:
            print(json.dumps(result.report))
        else:
            print(table(result.report))
            print(f"\nsha256 of the documents: {result.sha256}")
            say(f"{out}/report.html shows what each step did")


@data.command()
def diff(
    context: typer.Context,
    before: Annotated[Path, typer.Argument(help="output folder of the first recipe")],
    after: Annotated[Path, typer.Argument(help="output folder of the second recipe, run on the same input")],
    as_json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Compare the outputs of two recipes: documents that only one of them kept, and differences between their steps."""
    with ends_on_sigterm(), plain_errors(context):
        from tilewright.data.diff import compare, lines

        found = compare(before, after)
        print(json.dumps(found) if as_json else "\n".join(lines(found)))


@data.command("train-quality")
def train_quality(
    context: typer.Context,
    good: Annotated[Path, typer.Option(help="file with examples of good text (JSON lines, parquet or text)")],
    bad: Annotated[Path, typer.Option(help="file with examples of bad text")],
    out: Annotated[Path, typer.Option(help="write the classifier to this .safetensors file")],
    text_field: Annotated[str, typer.Option(help="field that holds the text in JSON lines and parquet files")] = "text",
) -> None:
    """Train the text classifier that the step "quality" uses, from examples of good and bad text.

    A tenth of each file is held out, and the classifier's accuracy is measured on it.
    """
    with ends_on_sigterm(), plain_errors(context):
        from tilewright.data.quality import train_files

        found = train_files(good, bad, out, text_field=text_field)
        print(json.dumps(found, indent=1))
