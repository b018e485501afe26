"""The interface of an environment: it makes tasks from seeds and scores answers; with several turns, it also replies.

Values are plain JSON, so that a score can be computed in another process (`workers.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

__all__ = ["Environment", "Function", "MultiTurn", "Solved", "Task"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, and the data for scoring an answer to it: JSON values by name."""

    prompt: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Provides tasks with one answer each, and scores the answers."""

    def task(self, seed: int) -> Task:
        """The task for this seed. The same seed always gives the same task."""
        ...

    def score(self, task: Task, answer: str) -> float:
        """The reward for an answer. With several turns: the reward for the last answer of the conversation."""
        ...


@runtime_checkable
class MultiTurn(Protocol):
    """The additional method of an environment with several turns. Tools and other speakers are implemented by its replies."""

    def reply(self, task: Task, answers: list[str]) -> str | None:
        """The reply to the policy's answers so far; None ends the conversation."""
        ...


@runtime_checkable
class Solved(Protocol):
    """An environment that also knows a right answer to each task, so that models can be pretrained on solved tasks."""

    def task(self, seed: int) -> Task:
        """The task for this seed. The same seed always gives the same task."""
        ...

    def solution(self, task: Task) -> str:
        """An answer that receives the full reward."""
        ...


@dataclass(frozen=True, kw_only=True)
class Function:
    """An environment made from a list of tasks and a function (task, answer) -> reward."""

    tasks: tuple[Task, ...]
    reward: Callable[[Task, str], float]

    def task(self, seed: int) -> Task:
        """The tasks of the list, in turn."""
        return self.tasks[seed % len(self.tasks)]

    def score(self, task: Task, answer: str) -> float:
        """The result of the function."""
        return self.reward(task, answer)
