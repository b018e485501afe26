"""`tilewright train plan`: what to keep for the backward pass, and what to compute again."""

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
        str, typer.Argument(help="a shape (qwen3-0.6b, qwen3-8b, llama-1b, llama-8b), bookworm, or a model folder")
    ],
    tokens: Annotated[int, typer.Option(help="tokens of one micro-batch")] = 4096,
    length: Annotated[int, typer.Option(help="tokens of a document in it")] = 4096,
    card: Annotated[str, typer.Option(help="whose roofline gives the times; it need not be here")] = "h100",
    budget: Annotated[float | None, typer.Option(help="GiB for activations: say which tensors are kept, and why")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Memory of activations against time of recomputation, for ten budgets or for one, without running anything.

    Times are rooflines of the card, so they are least times; bytes are what autograd really holds. Weights, gradients and the
    optimizer's state come on top.
    """
    with plain_errors(context):
        import torch

        from tilewright.hw.device import device_named
        from tilewright.train.recompute import decoder_profile, full, none, pareto, planned, reasons, selective

        config = _config(model)
        say(f"{model}: {config.num_hidden_layers} layers, {tokens} tokens")
        found = decoder_profile(config, tokens=tokens, length=length, dtype=torch.bfloat16, card=device_named(card))
        usual = {"keep all": none(found), "full": full(found), "selective": selective(found)}
        if budget is None:
            rows = {f"budget {bytes / _GIB:.2f}": plan for bytes, plan in pareto(found)}
            why = []
        else:
            plan = planned(found, round(budget * _GIB))
            rows, why = {f"budget {budget:.2f}": plan}, reasons(found, plan)
        if as_json:
            plans = [_row(name, plan) for name, plan in (usual | rows).items()]
            print(
                json.dumps(
                    {"model": model, "tokens": tokens, "card": card, "plans": plans, "tensors": [asdict(r) for r in why]}
                )
            )
        else:
            _print(usual | rows, why)


def _config(name: str) -> "ModelConfig":
    from tilewright.models import SHAPES, load_config, resolve

    return SHAPES[name] if name in SHAPES else load_config(resolve(Path(name) if Path(name).is_dir() else name))


def _row(name: str, plan: "Plan") -> dict[str, Any]:
    kept = [None if choice.kept is None else sorted(choice.kept) for choice in plan.choices]
    figures = {key: value for key, value in asdict(plan).items() if key != "choices"}
    return {"name": name, **figures, "kept": kept}


def _print(plans: dict[str, "Plan"], why: "list[Reason]") -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("plan, GiB", "peak GiB", "held GiB", "recomputing ms", "step ms", "slower")
    for name, plan in plans.items():
        slower = plan.recompute_seconds / (plan.step_seconds - plan.recompute_seconds)
        sizes = (f"{size / _GIB:.3f}" for size in (plan.peak_bytes, plan.held_bytes))
        table.add_row(
            name, *sizes, f"{plan.recompute_seconds * 1e3:.2f}", f"{plan.step_seconds * 1e3:.2f}", f"{slower:.1%}"
        )  # fmt: skip
    console.print(table)
    if why:
        tensors = Table("result of", "blocks", "MiB each", "us each", "kept in", "why")
        for reason in why:
            blocks = f"{reason.blocks[0]} .. {reason.blocks[-1]}" if len(reason.blocks) > 1 else str(reason.blocks[0])
            figures = f"{reason.bytes / 2**20:.2f}", f"{reason.seconds * 1e6:.1f}", str(reason.kept_in)
            tensors.add_row(reason.name, blocks, *figures, reason.why)
        console.print(tensors)
