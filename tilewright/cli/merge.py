"""`tilewright merge`: merges a base model and its LoRA adapter into one model folder."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.root import app, plain_errors, say

__all__ = ["merge"]


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright merge bookworm run/adapter --out merged\n\n"
    "tilewright merge Qwen/Qwen3-0.6B ./adapter --out merged --dtype float32"
)
def merge(
    context: typer.Context,
    base: Annotated[
        str, typer.Argument(help="base model: bookworm (the embedded model), a model folder, or a name on the Hugging Face hub")
    ],
    adapter: Annotated[Path, typer.Argument(help="folder of the adapter, saved by `tilewright train` or peft")],
    out: Annotated[Path, typer.Option(help="new or empty folder for the merged model")],
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the merged weights: bfloat16, float16 or float32; default: that of the base")
    ] = None,
) -> None:
    """Add a LoRA adapter to the weights of its base model, and save the result as a model folder.

    The product of the adapter's matrices is computed in float32, and the sum with the weights is rounded once, as in peft.
    """
    with plain_errors(context):
        say(f"Loading {base} ...")
        import torch

        from tilewright.models import load_model, save_model
        from tilewright.models.adapters import merge, read_adapter, targets_of

        kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        if dtype is not None and dtype not in kinds:
            raise ValueError(f"dtype is {dtype!r}, wanted one of {', '.join(kinds)}")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError(f"{out} is not empty; give a new or an empty folder")
        model = load_model(base, device="cpu", dtype=None if dtype is None else kinds[dtype])
        merge(model, read_adapter(adapter, targets_of(model)))
        save_model(model, out, base)
        say(f"saved {out}")
