"""`tilewright bench OP`, `bench ops`, `bench layers`, `bench attention-8bit` and `bench engine`. `bench all`: bench_all.py."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tilewright.cli.root import app, plain_errors, say

if TYPE_CHECKING:
    from tilewright.bench.results import Results

__all__ = ["bench", "need_gpu", "print_rows"]


class _Bench(TyperGroup):
    """The group of `bench ops`, `bench engine` and others; any other word is taken as the name of an op."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["op", *args]
        return super().resolve_command(ctx, args)


bench = typer.Typer(
    cls=_Bench, no_args_is_help=True, help="Measure operators and the engine. JSON results record the device and the versions."
)
app.add_typer(bench, name="bench")

_Out = Annotated[Path | None, typer.Option("--out", help="Write the results to this JSON file; it is updated after each row.")]
_Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue an interrupted measurement of --out; new rows go to a second file next to it."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")]
_SETTLE_HELP = (
    "Seconds for which a call runs alone before it is timed, so that the GPU clock settles (0.5 s or more at the power limit)."
)
_Settle = Annotated[float, typer.Option(min=0, max=10, help=_SETTLE_HELP)]


MOST_COLUMNS = 16
"""Most columns of a table that has a line for each row."""


def need_gpu(what: str) -> None:
    """Exit with a message if there is no GPU for `tilewright bench <what>`."""
    from tilewright.hw.device import cuda_count

    if not cuda_count():
        say(
            f"tilewright bench {what} needs a CUDA device, and there is none; without one, use `tilewright explain "
            "OP --card h100`, `tilewright asm OP` or `tilewright tune OP --dry-run --card h100`; `make test` checks "
            "results on the CPU"
        )
        raise typer.Exit(1)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table, or as JSON. Rows with many fields become columns; the table leaves out lists and objects."""
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    columns = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list))
    lines = [[str(row.get(name, "")) for name in columns] for row in rows]
    if len(columns) > MOST_COLUMNS:
        table = Table("", *(f"row {number}" for number in range(len(rows))))
        lines = [[name, *(line[at] for line in lines)] for at, name in enumerate(columns)]
    else:
        table = Table(*(columns or ["no rows"]))
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@bench.command("ops")
def bench_ops(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Operators to measure; default: all.")] = None,
    out: _Out = None,
    resume: _Resume = False,
    as_json: _Json = False,
) -> None:
    """Measure memory-bound operators: microseconds, TB/s, and speed relative to copying the same bytes (1 = copy speed).

    Example: tilewright bench ops rms_norm softmax --out ops.json
    """
    with plain_errors(context):
        from tilewright.bench.ops import CASES, dispatch_overhead_us, measure

        known = sorted({name for name, _, _ in CASES})
        wrong = [name for name in names or [] if name not in known]
        if wrong:
            raise typer.BadParameter(f"there is no operator {', '.join(wrong)}; wanted some of {', '.join(known)}")
        need_gpu("ops")
        from tilewright.bench.results import Results

        results = Results(out, "memory-bound operators against a device copy of the same bytes", resume=resume)
        if not results.whole:
            done = {(row["op"], row["shape"]) for row in results.before}
            results.keep(measure(set(names or []), say, done))
            overhead = dispatch_overhead_us("cuda")
            results.finish(dispatch_us=overhead)
            say(f"dispatch of ops.rms_norm, host microseconds a call: {overhead}")
        print_rows(results.all_rows, as_json)


@bench.command("engine")
def bench_engine(
    context: typer.Context,
    shape: Annotated[str, typer.Argument(help="Shape, with random weights: qwen3-0.6b, qwen3-8b, llama-1b or llama-8b.")],
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help="Workload (see above), such as W1; may be given several times.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each workload in one process; the first is not warmed up.")] = 2,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: bfloat16, float16 or float32.")] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(min=2, help="Most tokens of prompt and answer together.")] = 4096,
    page_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a KV cache page; default: the engine's choice.")
    ] = None,
    quantize: Annotated[str | None, typer.Option(help="Quantise the weights: int8, fp8, int4 ...; default: off.")] = None,
    kv_cache: Annotated[str | None, typer.Option(help="KV cache format: int8 or fp8; default: the model's dtype.")] = None,
    max_tokens_per_step: Annotated[int, typer.Option(min=256, help="Most tokens in one pass of the model.")] = 8192,
    speculate: Annotated[str | None, typer.Option(help="Speculative decoding: ngram; default: off.")] = None,
    out: _Out = None,
    resume: _Resume = False,
    as_json: _Json = False,
) -> None:
    """Measure the engine's output tokens per second on fixed workloads.

    W1: 256 requests of different lengths. W2: 1024 tokens in, 1024 out. B1, B8, B64: decoding 1, 8 or 64 requests. S64: 64
    sampled requests. P4096: long prompts. E50 against E0: cost of penalties and log-probabilities; E50L, E50P: of one of them.
    R2000: kernels compiled while serving 2,000 random requests.

    Example: tilewright bench engine qwen3-0.6b -w W1 -w B1 --out engine.json
    """
    with plain_errors(context):
        from tilewright.bench.engine import WORKLOADS, run_engine
        from tilewright.engine.config import EngineConfig
        from tilewright.models import SHAPES

        if shape not in SHAPES:
            raise typer.BadParameter(f"shape is {shape!r}, wanted one of {', '.join(SHAPES)}")
        wrong = [name for name in workload or [] if name not in WORKLOADS]
        if wrong:
            raise typer.BadParameter(f"workload is {', '.join(wrong)}; wanted some of {', '.join(WORKLOADS)}")
        need_gpu("engine")
        from tilewright.bench.results import Results

        config = EngineConfig(
            dtype=dtype,
            max_model_len=max_model_len,
            page_size=page_size,
            max_tokens_per_step=max_tokens_per_step,
            quantize=quantize,
            kv_cache=kv_cache,
            speculate=speculate,
        )
        results = Results(out, f"engine, {shape}, random weights", resume=resume)
        done = Counter(row["workload"] for row in results.before)
        wanted = [name for name in workload or ["W1", "B1"] if done[name] < runs]
        if wanted:
            results.keep(run_engine(shape, wanted, runs=runs, config=config, progress=say))
        results.finish()
        print_rows(results.all_rows, as_json)


@bench.command("engine-host")
def bench_engine_host(
    context: typer.Context,
    running: Annotated[int, typer.Option(min=1, max=4096, help="Number of requests that decode at once.")] = 512,
    tokens: Annotated[int, typer.Option("--context", min=32, max=1 << 16, help="Length of each prompt in tokens.")] = 512,
    steps: Annotated[int, typer.Option(min=1, max=1 << 16, help="Number of decode steps to measure.")] = 300,
    speculate: Annotated[
        bool,
        typer.Option(
            "--speculate", help="Also measure n-gram speculation, which looks up likely next tokens in each request's own text."
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Measure the host's processor time for each part of a decode step, in microseconds. Needs no GPU.

    Example: tilewright bench engine-host --running 512
    """
    with plain_errors(context):
        from tilewright.bench.engine_host import host_times

        found = host_times(running=running, context=tokens, steps=steps, speculate=speculate)
        print_rows([{"running": running, "context": tokens, **found}], as_json)


