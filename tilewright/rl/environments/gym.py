"""The tasks of reasoning-gym (extra [rl]): procedurally generated puzzles with scores from 0 to 1."""

from typing import Any

from tilewright.extras import MissingExtra
from tilewright.rl.environments.base import Task

__all__ = ["ReasoningGym"]

_SIZE = 1_000_000
"""Number of entries in a data set. An entry is generated only when it is used."""


class ReasoningGym:
    """One data set of reasoning-gym, by name, such as "countdown" or "leg_counting". `options` are passed to the data set.

    Raises:
        MissingExtra: reasoning-gym is not installed.
        ValueError: there is no data set of this name, or it does not accept the options.
    """

    def __init__(self, name: str, seed: int = 0, **options: Any) -> None:
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError as error:
            raise MissingExtra(f"these tasks need reasoning-gym: pip install 'tilewright[rl]' ({error})") from None
        if name not in DATASETS:
            raise ValueError(
                f"reasoning-gym has no data set {name!r}; it has {len(DATASETS)} data sets, such as "
                f"{', '.join(sorted(DATASETS)[:5])}"
            )
        try:
            self._data: Any = create_dataset(name, seed=seed, size=_SIZE, **options)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"reasoning-gym's data set {name} does not accept {options}: {error}") from None

    def task(self, seed: int) -> Task:
        """The data set's entry with this number."""
        entry = self._data[seed % _SIZE]
        return Task(prompt=entry["question"], data={"index": seed % _SIZE})

    def score(self, task: Task, answer: str) -> float:
        """The data set's score for the answer, 0 to 1."""
        return float(self._data.score_answer(answer=answer.strip(), entry=self._data[task.data["index"]]))
