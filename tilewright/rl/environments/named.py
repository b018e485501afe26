"""Environments by name, with parameters: "reversal:digits=4", "gym:countdown", "my_rewards.py:Rewards"."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.rl.environments.base import Environment
from tilewright.rl.environments.gym import ReasoningGym
from tilewright.rl.environments.puzzles import Addition, Countdown, Reversal, Sorting

__all__ = ["NAMED", "environment"]

NAMED: dict[str, Callable[..., Environment]] = {
    "addition": Addition,
    "countdown": Countdown,
    "reversal": Reversal,
    "sorting": Sorting,
}


def environment(spec: str) -> Environment:
    """The environment named by `spec`: a name in `NAMED` with `name:key=integer,...`; `gym:NAME`; or FILE.py:NAME.

    FILE.py is executed. NAME in it is a class, which is called without arguments, or an environment object.

    Raises:
        ValueError: there is no such environment, file or name, or a parameter is not an integer.
    """
    name, _, rest = spec.partition(":")
    if name == "gym":
        return ReasoningGym(rest)
    if name.endswith(".py"):
        return _from_file(Path(name), rest)
    if name not in NAMED:
        raise ValueError(f"there is no environment {name!r}; wanted one of {', '.join(NAMED)}, gym:NAME or FILE.py:NAME")
    try:
        options = {key: int(value) for key, _, value in (part.partition("=") for part in rest.split(",") if part)}
        return NAMED[name](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"environment {spec!r}: {error}; wanted NAME or NAME:KEY=INTEGER,...") from None


def _from_file(path: Path, name: str) -> Environment:
    if not path.is_file():
        raise ValueError(f"the environment's file {path} does not exist")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    made: Any = getattr(module, name, None)
    made = made() if isinstance(made, type) else made
    if not (hasattr(made, "task") and hasattr(made, "score")):
        raise ValueError(
            f"{path} defines no environment {name!r}; wanted a class or an object with task(seed) and score(task, answer)"
        )
    return made
