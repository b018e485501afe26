"""`tilewright quantize`: writes a model with 8-bit or 4-bit weights as a folder for all other commands."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli.options import Model
from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say
from tilewright.engine.config import QUANTIZE

__all__ = ["quantize"]

_PROMPT_TOKENS = 512
_MOST_PROMPTS = 32


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright quantize Qwen/Qwen3-8B --format int8 --out qwen3-8b-int8\n\n"
    "tilewright quantize ./my-model --format int4 --out my-model-int4 --calibrate some-text.txt\n\n"
    'tilewright quantize ./my-model --format fp8 --out out --skip lm_head --skip "blocks.0.*"\n\n'
    "tilewright serve qwen3-8b-int8"
)
def quantize(
    context: typer.Context,
    model: Model,
    format: Annotated[str, typer.Option(help=f"format: {', '.join(QUANTIZE)}; docs/quantization.md explains them")],
    out: Annotated[Path, typer.Option(help="new or empty folder for the quantised model")],
    skip: Annotated[
        list[str] | None, typer.Option(help="layer that is not quantised; may be given several times; default: lm_head")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="calibration text: the report shows errors on it, and int4 weights are fitted to it")
    ] = None,
    migrate: Annotated[
        float | None,
        typer.Option(
            help="int8 and fp8 with --calibrate: strength with which outliers of the activations are moved into "
            "the weights; 0.5 is usual"
        ),
    ] = None,
    activation: Annotated[
        str,
        typer.Option(
            help="scales of the activations: dynamic (computed in each call), or with --calibrate one for all tokens: "
            "static (int8, fp8) or static-zero (int8, with a zero point)"
        ),
    ] = "dynamic",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: the first GPU, or the CPU if there is none")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON instead of a table")] = False,
) -> None:
    """Quantise a model's linear layers and save it as a model folder. Prints one row for each layer."""
    with plain_errors(context), ends_on_sigterm():
        if format not in QUANTIZE:
            raise ValueError(f"--format is {format!r}, wanted one of {', '.join(QUANTIZE)}")
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"--out {out} is not empty; give a new or an empty folder")
        say(f"Loading {model} ...")
        import torch

        from tilewright.hw.device import default_device
        from tilewright.models import load_model, save_quantized
        from tilewright.quant import quantize as quantize_model

        progress = Progress()
        try:
            loaded = load_model(
                model,
                device=default_device() if device is None else torch.device(device),
                progress=lambda done, total: progress(f"loading weights {done:,}/{total:,}"),
            )
        finally:
            progress.end()
        prompts = None if calibrate is None else _prompts(model, loaded, calibrate.read_text(encoding="utf-8"))
        stay = ("lm_head",) if skip is None else skip
        report = quantize_model(loaded, format, stay, prompts, migrate=migrate, activation=activation)
        save_quantized(loaded, out, model)
        print(json.dumps(report.to_json()) if as_json else report)
        say(f"Saved to {out}; use it: tilewright serve {out}")


def _prompts(name: str, model: Any, text: str) -> list[Any]:
    """Pieces of a text, taken at equal distances, as arguments of the model."""
    from tilewright.engine.tokenizer import Tokenizer
    from tilewright.models import prompt_inputs, resolve

    ids = Tokenizer.load(resolve(name)).encode(text, add_special=False)
    length = min(_PROMPT_TOKENS, model.config.max_position_embeddings)
    pieces = [ids[first : first + length] for first in range(0, len(ids), length)]
    return [prompt_inputs(model, piece) for piece in pieces[:: -(-len(pieces) // _MOST_PROMPTS) or 1]]
