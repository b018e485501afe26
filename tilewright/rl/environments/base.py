"""The interface of an environment: it makes tasks from seeds and scores answers; with several turns, it also replies.

Values are plain JSON, so that a score can be computed in another process (`workers.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

__all__ = ["Environment", "Function", "MultiTurn", "Solved", "Task"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, and the data for scoring an answer: JSON values by name."""

    prompt: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Tasks with one answer each."""

    def task(self, seed: int) -> Task:
        """The task for this seed; always the same."""
        ...

    def score(self, task: Task, answer: str) -> float:
        """The reward for an answer; with several turns, for the conversation's last answer."""
        ...


@runtime_checkable
class MultiTurn(Protocol):
    """The additional method of an environment with several turns; tools and other speakers are its replies."""

    def reply(self, task: Task, answers: list[str]) -> str | None:
        """The reply to the policy's answers so far; None ends the conversation."""
        ...


@runtime_checkable
class Solved(Protocol):
    """An environment that also knows a right answer to each task, so that a model can be pretrained on its tasks."""

    def task(self, seed: int) -> Task:
        """The task for this seed; always the same."""
        ...

    def solution(self, task: Task) -> str:
        """An answer that gets the full reward."""
        ...


@dataclass(frozen=True, kw_only=True)
class Function:
    """An environment made of a list of tasks and a function from (task, answer) to a reward."""

    tasks: tuple[Task, ...]
    reward: Callable[[Task, str], float]

    def task(self, seed: int) -> Task:
        """The tasks in turn."""
        return self.tasks[seed % len(self.tasks)]

    def score(self, task: Task, answer: str) -> float:
        """The result of the function."""
        return self.reward(task, answer)
