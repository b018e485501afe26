"""Writes solved tasks as texts for pretraining, and a small model folder with a tokenizer of single characters."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.models import save_model
from tilewright.rl.characters import Characters
from tilewright.rl.config import RLConfig
from tilewright.rl.environments.base import Solved
from tilewright.rl.environments.named import environment
from tilewright.rl.policies import small_config, small_model
from tilewright.rl.text import Text

__all__ = ["solved_texts", "write_tasks"]

_FIRST = 1 << 41
"""First seed for these texts. Lower seeds are for training by rewards and for measurements."""


def solved_texts(specs: list[str], count: int, seed: int) -> Iterator[str]:
    """`count` prompts, each followed by its solution. The environments take turns.

    Raises:
        ValueError: there is no such environment, or it does not know solutions.
    """
    made = [(spec, environment(spec)) for spec in specs]
    for index in range(count):
        spec, chosen = made[index % len(made)]
        if not isinstance(chosen, Solved):
            raise ValueError(f"{spec} has no solution(task), which is needed to make texts from it")
        task = chosen.task(_FIRST + (seed << 32) + index)
        yield task.prompt + chosen.solution(task)


def write_tasks(config: RLConfig, specs: list[str], count: int, folder: Path) -> dict[str, Any]:
    """Write FOLDER/tasks.jsonl, and FOLDER/model with random weights and a tokenizer of single characters. Returns a summary.

    Raises:
        MissingExtra: `tokenizers` is not installed.
        ValueError: as `solved_texts`; or a text contains a character that is not in the config's alphabet.
    """
    text: Text = Characters(config.alphabet)
    folder.mkdir(parents=True, exist_ok=True)
    longest = 0
    with (folder / "tasks.jsonl").open("w", encoding="utf-8") as file:
        for line in solved_texts(specs, count, config.seed):
            longest = max(longest, len(text.prompt(line)))
            print(json.dumps({"text": line}), file=file)
    model = small_model(replace(config, device="cpu", dtype="float32"))
    save_model(model, folder / "model")
    text.save(folder / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"texts": count, "longest": longest, "vocabulary": small_config(config).vocab_size, "parameters": parameters}
