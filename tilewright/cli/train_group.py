"""The command group `tilewright train`: a config file or options without a command are passed to the command "run"."""

from typing import Any

import typer
from typer.core import TyperGroup

from tilewright.cli.root import app

__all__ = ["train"]


class _Train(TyperGroup):
    """`train plan`; `train CONFIG.toml` and `train --model NAME` are `train run ...`. `train --help` is the group's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # This runs before the group reads its own options; its only one is --help.
        if args and "run" in self.commands and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


train = typer.Typer(
    cls=_Train,
    no_args_is_help=True,
    help="Train models, and plan the memory of a training step; `train CONFIG.toml` is short for `train run CONFIG.toml`.",
)
app.add_typer(train, name="train")


@train.callback()
def _train() -> None:
    """Makes Typer treat `train` as a group even if it has only one command."""
