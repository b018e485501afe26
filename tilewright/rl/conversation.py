"""Conversations: the policy answers and the environment replies, until the environment or a limit ends the conversation. Often
there is only one answer.

    prompt | answer (chosen) | reply | answer (chosen) | ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewright.rl.batch import Sample
from tilewright.rl.environments.base import Task
from tilewright.rl.rollout import Answer, Samples
from tilewright.rl.text import Text

__all__ = ["Conversation", "Replies", "converse"]

Replies = Callable[[Sequence[Task], Sequence[Sequence[str]]], Sequence[str | None]]
"""(tasks, the answers of each conversation so far) -> the environment's reply in each; None ends the conversation."""


@dataclass(kw_only=True)
class Conversation:
    """The conversation about one task, so far.

    tokens, chosen, logprobs, kept: as in `Sample`.
    whole: log-probabilities of the chosen tokens in the model's own distribution.
    version: version of the oldest weights that answered.
    answers: the texts of the answers.
    truncated: whether the last answer was cut off at its limit.
    lost: whether the sampler ended before it returned the next answer.
    """

    task: Task
    group: int
    tokens: list[int]
    chosen: list[bool]
    logprobs: list[float]
    kept: list[int]
    version: int = 0
    whole: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    truncated: bool = False
    lost: bool = False

    def add(self, answer: Answer, text: str) -> None:
        """Add the policy's next answer."""
        self._append(answer.tokens, answer.logprobs, answer.kept, chosen=True)
        self.version = min(self.version, answer.version) if self.answers else answer.version
        self.whole += answer.whole
        self.answers.append(text)
        self.truncated = answer.truncated

    def hear(self, tokens: Sequence[int]) -> None:
        """Add a reply of the environment."""
        self._append(tokens, [0.0] * len(tokens), [0] * len(tokens), chosen=False)

    def sample(self, reward: float) -> Sample:
        """The conversation as a sample to learn from."""
        return Sample(
            tokens=self.tokens, chosen=self.chosen, logprobs=self.logprobs, kept=self.kept if any(self.kept) else None,
            reward=reward, group=self.group, version=self.version, truncated=self.truncated,
        )  # fmt: skip

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], kept: Sequence[int], *, chosen: bool) -> None:
        self.kept += kept
        self.tokens += tokens
        self.chosen += [chosen] * len(tokens)
        self.logprobs += logprobs


def converse(
    sampler: Samples, text: Text, tasks: Sequence[Task], replies: Replies | None, *, answers: int, max_tokens: int, turns: int,
    max_reply_tokens: int, seed: int,
) -> list[Conversation]:  # fmt: skip
    """Make `answers` conversations about each task; they are returned in order. Without `replies`, or with one turn, each is a
    single answer. Conversations of which the sampler has lost an answer are left out.

    max_tokens: limit of one answer. turns: greatest number of answers in a conversation. max_reply_tokens: longer replies are
    cut off at this length.

    Raises:
        ValueError: a prompt is too long, or a text has no tokens.
    """
    found: list[Conversation] = []
    prompts = [text.prompt(task.prompt) for task in tasks]
    for group, given in enumerate(sampler(prompts, answers=answers, max_tokens=max_tokens, seed=seed)):
        for answer in given:
            begun = Conversation(task=tasks[group], group=group, tokens=[], chosen=[], logprobs=[], kept=[])
            begun.hear(prompts[group])
            begun.add(answer, text.decode(answer.tokens))
            found.append(begun)
    going = list(enumerate(found))
    for _ in range(turns - 1 if replies is not None else 0):
        going = [(place, one) for place, one in going if not one.truncated]
        assert replies is not None
        said = replies([one.task for _, one in going], [one.answers for _, one in going])
        going = [each for each, words in zip(going, said, strict=True) if words is not None]
        for (_, one), words in zip(going, [words for words in said if words is not None], strict=True):
            one.hear(text.reply(words)[:max_reply_tokens])
        contexts, places = [one.tokens for _, one in going], [place for place, _ in going]
        more = sampler(contexts, answers=1, max_tokens=max_tokens, seed=seed, places=places)
        for (_, one), given in zip(going, more, strict=True):
            one.lost = not given
            for answer in given:
                one.add(answer, text.decode(answer.tokens))
        going = [(place, one) for place, one in going if not one.lost]
    return [one for one in found if not one.lost]
