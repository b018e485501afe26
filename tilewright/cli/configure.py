"""`tilewright configure`: finds the best configuration of a service for a model, this machine and an objective."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import Model
from tilewright.cli.root import app, ends_on_sigterm, plain_errors, say
from tilewright.extras import require

__all__ = ["configure"]


def _values(name: str, text: str) -> tuple[str | None, ...]:
    found = tuple(None if part == "none" else part for part in text.split(","))
    if "" in found or len(set(found)) != len(found):
        raise ValueError(f"--{name} is {text!r}, wanted formats separated by commas, such as none,fp8")
    return found


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright configure Qwen/Qwen3-0.6B --slo ttft=200ms,itl=20ms --out serve.toml\n\n"
    "tilewright configure ./my-model --slo e2e=5s --replicas 1,2,4 --quantize none,fp8 --kv-cache none,fp8\n\n"
    "tilewright serve --config serve.toml"
)
def configure(
    context: typer.Context,
    model: Model = "bookworm",
    slo: Annotated[
        str, typer.Option(help="latency limits of a good answer: any of ttft, itl, tpot and e2e")
    ] = "ttft=200ms,itl=20ms",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="length of a prompt in tokens")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="length of an answer in tokens")] = 128,
    replicas: Annotated[str, typer.Option(help="numbers of replicas to try, such as 1,2,4")] = "1",
    quantize: Annotated[str, typer.Option(help="formats of the weights to try, such as none,fp8")] = "none",
    kv_cache: Annotated[str, typer.Option(help="formats of the KV cache to try, such as none,fp8")] = "none",
    points: Annotated[int, typer.Option(min=1, max=100, help="most configurations to measure")] = 15,
    seconds: Annotated[float, typer.Option(min=1.0, help="seconds for each measurement")] = 20.0,
    device: Annotated[
        str | None,
        typer.Option(help="torch device, such as cuda:0 or cpu; default: the first GPU, or the CPU if there is none"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="write the best configuration to this TOML file, for `tilewright serve --config`")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Find the best server configuration for a model and latency limits.

    The speed of every configuration is predicted from bytes and FLOPs; the most promising ones are then served and measured.
    """
    with plain_errors(context), ends_on_sigterm():
        require("tilewright configure", "aiohttp", "fastapi", "uvicorn", "tokenizers")
        from tilewright.bench.configure.predict import Workload
        from tilewright.bench.configure.run import Asked, measured_by_load, toml
        from tilewright.bench.configure.run import configure as run
        from tilewright.bench.load.slo import Slo
        from tilewright.engine.config import EngineConfig

        numbers = replicas.split(",")
        if not all(number.isdecimal() and 1 <= int(number) <= 64 for number in numbers):
            raise ValueError(f"--replicas is {replicas!r}, wanted numbers from 1 to 64, separated by commas")
        asked = Asked(
            model=model,
            slo=Slo.parse(slo),
            workload=Workload(prompt=prompt_tokens, output=output_tokens),
            replicas=tuple(map(int, numbers)),
            quantize=_values("quantize", quantize),
            kv_cache=_values("kv-cache", kv_cache),
            points=points,
            seconds=seconds,
        )
        for weights in asked.quantize:
            for cache in asked.kv_cache:
                EngineConfig(quantize=weights, kv_cache=cache)  # says which formats there are
        found, why = run(asked, measured_by_load(asked, device), say=say)
        text = toml(model, found.point, why)
        if out is not None:
            out.write_text(text, encoding="utf-8")
            say(f"Saved to {out}; use it: tilewright serve --config {out}")
        if as_json:
            measured = [{**vars(one.point), "goodput": one.goodput, "predicted": one.predicted} for one in found.measured]
            print(json.dumps({"best": vars(found.point), "expected": found.expected, "measured": measured, "why": why}))
        else:
            print(text, end="")