@bench.command("layers")
def bench_layers(
    context: typer.Context,
    formats: Annotated[list[str], typer.Argument(help="One or more formats: int8, fp8, fp8-block, mxfp8, int4, int8-weight.")],
    shapes: Annotated[
        str | None, typer.Option(help='Layers as ROWSxOUTPUTSxINPUTS, such as "64x4096x4096;1x4096x4096".')
    ] = None,
    counts: Annotated[
        list[int] | None,
        typer.Option(
            "--rows",
            min=1,
            max=1 << 20,
            help="Measure the standard projections with this many rows; may be given several times.",
        ),
    ] = None,
    activation: Annotated[str, typer.Option(help="Activation: none, or silu_mul (gate and up projections fused).")] = "none",
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Measure the batch-invariant layers, as inside `with invariant()`.")
    ] = False,
    settle: _Settle = 0.0,
    out: _Out = None,
    resume: _Resume = False,
    as_json: _Json = False,
) -> None:
    """Compare quantised linear layers, including the quantisation of activations, with F.linear in bf16.

    Without --shapes, the projections of common models are measured.

    Example: tilewright bench layers int8 fp8 --out layers.json
    """
    with plain_errors(context):
        from tilewright.bench.layers import checked, rows
        from tilewright.bench.sets import PROJECTIONS, ROWS

        checked(formats, activation)
        if shapes and counts:
            raise ValueError("give only one of --shapes and --rows")
        usual = [(m, n, k) for m in counts or ROWS for n, k in PROJECTIONS]
        wanted = [_three_sizes(text) for text in shapes.split(";")] if shapes else usual
        need_gpu("layers")
        from tilewright.bench.results import Results

        what = "quantised linear layers against F.linear in bf16" + (", invariant" if invariant else "")
        results = Results(out, what, resume=resume)
        done = Counter((row["M"], row["N"], row["K"]) for row in results.before)
        wanted = [shape for shape in wanted if done[shape] < len(formats)]
        results.keep(rows(formats, wanted, activation, say, invariant, settle))
        _finish(results, formats, settle, as_json)


