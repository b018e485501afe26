"""`tilewright bench served`: measures what HTTP adds to the cost of an engine."""

from typing import Annotated, Any

import typer

from tilewright.cli.bench import bench, print_rows
from tilewright.cli.root import plain_errors, say
from tilewright.extras import require

__all__ = ["bench_served"]


@bench.command("served")
def bench_served(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A shape with random weights, such as qwen3-0.6b, or any model that `serve` accepts.")
    ],
    fronts: Annotated[int, typer.Option("--fronts", "-f", min=1, max=64, help="Number of front processes.")] = 4,
    streams: Annotated[int, typer.Option(min=1, max=1 << 14, help="Number of requests at once.")] = 512,
    tokens_in: Annotated[int, typer.Option(min=1, max=1 << 16, help="Length of each prompt in tokens.")] = 128,
    tokens_out: Annotated[int, typer.Option(min=2, max=1 << 16, help="Length of each answer in tokens.")] = 512,
    runs: Annotated[
        int, typer.Option(min=1, max=64, help="Runs of the engine alone and behind HTTP; the first one includes the warm-up.")
    ] = 2,
    device: Annotated[
        str | None,
        typer.Option(help="Torch device, such as cuda:0 or cpu; default: the first GPU, or the CPU if there is none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")] = False,
) -> None:
    """Compare tokens per second and the gaps between tokens of an engine alone and of the same engine behind HTTP.

    `share` is the speed behind HTTP divided by the speed alone, over the whole run; `decode_share` is the same while all
    streams decode. `adds_ms` is how much longer HTTP makes the gaps between tokens.

    Example: tilewright bench served qwen3-0.6b --streams 512
    """
    with plain_errors(context):
        require("tilewright bench served", "fastapi", "uvicorn", "prometheus_client", "tokenizers", "zmq", "msgpack")
        from tilewright.bench.served import run_served

        options: dict[str, Any] = {"max_model_len": tokens_in + tokens_out, "device": device}
        sizes = {"streams": streams, "tokens_in": tokens_in, "tokens_out": tokens_out}
        rows = []
        for row in run_served(model, options, fronts=fronts, **sizes, runs=runs):
            say(f"{row['tok_per_s']} tokens/s over HTTP, {row['alone_tok_per_s']} alone: {row['share']:.1%}")
            rows.append(row)
        print_rows(rows, as_json)
