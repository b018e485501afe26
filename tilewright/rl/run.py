"""A run in a folder: checkpoints, a log, samples, and at the end the policy as a model folder.

    OUT/config.toml       the config
    OUT/log.jsonl         one line per step
    OUT/samples.jsonl     a few samples of each step
    OUT/step-00000050/    a checkpoint, as written by `train.checkpoint`
    OUT/model/            the policy with its tokenizer, for `tilewright serve`

Tasks, samples and the order of updates depend only on the seed and the step. So a run that was killed and continues from its
last checkpoint gives bitwise the same numbers as a run without interruption, on one device.
"""

import json
from collections.abc import Callable, Generator
from dataclasses import fields
from pathlib import Path
from typing import Any

from tilewright.models import save_model
from tilewright.rl.config import RLConfig, read_config
from tilewright.rl.loop import Trainer
from tilewright.train.checkpoint import Checkpoints, load
from tilewright.train.log import Log

__all__ = ["rows", "to_toml"]

_MAY_CHANGE = (
    "updates",
    "out",
    "save_every",
    "keep",
    "tensorboard",
    "reward_workers",
    "eval_every",
    "eval_tasks",
    "device",
    "moved_every",
    "handover",
)
"""Fields that may differ when a run is continued, because no update depends on them."""


def rows(trainer: Trainer, say: Callable[[str], None] = print) -> Generator[dict[str, Any], None, None]:
    """Run the steps of a run in `config.out`, from its last checkpoint if there is one. Yields a dict of statistics for each
    step.

    Raises:
        OSError: files cannot be read or written.
        ValueError: the checkpoint is damaged, or belongs to another run.
    """
    config = trainer.config
    folder = Path(config.out)
    checkpoints = Checkpoints(folder, config.keep, asynchronous=True)
    if _resumed(trainer, checkpoints):
        say(f"continuing after step {trainer.update}")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    log = Log(folder, trainer.update, config.tensorboard)
    try:
        for row in trainer:
            log({"step": row["update"], **row})
            _show(folder / "samples.jsonl", trainer)
            if trainer.update % config.save_every == 0 or trainer.update == config.updates:
                _warn(checkpoints.save(trainer.update, trainer.learner.tensors(), trainer.state(), to_toml(config)), say)
            _warn(checkpoints.poll(), say)
            yield row
        _warn(checkpoints.finish(), say)
        if not checkpoints.has(trainer.update):
            raise OSError(f"the last checkpoint, of step {trainer.update}, could not be written: the warning above says why")
    finally:
        checkpoints.finish()
        log.close()
    save_model(trainer.model, folder / "model")
    trainer.text.save(folder / "model")
    say(f"saved {folder / 'model'}")


def to_toml(config: RLConfig) -> str:
    """The config as a file that `read_config` can read. Strings are written as in JSON, which is valid TOML."""
    return "".join(f"{field.name} = {json.dumps(getattr(config, field.name))}\n" for field in fields(RLConfig))


def _resumed(trainer: Trainer, checkpoints: Checkpoints) -> bool:
    found = checkpoints.latest()
    if found is None:
        return False
    before = read_config(found / "config.toml")
    names = [field.name for field in fields(RLConfig) if field.name not in _MAY_CHANGE]
    changed = [
        f"{name} was {getattr(before, name)!r}" for name in names if getattr(before, name) != getattr(trainer.config, name)
    ]
    if changed:
        raise ValueError(
            f"{found} belongs to a run with other settings: {'; '.join(changed)}. Give the same values, or set out to "
            "another folder"
        )
    tensors, state = load(found, trainer.learner.tensors())
    trainer.learner.load(tensors)
    trainer.load_state(state)
    return True


def _show(path: Path, trainer: Trainer) -> None:
    with path.open("a", encoding="utf-8") as file:
        for prompt, answer, reward in trainer.shown:
            print(json.dumps({"update": trainer.update, "prompt": prompt, "answer": answer, "reward": reward}), file=file)


def _warn(failure: str | None, say: Callable[[str], None]) -> None:
    if failure is not None:
        say(f"warning: {failure}")
