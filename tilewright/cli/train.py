"""`tilewright train CONFIG.toml`, `tilewright train run`: trains a model, by a config file and options that override it."""

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from tilewright.cli.options import options
from tilewright.cli.root import ends_on_sigterm, plain_errors, say
from tilewright.cli.train_group import train
from tilewright.hw.env import launched
from tilewright.train.config import TrainConfig, merged, read_toml, to_toml

__all__ = ["run"]


def _given() -> type:
    """A dataclass with the fields of `TrainConfig`. A field that is not given stays unset, so that the file's value counts."""
    made = []
    for one in dataclasses.fields(TrainConfig):
        listed = {
            "data": list[str] | None,
            "weights": list[float] | None,
            "lora_targets": list[str] | None,
            "parallel": str | None,
        }
        default = "" if one.default in (None, (), "") else f"; default: {one.default}"
        help = one.metadata["help"] + (default if "default" not in one.metadata["help"] else "")
        own: Any = one.type
        kind: Any = listed.get(one.name, own | None)
        made.append((one.name, kind, dataclasses.field(default=None, metadata={"help": help})))
    return dataclasses.make_dataclass("TrainOptions", made)


@train.command(
    "run",
    epilog="[b]Examples[/b]\n\n"
    "tilewright train books.toml\n\n"
    "tilewright train books.toml --steps 2000 --lr 1e-3 --out second-run\n\n"
    "tilewright train run --model Qwen/Qwen3-0.6B --data conversations.jsonl --chat --steps 500 --lr 1e-5\n\n"
    "tilewright train run --model bookworm --init random --data books.jsonl.xz --dtype float32",
)
@options(_given(), into="values")
def run(
    context: typer.Context,
    values: dict[str, Any],
    config: Annotated[
        Path | None, typer.Argument(help="TOML file; its fields are named like the options, such as row_tokens = 1024")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result of the run as JSON")] = False,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="do not train; print the commands that start the run on this many machines"),
    ] = None,
) -> None:
    """Pretrain a model on texts, or fine-tune it on texts, conversations or preference pairs.

    The folder --out gets checkpoints, log.jsonl with a line for each update, and at the end model/, a folder that all other
    commands accept. The same command continues an interrupted run from its last checkpoint.
    """
    with plain_errors(context), ends_on_sigterm():
        over = {name: value for name, value in values.items() if value not in (None, [])}
        resolved = merged({} if config is None else read_toml(config), over)
        say("Loading ...")
        from tilewright.train.main import tokenizer_folder
        from tilewright.train.main import train as train_model

        if nodes is not None:
            print(_on_nodes(resolved, nodes))
            return
        if resolved.parallel.ranks > 1 and launched() is None:
            _start_ranks(resolved, as_json)
            return
        folder = tokenizer_folder(resolved)
        try:
            summary = train_model(resolved, render=_render(folder, resolved), sampler=_sampler(folder, resolved), say=say)
        except FloatingPointError as error:
            raise ValueError(str(error)) from error
        place = launched()
        if as_json and (place is None or place.rank == 0):
            print(json.dumps(dataclasses.asdict(summary)))


def _on_nodes(config: TrainConfig, nodes: int) -> str:
    """The commands that start the run on several machines. Checks the plan first."""
    from tilewright.train.ranks import check_plan
    from tilewright.train.setup import model_config

    check_plan(config, model_config(config))
    each, rest = divmod(config.parallel.ranks, nodes)
    if rest:
        raise ValueError(f"nodes is {nodes}, wanted a divisor of the number of ranks, {config.parallel.ranks}")
    options = f"--nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint FIRST:29400 --rdzv-id run"
    return (
        "# run this on every machine; FIRST: the host name of one machine, out: a folder that all machines share\n"
        f"torchrun {options} -m tilewright.cli train run run.toml\n# run.toml:\n{to_toml(config).rstrip()}"
    )


def _start_ranks(config: TrainConfig, as_json: bool) -> None:
    """Start the ranks of a run on this machine, and wait for them."""
    from tilewright.models import empty_model
    from tilewright.parallel.launch import run_ranks
    from tilewright.train.ranks import check_plan, plan_lines
    from tilewright.train.setup import device_for, dtype_of, model_config

    shape = model_config(config)
    check_plan(config, shape)
    plan_lines(config, empty_model(shape, device="meta", dtype=dtype_of(config)), device_for(config))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "tilewright.cli", "train", "run", str(path), *(["--json"] if as_json else [])]
        run_ranks(command, config.parallel.ranks, say)


def _sampler(folder: Path | None, config: TrainConfig) -> Callable[[Any], Callable[[], str]] | None:
    if folder is None or not config.sample_every:
        return None
    from tilewright.engine.live import live_sampler
    from tilewright.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    return lambda model: live_sampler(model, tokenizer, config.sample_prompt, config.sample_tokens)


def _render(folder: Path | None, config: TrainConfig) -> Callable[[list[dict[str, Any]]], Any] | None:
    if folder is None or not (config.chat or config.loss != "next-token"):
        return None
    from tilewright.engine.chat_runs import chat_runs
    from tilewright.engine.tokenizer import Tokenizer

    return partial(chat_runs, Tokenizer.load(folder))
