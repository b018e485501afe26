"""`tilewright train plan`: plans which activations to keep for the backward pass, and which to recompute."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.root import plain_errors, say
from tilewright.cli.train_group import train

if TYPE_CHECKING:
    from tilewright.models import ModelConfig
    from tilewright.train.recompute import Plan, Reason

__all__ = ["plan_command"]

_GIB = 1 << 30


@train.command(
    "plan",
    epilog="[b]Examples[/b]\n\n"
    "tilewright train plan qwen3-0.6b --tokens 16384 --length 4096 --card h200\n\n"
    "tilewright train plan ./my-model --tokens 8192 --budget 6.5 --card h100 --json",
)
def plan_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="shape (qwen3-0.6b, qwen3-8b, llama-1b or llama-8b), bookworm, or a model folder")
    ],
    tokens: Annotated[int, typer.Option(help="number of tokens in one micro-batch")] = 4096,
    length: Annotated[int, typer.Option(help="length of each document in it, in tokens")] = 4096,
    card: Annotated[
        str, typer.Option(help="GPU for which times are estimated by its roofline; it need not be in this machine")
    ] = "h100",
    budget: Annotated[
        float | None,
        typer.Option(help="memory for activations, in GiB: show which tensors to keep, and why; default: compare ten budgets"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Plan which activations to keep and which to recompute in the backward pass, for one memory budget or for ten.

    Nothing is run. Times are rooflines of the GPU, that is, lower bounds. Bytes are those that autograd holds; weights,
    gradients and the optimizer's state come on top.
    """
    with plain_errors(context):
        import torch

        from tilewright.hw.device import device_named
        from tilewright.train.recompute import decoder_profile, full, none, pareto, planned, reasons, selective

        config = _config(model)
        say(f"{model}: {config.num_hidden_layers} layers, {tokens} tokens")
        found = decoder_profile(config, tokens=tokens, length=length, dtype=torch.bfloat16, card=device_named(card))
        rows = [("keep all", none(found)), ("full", full(found)), ("selective", selective(found))]
        why: list[Reason] = []
        if budget is None:
            rows += [(f"budget {size / _GIB:.3f}", plan) for size, plan in pareto(found)]
        else:
            plan = planned(found, round(budget * _GIB))
            rows.append((f"budget {budget:.3f}", plan))
            why = reasons(found, plan)
        if as_json:
            plans = [_row(name, plan) for name, plan in rows]
            print(
                json.dumps(
                    {"model": model, "tokens": tokens, "card": card, "plans": plans, "tensors": [asdict(r) for r in why]}
                )
            )
        else:
            _print(rows, why)


def _config(name: str) -> "ModelConfig":
    from tilewright.models import SHAPES, load_config, resolve

    return SHAPES[name] if name in SHAPES else load_config(resolve(Path(name) if Path(name).is_dir() else name))


def _row(name: str, plan: "Plan") -> dict[str, Any]:
    kept = [None if choice.kept is None else sorted(choice.kept) for choice in plan.choices]
    figures = {key: value for key, value in asdict(plan).items() if key != "choices"}
    return {"name": name, **figures, "kept": kept}


def _print(rows: "list[tuple[str, Plan]]", why: "list[Reason]") -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("plan, GiB", "peak GiB", "held GiB", "recomputing ms", "step ms", "slower")
    for name, plan in rows:
        slower = plan.recompute_seconds / (plan.step_seconds - plan.recompute_seconds)
        sizes = (f"{size / _GIB:.3f}" for size in (plan.peak_bytes, plan.held_bytes))
        table.add_row(
            name, *sizes, f"{plan.recompute_seconds * 1e3:.2f}", f"{plan.step_seconds * 1e3:.2f}", f"{slower:.1%}"
        )  # fmt: skip
    console.print(table)
    if why:
        tensors = Table("result of", "blocks", "MiB each", "us each", "kept in", "why")
        for reason in why:
            blocks = " .. ".join(str(i) for i in sorted({min(reason.blocks), max(reason.blocks)}))
            figures = f"{reason.bytes / 2**20:.2f}", f"{reason.seconds * 1e6:.1f}", str(reason.kept_in)
            tensors.add_row(reason.name, blocks, *figures, reason.why)
        console.print(tensors)