@bench.command("attention-8bit")
def bench_attention_8bit(
    context: typer.Context,
    formats: Annotated[list[str], typer.Argument(help="Formats to measure: fp8, int8 or both.")],
    shapes: Annotated[
        str | None, typer.Option(help='Shapes, such as "B=2 KV=8192 H=16 G=16 causal=true;B=1 KV=16384".')
    ] = None,
    settle: _Settle = 0.0,
    out: _Out = None,
    resume: _Resume = False,
    as_json: _Json = False,
) -> None:
    """Compare 8-bit attention, including quantisation, with the package's 16-bit attention.

    Without --shapes, 8192 to 32768 keys with a head size of 128 are measured.

    Example: tilewright bench attention-8bit fp8 --settle 0.5 --out attention-8bit.json
    """
    with plain_errors(context):
        from tilewright.bench.attention_8bit import rows, shapes_of

        wanted = shapes_of(formats, shapes)
        need_gpu("attention-8bit")
        from tilewright.bench.results import Results

        results = Results(out, "attention in 8 bits, quantiser included, against ops.attention in 16 bits", resume=resume)
        done = Counter(row["dims"] for row in results.before)
        wanted = [(text, dims) for text, dims in wanted if done[text] < len(formats)]
        results.keep(rows(formats, wanted, say, settle))
        _finish(results, formats, settle, as_json)


def _finish(results: "Results", formats: list[str], settle: float, as_json: bool) -> None:
    """Write and print the comparison of 8 and 4 bits with 16, and a geometric mean for each format."""
    from tilewright.bench.op import geomean

    means = {name: geomean([row for row in results.all_rows if row["format"] == name]) for name in formats}
    results.finish(settle_s=settle)
    print_rows(results.all_rows, as_json)
    say(f"geometric means of the ratios: {means} (above 1: faster than in 16 bits)")


def _three_sizes(text: str) -> tuple[int, int, int]:
    parts = text.strip().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and 0 < int(part) <= 1 << 20 for part in parts):
        raise ValueError(f"--shapes contains {text!r}, wanted ROWSxOUTPUTSxINPUTS such as 64x4096x4096, each at most {1 << 20}")
    m, n, k = map(int, parts)
    return m, n, k


@bench.command("op", hidden=True)
def bench_op(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="Operator, such as matmul, softmax or paged_attention.")],
    dims: Annotated[
        list[str] | None, typer.Argument(help="Dimensions and dtype, such as M=4096 N=4096 K=4096 dtype=bf16.")
    ] = None,
    shapes: Annotated[str | None, typer.Option(help='Several, such as "M=1,N=4096,K=4096;M=64,N=4096,K=4096".')] = None,
    named: Annotated[
        str | None, typer.Option("--set", help="Matrix products: decode, projections, squares or awkward (unaligned sizes).")
    ] = None,
    against: Annotated[
        str, typer.Option(help="Compare with torch, inductor, vendor (the vendor's library) or none.")
    ] = "torch",
    prefer: Annotated[str | None, typer.Option(help="Measure this implementation, not the one chosen by default.")] = None,
    aligned: Annotated[
        bool, typer.Option("--aligned", help="Matrix products: also time the next larger aligned shape.")
    ] = False,
    counters: Annotated[bool, typer.Option("--counters", help="Also collect hardware counters with Nsight Compute.")] = False,
    settle: _Settle = 0.0,
    out: _Out = None,
    resume: _Resume = False,
    as_json: _Json = False,
) -> None:
    """Compare one operator with the implementation it replaces, measured alternately in one process.

    Example: tilewright bench matmul M=64 N=14336 K=4096 --against vendor
    """
    with plain_errors(context):
        from tilewright.bench.dims import find_op, nearest
        from tilewright.bench.op import geomean, rows, shapes_of

        found = find_op(op)
        wanted = shapes_of(found, dims or [], shapes, named)
        if against not in ("torch", "inductor", "vendor", "none"):
            raise typer.BadParameter(f"--against is {against!r}, wanted torch, inductor, vendor or none")
        if aligned and found.name != "linear":
            raise ValueError(f"--aligned is only for linear; got {found.name}")
        names = [impl.name for impl in found.impls]
        if prefer is not None and prefer not in names:
            raise ValueError(f"{found.name} has no implementation {prefer!r}: {nearest(prefer, names)}")
        need_gpu(op)
        from tilewright.bench.results import Results

        results = Results(out, f"{found.name} against {against}", resume=resume)
        done = {row["dims"] for row in results.before}
        wanted = [words for words in wanted if " ".join(words) not in done]
        table = results.keep(rows(found, wanted, against, prefer, say, aligned, settle))
        if counters:
            from tilewright.bench.counters import counters_of

            for row, words in zip(table, wanted, strict=True):
                row["counters"] = counters_of(found.name, words, prefer)
                results.write()
        results.finish(settle_s=settle)
        mean = geomean(results.all_rows)
        print_rows(results.all_rows, as_json)
        if mean is not None:
            say(f"geometric mean of the ratios: {mean} (above 1: ours is faster)")
