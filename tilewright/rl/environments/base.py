"""What an environment is: it makes tasks from seeds and scores answers; one with several turns also replies.

Values are plain JSON, so that a score can be computed in another process (`workers.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

__all__ = ["Environment", "Function", "MultiTurn", "Solved", "Task"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, and what is needed to score an answer to it: JSON values by name."""

    prompt: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Tasks with one answer each."""

    def task(self, seed: int) -> Task:
        """The task of this seed, always the same."""
        ...

    def score(self, task: Task, answer: str) -> float:
        """The reward of an answer; of a conversation's last answer where there are turns."""
        ...


@runtime_checkable
class MultiTurn(Protocol):
    """What an environment with several turns has besides: tools and other speakers are its replies."""

    def reply(self, task: Task, answers: list[str]) -> str | None:
        """What comes after the policy's answers so far; None ends the conversation."""
        ...


@runtime_checkable
class Solved(Protocol):
    """What an environment has besides that knows a right answer to each task: a model can be pretrained on its tasks."""

    def task(self, seed: int) -> Task:
        """The task of this seed, always the same."""
        ...

    def solution(self, task: Task) -> str:
        """An answer that gets the full reward."""
        ...


@dataclass(frozen=True, kw_only=True)
class Function:
    """An environment of a list of tasks and a function from (task, answer) to a reward."""

    tasks: tuple[Task, ...]
    reward: Callable[[Task, str], float]

    def task(self, seed: int) -> Task:
        """The tasks in turn."""
        return self.tasks[seed % len(self.tasks)]

    def score(self, task: Task, answer: str) -> float:
        """What the function says."""
        return self.reward(task, answer)
