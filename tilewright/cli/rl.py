"""`tilewright rl`: trains a policy by the rewards of an environment, and writes texts for pretraining one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tilewright.cli.root import Progress, app, ends_on_sigterm, plain_errors, say

if TYPE_CHECKING:
    from tilewright.rl.config import RLConfig

__all__ = ["rl", "run", "tasks"]

_SHOWN = (
    "update",
    "reward",
    "exact",
    "eval_exact",
    "length",
    "entropy",
    "kl_after",
    "ratio_off",
    "explained",
    "lost",
    "seconds",
)


class _RL(TyperGroup):
    """`rl CONFIG.toml` is `rl run CONFIG.toml`. `rl --help` is the group's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


rl = typer.Typer(
    cls=_RL,
    no_args_is_help=True,
    help="Reinforcement learning of language models; `rl CONFIG.toml` is short for `rl run CONFIG.toml`.",
)
app.add_typer(rl, name="rl")


@rl.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright rl reversal.toml --log reversal.jsonl\n\n"
    "tilewright rl countdown.toml --out run --samples 2\n\n"
    'A config needs one line, environment = "reversal:digits=4,partial=1"; docs/rl.md lists the others.'
)
def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML config; docs/rl.md lists its fields")],
    out: Annotated[
        Path | None, typer.Option(help="folder for checkpoints, log, samples and the final model; default: that of the config")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="write one line of JSON for each step to this file")] = None,
    updates: Annotated[int | None, typer.Option(help="number of steps; default: that of the config")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the run; default: that of the config")] = None,
    every: Annotated[int, typer.Option(help="print one step in every so many")] = 10,
    samples: Annotated[int, typer.Option(help="print this many samples with each printed step, 0 to 4")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print every step as one line of JSON")] = False,
) -> None:
    """Train a model by rewards: sample answers, score them, update the weights. Prints a line every few steps.

    With an output folder, the same command continues an interrupted run from its last checkpoint.
    """
    with plain_errors(context), ends_on_sigterm():
        from dataclasses import replace

        from tilewright.rl.config import read_config

        if every < 1:
            raise ValueError(f"--every is {every}; wanted 1 or more")
        chosen = read_config(config)
        given = (("updates", updates), ("seed", seed), ("out", None if out is None else str(out)))
        chosen = replace(chosen, **{name: value for name, value in given if value is not None})
        say(f"Config: {json.dumps(chosen.to_json())}")
        exact = chosen.invariant and not chosen.staleness
        promise = "wanted is 0" if exact else "this config does not guarantee 0; invariant = true without staleness does"
        say(f"ratio_off: how far the trainer's probability of a sampled token, divided by the sampler's, is from 1; {promise}")
        from tilewright.rl.loop import Trainer
        from tilewright.rl.run import rows

        with Trainer(chosen) as trainer, (log or Path("/dev/null")).open("w", encoding="utf-8") as file:
            steps: Iterator[dict[str, Any]] = rows(trainer, say) if chosen.out else iter(trainer)
            progress = Progress(say=lambda words: None)  # on a terminal, where each step is written over the one before
            for row in steps:
                print(json.dumps(row), file=file, flush=True)
                progress.end()
                if as_json:
                    print(json.dumps(row), flush=True)
                elif row["update"] % every == 0 or row["update"] in (1, chosen.updates):
                    print("  ".join(f"{name} {row[name]:.4g}" for name in _SHOWN if name in row), flush=True)
                    for prompt, answer, reward in trainer.shown[:samples]:
                        print(f"    {prompt!r} -> {answer!r}  reward {reward:.4g}", flush=True)
                _warn(row, chosen, exact)
                at = f"step {row['update']} of {chosen.updates}"
                progress(f"{at}: reward {row['reward']:.3g}, ratio_off {row['ratio_off']:.2g}, {row['seconds']:.2g} s")
            progress.end()
            if trainer.workers.failures:
                say(f"samples without a reward: {dict(trainer.workers.failures)}; the last error: {trainer.workers.last_error}")


def _warn(row: dict[str, Any], config: "RLConfig", exact: bool) -> None:
    if row["entropy"] < config.entropy_floor:
        say(
            f"warning: step {row['update']}: the policy has collapsed, because the mean -log p of its tokens is "
            f"{row['entropy']:.2g}"
        )
    if row["equal_groups"] == 1.0:
        say(
            f"warning: step {row['update']}: all answers to each prompt have the same reward, so there is nothing to learn from"
        )
    if exact and row["ratio_off"]:
        say(f"warning: step {row['update']}: ratio_off is {row['ratio_off']:.3g}, but this config guarantees 0")
    if 2 * row["empty"] > config.prompts * config.answers:
        say(f"warning: step {row['update']}: {row['empty']} answers are empty, because the policy ends them at once")


@rl.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright rl tasks countdown:numbers=3 --count 200000 --out countdown\n\n"
    "tilewright train run --model countdown/model --init random --data countdown/tasks.jsonl --dtype float32 --out pretrained"
)
def tasks(
    context: typer.Context,
    environments: Annotated[
        list[str], typer.Argument(help="environments that the tasks come from, such as countdown:numbers=3 addition:digits=3")
    ],
    out: Annotated[Path, typer.Option(help="output folder for tasks.jsonl and model/")],
    count: Annotated[int, typer.Option(help="number of texts", min=1, max=100_000_000)] = 100_000,
    layers: Annotated[int, typer.Option(help="number of layers of the model", min=1, max=1024)] = 2,
    hidden: Annotated[int, typer.Option(help="hidden size of the model, a multiple of 16", min=16, max=65536)] = 64,
    seed: Annotated[int, typer.Option(help="seed of the texts and weights", min=0, max=(1 << 20) - 1)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print a summary of the output as JSON")] = False,
) -> None:
    """Write solved tasks as training texts, and a small character-level model with random weights.

    Pretrain the model on the texts with `tilewright train`, then improve it with `tilewright rl`; nothing is downloaded. The
    texts contain none of the tasks that `rl` trains or evaluates on.
    """
    with plain_errors(context):
        from tilewright.rl.config import RLConfig
        from tilewright.rl.tasks import write_tasks

        config = RLConfig(environment=environments[0], layers=layers, hidden=hidden, seed=seed)
        made = write_tasks(config, environments, count, out)
        if as_json:
            print(json.dumps(made))
        else:
            say(f"{out / 'tasks.jsonl'}: {count} texts of at most {made['longest']} characters")
            say(f"{out / 'model'}: {made['parameters']} parameters, {made['vocabulary']} tokens")
