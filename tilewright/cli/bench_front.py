"""`tilewright bench front`: measures the cost of a server's front processes, without a model."""

import json
from typing import Annotated

import typer

from tilewright.cli.bench import bench, print_rows
from tilewright.cli.root import plain_errors, say
from tilewright.extras import require

__all__ = ["bench_front"]


@bench.command("front")
def bench_front(
    context: typer.Context,
    fronts: Annotated[
        list[int] | None,
        typer.Option(
            "--fronts", "-f", min=1, max=64, help="Number of front processes; may be given several times. [default: 1, 2, 4]"
        ),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, max=1 << 16, help="Number of streams open at once.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens in each stream.")] = 512,
    rate: Annotated[
        float, typer.Option(min=1, help="Tokens per second that the engine produces, for all streams together.")
    ] = 250e3,
    idle: Annotated[int, typer.Option(min=0, max=60000, help="Additional idle connections.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of tables.")] = False,
) -> None:
    """Measure tokens per second through front processes and their processor time, over HTTP, with an engine without a model.

    Tokens per event show whether the front processes kept up: 1 means that every token was sent in an event of its own. Gaps
    are measured between two steps of the engine, and between two events as a client reads them. Microseconds are processor
    time, summed over all processes of a kind. Growth is that of the server's memory after the first quarter of the run. The
    second table shows the time of each part of a front process by itself.

    Example: tilewright bench front -f 4 --rate 250000
    """
    with plain_errors(context):
        require("tilewright bench front", "fastapi", "uvicorn", "prometheus_client", "tokenizers", "zmq", "msgpack")
        from tilewright.bench.front import parts, run_fronts

        rows = []
        for count in fronts or [1, 2, 4]:
            say(f"{count} front processes, {streams} streams of {tokens} tokens ...")
            rows.append(run_fronts(count, streams=streams, tokens=tokens, tokens_per_s=rate, idle=idle))
        alone = parts(min(streams, 512))
        if as_json:
            print(json.dumps({"rows": rows, "us_a_token": alone}))
            return
        print_rows(rows, False)
        print_rows([{"microseconds a token of": name, "alone": us} for name, us in alone.items()], False)
