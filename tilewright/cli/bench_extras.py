"""`tilewright bench structured` and `bench adapters`: what grammars and LoRA adapters cost the engine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli.bench import bench, print_rows
from tilewright.cli.root import plain_errors, say
from tilewright.extras import require

__all__ = ["bench_adapters", "bench_structured"]

_Shape = Annotated[str, typer.Argument(help="Shape, with random weights: qwen3-0.6b, qwen3-8b, llama-1b ...")]
_Streams = Annotated[int, typer.Option(min=1, max=4096, help="Number of requests at once.")]
_TokensIn = Annotated[int, typer.Option(min=1, max=1 << 16, help="Length of each prompt in tokens.")]
_TokensOut = Annotated[int, typer.Option(min=2, max=1 << 16, help="Length of each answer in tokens.")]
_Runs = Annotated[int, typer.Option(min=1, max=64, help="Number of rounds; the first is not warmed up.")]
_Device = Annotated[str | None, typer.Option(help="Torch device, such as cuda:0 or cpu; default: the first GPU, or the CPU.")]
_Out = Annotated[Path | None, typer.Option(help="JSON file for the rows, with the card, versions, commit and date.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")]


@bench.command("structured")
def bench_structured(
    context: typer.Context,
    shape: _Shape,
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json, or a tekken file of the package mistral-common.")],
    share: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="Share of structured requests; may be given several times; default: 0.2 and 1."),
    ] = None,
    streams: _Streams = 256,
    tokens_in: _TokensIn = 128,
    tokens_out: _TokensOut = 256,
    runs: _Runs = 3,
    device: _Device = None,
    out: _Out = None,
    as_json: _Json = False,
) -> None:
    """Measure how many tokens per second are lost if requests have to follow a JSON schema.

    The same requests run without a grammar and with it, in turns, on one engine with random weights. `of_plain` is the speed
    divided by that of the requests without a grammar in the same round. For steps with masks, the columns with `ms` say where
    the engine's thread spends its time in such a step, and `late` in which share of them the GPU waited for the masks.

    Example: tilewright bench structured qwen3-0.6b --tokenizer tekken_240911.json
    """
    with plain_errors(context):
        require("tilewright bench structured", "tokenizers", "llguidance")
        from tilewright.bench.engine_extras import Sizes, run_structured
        from tilewright.bench.vocabulary import read_tokenizer

        model, sizes = _shape(shape), Sizes(streams=streams, tokens_in=tokens_in, tokens_out=tokens_out)
        found, config = read_tokenizer(tokenizer), _config(sizes, device)
        rows = run_structured(model, found, share or [0.2, 1.0], sizes, runs=runs, config=config, progress=say)
        _print(f"engine with grammars, {shape}, random weights", shape, rows, out, as_json)


@bench.command("adapters")
def bench_adapters(
    context: typer.Context,
    shape: _Shape,
    adapters: Annotated[int, typer.Option(min=1, max=1024, help="Number of adapters that requests use.")] = 64,
    rank: Annotated[int, typer.Option(min=1, max=1024, help="Rank of each adapter.")] = 16,
    streams: _Streams = 256,
    tokens_in: _TokensIn = 128,
    tokens_out: _TokensOut = 256,
    runs: _Runs = 3,
    device: _Device = None,
    out: _Out = None,
    as_json: _Json = False,
) -> None:
    """Measure how many tokens per second are lost if requests use LoRA adapters, many different ones at once.

    The same requests run without adapters and with them, in turns, on one engine with random weights. `of_plain` is the speed
    divided by that of the requests without an adapter in the same round.

    Example: tilewright bench adapters qwen3-8b --adapters 64 --rank 16
    """
    with plain_errors(context):
        from tilewright.bench.engine_extras import Sizes, run_adapters

        model, sizes = _shape(shape), Sizes(streams=streams, tokens_in=tokens_in, tokens_out=tokens_out)
        config = _config(sizes, device, max_adapters=adapters, max_adapter_rank=rank)
        rows = run_adapters(model, adapters, rank, sizes, runs=runs, config=config, progress=say)
        _print(f"engine with adapters, {shape}, random weights", shape, rows, out, as_json)


def _shape(name: str) -> Any:
    from tilewright.models import SHAPES

    if name not in SHAPES:
        raise typer.BadParameter(f"shape is {name!r}, wanted one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _config(sizes: Any, device: str | None, **more: Any) -> Any:
    from tilewright.engine.config import EngineConfig

    longest = sizes.tokens_in + sizes.tokens_out
    return EngineConfig(max_seqs=sizes.streams, max_model_len=longest, device=device, **more)


def _print(what: str, shape: str, rows: Any, out: Path | None, as_json: bool) -> None:
    from tilewright.bench.results import Results

    results = Results(out, what, resume=False)
    results.keep({"shape": shape, **row} for row in rows)
    results.finish()
    print_rows(results.all_rows, as_json)
