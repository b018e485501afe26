"""`tilewright rl`: improve a policy by the rewards of an environment."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.root import app, plain_errors, say

__all__ = ["rl"]

_SHOWN = ("update", "reward", "exact", "length", "entropy", "kl_after", "ratio_off", "lost", "seconds")


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright rl reversal.toml --log reversal.jsonl\n\n"
    'A config needs one line, environment = "reversal:digits=4,partial=1"; docs/rl.md lists the others.'
)
def rl(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML; docs/rl.md lists its fields")],
    log: Annotated[Path | None, typer.Option(help="write the numbers of each step to this file, a line of JSON a step")] = None,
    updates: Annotated[int | None, typer.Option(help="steps; default: the config's")] = None,
    seed: Annotated[int | None, typer.Option(help="default: the config's")] = None,
    every: Annotated[int, typer.Option(help="print each so many-th step")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print each step as a line of JSON")] = False,
) -> None:
    """Sample answers, score them, learn; sampler and trainer are one model in one process. Prints a row every few steps."""
    with plain_errors(context):
        from dataclasses import replace

        from tilewright.rl.config import read_config

        if every < 1:
            raise ValueError(f"--every is {every}; wanted 1 or more")
        chosen = read_config(config)
        chosen = replace(chosen, **{k: v for k, v in (("updates", updates), ("seed", seed)) if v is not None})
        say(f"Config: {json.dumps(chosen.to_json())}")
        say("On a CPU the sampler's and the trainer's probabilities differ by rounding: ratio_off is how far from 1.")
        from tilewright.rl.loop import Trainer

        with Trainer(chosen) as trainer, (log or Path("/dev/null")).open("w", encoding="utf-8") as file:
            for row in trainer:
                print(json.dumps(row), file=file, flush=True)
                if as_json:
                    print(json.dumps(row), flush=True)
                elif row["update"] % every == 0 or row["update"] in (1, chosen.updates):
                    print("  ".join(f"{name} {row[name]:.4g}" for name in _SHOWN), flush=True)
                if row["entropy"] < chosen.entropy_floor:
                    say(f"warning: step {row['update']}: the policy has collapsed: its tokens have -log p {row['entropy']:.2g}")
                if row["equal_groups"] == 1.0:
                    say(f"warning: step {row['update']}: all answers to each prompt have one reward: nothing to learn from")
            if trainer.workers.failures:
                say(f"samples without a reward: {dict(trainer.workers.failures)}; the last error: {trainer.workers.last_error}")
