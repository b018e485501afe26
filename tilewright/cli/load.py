"""`tilewright load`: load-tests a service on a schedule, and reports the latencies that users would see."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.bench.load.config import LoadConfig
from tilewright.cli.options import options
from tilewright.cli.root import app, ends_on_sigterm, plain_errors, say
from tilewright.extras import require

if TYPE_CHECKING:
    from tilewright.bench.load.drive import Drive
    from tilewright.bench.load.run import Look, Outcome

__all__ = ["load"]


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright load http://127.0.0.1:8000 --concurrency 1,2,4,8,16 --report load.html\n\n"
    "tilewright load http://127.0.0.1:8000 --rate 2,4,8 --slo ttft=200ms,itl=20ms\n\n"
    "tilewright load http://127.0.0.1:8000 --trace conversation.jsonl.xz --length-scale 0.02\n\n"
    "tilewright load --self-check"
)
@options(LoadConfig, into="given")
def load(
    context: typer.Context,
    given: dict[str, Any],
    url: Annotated[str | None, typer.Argument(help="address of the service, such as http://127.0.0.1:8000")] = None,
    report: Annotated[Path | None, typer.Option(help="write an HTML report with curves to this file")] = None,
    out: Annotated[Path | None, typer.Option(help="write the results to this JSON file")] = None,
    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check", help="check the load generator itself: measure a built-in service with known latencies and compare"
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Load test a service with waiting users (--concurrency), a fixed rate (--rate) or a recorded trace (--trace).

    Latencies are counted from the scheduled send time of a request. Refused requests count against the service.
    """
    with plain_errors(context), ends_on_sigterm():
        require("tilewright load", "aiohttp")
        if report is not None:
            require("the report of tilewright load", "vl_convert")
        if self_check:
            raise typer.Exit(_self_check(as_json=as_json))
        if url is None:
            raise typer.BadParameter(
                "the URL is missing; give the address of a service, such as http://127.0.0.1:8000, or --self-check"
            )
        config = LoadConfig(**given)
        for path in (report, out):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{path} cannot be written, because the folder {path.parent} does not exist")
        outcome = _load(url, config)
        _print(outcome, report, out, as_json=as_json)


def _load(url: str, config: LoadConfig) -> "Outcome":
    import asyncio  # not above: it would take a tenth of the time of --help

    from tilewright.bench.load.run import load as run

    async def work() -> "Outcome":
        task = asyncio.current_task()
        assert task is not None
        # End as after Ctrl-C, so that the service is told to forget the regions of shared memory.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await run(url, config, look=look, say=say if not sys.stderr.isatty() else _above)

    with _shown() as look:
        try:
            return asyncio.run(work())
        except asyncio.CancelledError:
            raise typer.Exit(128 + signal.SIGTERM) from None


def _above(line: str) -> None:
    """Print a line above the live table, which rich moves down."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(line)


@contextmanager
def _shown() -> "Iterator[Look]":
    """A function that shows a running stage: on a terminal, as a table that is updated in place."""
    if not sys.stderr.isatty():
        yield lambda label, state: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        yield lambda label, state: live.update(_table(label, state))


def _table(label: str, state: "Drive") -> Any:
    from rich.table import Table

    recent = [sample for sample in state.samples[-500:] if sample.end_s > state.elapsed_s - 5]
    done = [sample for sample in recent if sample.status == "ok"]
    firsts = sorted(value for sample in done if (value := sample.ttft if sample.pieces_s else sample.e2e) is not None)
    table = Table(box=None, pad_edge=False)
    cells = {
        "load": label,
        "seconds": f"{state.elapsed_s:.0f}",
        "sent": str(state.sent),
        "in flight": str(state.in_flight),
        "answered": str(len(state.samples)),
        "last 5 s: answers/s": f"{len(done) / 5:.1f}",
        "tokens/s": f"{sum(sample.output_tokens for sample in done) / 5:.0f}",
        "first token, median": f"{firsts[len(firsts) // 2] * 1000:.0f} ms" if firsts else "",
        "refused, failed": str(len(recent) - len(done)),
    }
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    return table


def _print(outcome: "Outcome", report: Path | None, out: Path | None, *, as_json: bool) -> None:
    from tilewright.bench.load.report import write_html, write_json

    if out is not None:
        write_json(outcome, out)
    if report is not None:
        write_html(outcome, report)
        say(f"Wrote the curves to {report}")
    if as_json:
        print(json.dumps(outcome.to_json(), allow_nan=False))
        return
    names = ("ttft", "itl", "tpot", "e2e")
    print(f"{'load':18}{'asked/s':>9}{'done/s':>9}{'tokens/s':>10}{'good':>7}{'refused':>9}{'failed':>8}", end="")
    print("".join(f"{name.upper() + ' p50/p99 ms':>20}" for name in names))
    for one in outcome.summaries:
        print(f"{one.label[:17]:18}{one.offered_rate:9.2f}{one.request_rate:9.2f}{one.token_rate:10.0f}", end="")
        print(f"{one.good_share:7.0%}{one.rejected:9}{one.failed:8}", end="")
        found = [one.latencies.get(name) for name in names]
        print("".join(f"{f['p50'] * 1e3:11.1f} /{f['p99'] * 1e3:7.1f}" if f else f"{'-':>20}" for f in found))
        if one.spread is not None and one.spread > 0.1:
            say(f"{one.label}: parts of the measured time differ by {one.spread:.0%}; use a longer stage")
        if one.lag_p99_s > 0.05:
            say(f"{one.label}: this client sent up to {one.lag_p99_s * 1e3:.0f} ms late (p99); it may be the bottleneck")
        for words, count in one.problems.items():
            say(f"{one.label}: {count} times: {words}")


def _self_check(*, as_json: bool) -> int:
    """Print the comparison and return the exit code."""
    import asyncio

    from tilewright.bench.load.selfcheck import ALLOWED, self_check

    began_s = time.monotonic()
    checks = asyncio.run(self_check())
    if as_json:
        print(json.dumps([{**vars(check), "error": check.error, "holds": check.holds} for check in checks]))
    else:
        print(f"{'metric':8}{'':5}{'scripted ms':>12}{'done ms':>10}{'measured ms':>13}{'error':>9}")
        for c in checks:
            times = f"{c.scripted_s * 1e3:12.2f}{c.done_s * 1e3:10.2f}{c.measured_s * 1e3:13.2f}"
            print(f"{c.metric.upper():8}{c.percentile:5}{times}{c.error:+9.2%}{'' if c.holds else '  too far'}")
    wrong = sum(not check.holds for check in checks)
    said = "every percentile is" if not wrong else f"{wrong} of {len(checks)} percentiles are not"
    say(f"{said} within {ALLOWED:.0%} of the service's own times ({time.monotonic() - began_s:.0f} s)")
    return 1 if wrong else 0
