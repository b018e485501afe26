"""`tilewright warmup`: compiles all kernels for serving a model, on a machine without a GPU."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli.options import options
from tilewright.cli.root import Progress, app, plain_errors, say
from tilewright.engine.config import EngineConfig

__all__ = ["warmup"]

_WITHOUT = {
    "adapters",
    "model",
    "device",
    "host_cache_bytes",
    "kv_cache_bytes",
    "memory_fraction",
    "prefill_chunk",
    "max_waiting",
    "prefix_cache",
    "prompt_graphs",
    "bundle",
    "draft",
    "draft_tokens",
    "strict",
    "tp",
    "pp",
    "slices",
}


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright warmup llama-1b --arch 90 --out bundle\n\n"
    "tilewright warmup ./my-model --arch 80 --out bundle --max-seqs 64\n\n"
    "tilewright serve ./my-model --max-seqs 64 --bundle bundle"
)
@options(EngineConfig, into="engine", panel="Engine", without=_WITHOUT)
def warmup(
    context: typer.Context,
    engine: dict[str, Any],
    model: Annotated[
        str,
        typer.Argument(
            help="model folder, its config.json, a model name as for `serve`, or a shape such as llama-1b or qwen3-8b"
        ),
    ],
    out: Annotated[Path, typer.Option(help="new or empty folder for the bundle")],
    arch: Annotated[int, typer.Option(help="GPU architecture: 80 (A100), 90 (H100) or 100 (B200)")] = 90,
    card: Annotated[
        str | None, typer.Option(help="GPU of that architecture, such as h200; default: the usual one (a100, h100 or b200)")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="number of kernels to compile at a time; default: the number of processor cores")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Compile a model's kernels into a bundle, without a GPU. A server started with --bundle then compiles nothing.

    Give the same engine options as for the server, because they decide which kernels are needed.
    """
    with plain_errors(context):
        EngineConfig(**engine)  # raises for wrong options before torch is imported
        started_s = time.perf_counter()
        from tilewright.engine.loading import make_bundle
        from tilewright.hw.device import CARD_OF_ARCH, device_named

        if arch not in CARD_OF_ARCH:
            raise ValueError(f"--arch is {arch}, wanted one of {', '.join(map(str, CARD_OF_ARCH))}")
        on = CARD_OF_ARCH[arch] if card is None else device_named(card)
        if on.arch != arch:
            raise ValueError(f"--card {card} is sm_{on.arch}, but --arch is {arch}; leave one of them out or make them match")
        config = _config(model)
        progress = Progress()
        try:
            made = make_bundle(
                out, config, EngineConfig(**engine), card=on, jobs=jobs or len(os.sched_getaffinity(0)), progress=progress
            )
        finally:
            progress.end()
        seconds = time.perf_counter() - started_s
        if as_json:
            facts = {"kernels": made.kernels, "toolchain": dict(made.toolchain), "use": dict(made.use)}
            print(json.dumps({"out": str(out), "seconds": round(seconds, 1), **facts}))
            return
        say(f"{len(made.kernels)} kernels for {on.name} in {seconds:.1f} s; use them: tilewright serve ... --bundle {out}")


def _config(model: str) -> Any:
    """The config of a shape, of a config.json, or of a model."""
    from tilewright.models import SHAPES, load_config, resolve

    if model in SHAPES:
        # A shape is for measurements with random weights, which are bfloat16.
        import torch

        return replace(SHAPES[model], dtype=torch.bfloat16)
    path = Path(model)
    return load_config(path.parent if path.name == "config.json" and path.is_file() else resolve(model))
