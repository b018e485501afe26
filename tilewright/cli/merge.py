"""`tilewright merge`: a base and its low-rank adapter become one model folder."""

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
    base: Annotated[str, typer.Argument(help="the model: the embedded one's name, a folder, or a name on the hub")],
    adapter: Annotated[Path, typer.Argument(help="folder of its adapter, as tilewright train or peft saves it")],
    out: Annotated[Path, typer.Option(help="folder of the merged model; new or empty")],
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32 of the weights; default: the base's")] = None,
) -> None:
    """Add a LoRA adapter to the weights of its base, and save the model.

    The product of the adapter's matrices is float32, and its sum with the weights is rounded once, as peft does it.
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
            raise FileExistsError(f"{out} has files; give a new or an empty folder")
        model = load_model(base, device="cpu", dtype=None if dtype is None else kinds[dtype])
        merge(model, read_adapter(adapter, targets_of(model)))
        save_model(model, out, base)
        say(f"saved {out}")
