"""The sampling half of a step: draws tasks, holds conversations about them, computes rewards, and selects groups.

It runs between two updates. If the samplers are separate processes, it may also run ahead of the updates, in a thread
(`Ahead`).
"""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from tilewright.rl.batch import Sample
from tilewright.rl.config import RLConfig
from tilewright.rl.conversation import Conversation, converse
from tilewright.rl.environments.base import Environment, Task
from tilewright.rl.environments.workers import Workers
from tilewright.rl.rollout import Samples
from tilewright.rl.text import Text

__all__ = ["Ahead", "Gathered", "Gatherer", "Shown"]

_SHOWN = 4
Shown = tuple[str, str, float]
"""(prompt, answers, reward)."""


@dataclass(kw_only=True)
class Gathered:
    """The samples from which one step learns.

    shown: a few of them, for display.
    lost: number of samples whose reward could not be computed, or whose sampler failed.
    empty: number of samples whose last answer has no text.
    dropped: number of groups that were left out.
    whole: mean -log p of the sampled tokens in the model's own distribution.
    sampling_s, scoring_s: seconds.
    drawn, rounds: the counters of the gatherer after this step.
    """

    samples: list[Sample] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    lost: int = 0
    empty: int = 0
    dropped: int = 0
    whole: float = 0.0
    sampling_s: float = 0.0
    scoring_s: float = 0.0
    drawn: int = 0
    rounds: int = 0


class Gatherer:
    """Samples and scores. Not thread-safe: callers must hold `lock`."""

    def __init__(self, config: RLConfig, environment: Environment, text: Text, sampler: Samples, workers: Workers) -> None:
        self._config, self._environment, self._text = config, environment, text
        self.sampler, self._workers = sampler, workers
        self.lock = threading.Lock()
        self.prompts = config.prompts
        """Number of prompts per step."""
        self.drawn = 0
        """Number of tasks drawn so far."""
        self.rounds = 0
        """Number of sampling rounds so far."""

    def sample(self, tasks: Sequence[Task], *, answers: int, seed: int) -> list[Conversation]:
        """Hold `answers` conversations about each task, with the sampler's current weights."""
        config = self._config
        replies = self._workers.reply if config.turns > 1 else None
        return converse(
            self.sampler, self._text, tasks, replies, answers=answers, max_tokens=config.max_tokens, turns=config.turns,
            max_reply_tokens=config.max_reply_tokens, seed=seed,
        )  # fmt: skip

    def scores(self, made: Sequence[Conversation]) -> list[float | None]:
        """The reward of each conversation; None if it could not be computed."""
        return self._workers.score([one.task for one in made], [one.answers[-1] for one in made])

    def gather(self) -> Gathered:
        """Gather the samples of the next step. Without `resample`, these are all groups. With `resample`, they are the groups
        in which rewards differ, and in addition all other groups of the last round."""
        config, kept, found = self._config, list[list[Sample]](), Gathered()
        whole: list[float] = []
        for rounds_left in range(config.resample, -1, -1):
            wanted = self.prompts - len(kept)
            tasks = [self._environment.task(self.drawn + i) for i in range(wanted)]
            began = time.perf_counter()
            made = self.sample(tasks, answers=config.answers, seed=config.seed + self.rounds)
            sampled = time.perf_counter()
            rewards = self.scores(made)
            found.sampling_s += sampled - began
            found.scoring_s += time.perf_counter() - sampled
            self.drawn, self.rounds = self.drawn + wanted, self.rounds + 1
            found.lost += rewards.count(None) + len(tasks) * config.answers - len(made)
            groups: list[list[Sample]] = [[] for _ in tasks]
            for one, reward in zip(made, rewards):
                whole += one.whole
                found.empty += not one.answers[-1].strip()
                if reward is not None:
                    groups[one.group].append(replace(one.sample(reward), group=len(kept) + one.group))
                    if len(found.shown) < _SHOWN:
                        found.shown.append((one.task.prompt, " | ".join(one.answers), reward))
            useful = [group for group in groups if len({sample.reward for sample in group}) > 1]
            if not rounds_left or len(useful) == wanted:
                kept += [group for group in groups if group]
                break
            found.dropped += wanted - len(useful)
            kept += useful
        found.samples = [replace(sample, group=i) for i, group in enumerate(kept) for sample in group]
        found.whole = -sum(whole) / max(1, len(whole))
        found.drawn, found.rounds = self.drawn, self.rounds
        return found


class Ahead:
    """Gathers in a thread, at most `staleness` updates ahead: sampling for step i begins when update i - staleness has been
    made.

    The samples of a step come from the newest weights at the beginning of its sampling. So they are at most `staleness` updates
    old when they are used.
    """

    def __init__(self, gatherer: Gatherer, *, first: int, staleness: int) -> None:
        self._gatherer, self._staleness = gatherer, staleness
        self._made: queue.Queue[Gathered | Exception] = queue.Queue()
        self._changed = threading.Condition()
        self._updates, self._next, self._closed = first, first, False
        self._thread = threading.Thread(target=self._run, name="gather", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop after the step that is being gathered now."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def updated(self, count: int) -> None:
        """Report that `count` updates have been made, and that the sampler has their weights."""
        with self._changed:
            self._updates = count
            self._changed.notify()

    def take(self) -> Gathered:
        """The samples of the next step. If the thread ended with an exception, it is raised here."""
        found = self._made.get()
        if isinstance(found, Exception):
            raise found
        return found

    def _may_begin(self) -> bool:
        return self._closed or self._updates >= self._next - self._staleness

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_begin)
                if self._closed:
                    return
            try:
                with self._gatherer.lock:
                    self._made.put(self._gatherer.gather())
            except (OSError, RuntimeError, ValueError) as error:
                self._made.put(error)
                return
            self._next += 1
