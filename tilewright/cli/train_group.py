"""The group `tilewright train`: a word that is none of its commands goes to the command "run", as a config file."""

from typing import Any

import typer
from typer.core import TyperGroup

from tilewright.cli.root import app

__all__ = ["train"]


class _Train(TyperGroup):
    """`train plan`; `train CONFIG.toml` where there is a command "run"."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and "run" in self.commands and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


train = typer.Typer(cls=_Train, no_args_is_help=True, help="Train models, and plan what a training step keeps in memory.")
app.add_typer(train, name="train")


@train.callback()
def _train() -> None:
    """Keeps `train` a group while it has one command."""
