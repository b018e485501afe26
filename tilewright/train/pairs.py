"""Training data of answer pairs: JSON lines -> token shards -> rows of whole pairs.

    {"prompt": "text", "chosen": "text", "rejected": "text"}
    {"messages": [{"role": ..., "content": ...}, ...], "chosen": "text", "rejected": "text"}

`prompt` may also be a list of messages. An answer may also be a message, or a list that contains one message. If there are
neither `prompt` nor `messages`, the two answers are whole conversations that begin in the same way. Conversations are rendered
with the model's chat template.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.data.shards import TokenShards
from tilewright.train.batch import IGNORED, Piece
from tilewright.train.data import Marked, is_message, marked_shards

__all__ = ["Pairs", "pair_shards"]

_WANTED = '{"prompt": ..., "chosen": ..., "rejected": ...}'


class Pairs:
    """Rows of whole pairs, in which chosen and rejected answers alternate. Position: number of pairs read.

    Args:
        shards: the documents; chosen and rejected ones alternate.
        answers: marks for their tokens: 1 for tokens that are predicted, 0 for others.
        seed: for the order of the pairs in each epoch; None: the order of the shards.
        row_tokens: length of a row. The longest pair must fit into it.
        name: name of the source in messages.

    Raises:
        ValueError: there is no pair, or a pair is longer than a row.
    """

    def __init__(
        self, shards: TokenShards, answers: TokenShards, seed: int | None, row_tokens: int, name: str = "the data"
    ):  # fmt: skip
        ends = np.asarray(shards.ends(0, len(shards)), dtype=np.int64)
        if not len(ends) or len(ends) % 2 or len(shards) != len(answers):
            raise ValueError(
                f"{name}: {len(ends)} answers with {len(answers)} marks for {len(shards)} tokens are not pairs; make the "
                "shards again"
            )
        self._ends = np.concatenate(([0], ends))
        sizes = self._ends[2::2] - self._ends[:-2:2]
        if (longest := int(sizes.max())) > row_tokens:
            at = int(sizes.argmax()) + 1
            raise ValueError(f"{name}: pair {at} has {longest} tokens, but a row only {row_tokens}; raise row_tokens")
        self._shards, self._answers, self._seed, self._sizes = shards, answers, seed, sizes
        self._held: tuple[int, NDArray[np.int64]] | None = None

    def row(self, position: int, length: int) -> tuple[list[Piece], int]:
        """As many pairs as fit."""
        pieces: list[Piece] = []
        left = length
        while True:
            epoch, index = divmod(position, len(self._sizes))
            pair = int(self._order(epoch)[index])
            if int(self._sizes[pair]) > left:
                return pieces, position
            pieces += [self._piece(2 * pair), self._piece(2 * pair + 1)]
            left, position = left - int(self._sizes[pair]), position + 1

    def _piece(self, document: int) -> Piece:
        start, stop = int(self._ends[document]), int(self._ends[document + 1])
        tokens = self._shards.tokens(start, stop).astype(np.int64)
        answers = self._answers.tokens(start, stop).astype(bool)
        return tokens, np.append(np.where(answers[1:], tokens[1:], IGNORED), IGNORED)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._held is None or self._held[0] != epoch:
            count = len(self._sizes)
            key = None if self._seed is None else np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
            self._held = (epoch, np.arange(count) if key is None else key.permutation(count))
        return self._held[1]


def pair_shards(
    paths: Sequence[Path], text: Callable[[str, str], Marked], render: Callable[[list[dict[str, Any]]], Marked] | None,
    vocab_size: int, home: Path, *, identity: str,
) -> tuple[TokenShards, TokenShards]:  # fmt: skip
    """(tokens, answer marks) of documents, in which chosen and rejected ones alternate.

    Args:
        text: (prompt, answer) -> tokens, with the answer marked.
        render: messages -> tokens according to the chat template, with the assistant's messages marked; None if there is no
            chat template.

    Raises:
        ValueError: a line is not a pair, or contains messages and there is no chat template. The message states file and line
            number.
    """

    def rows() -> list[Marked]:
        return [_marked(one, text, render, where) for path in paths for one, where in _pairs(path)]

    return marked_shards(paths, rows, vocab_size, home, kind=f"{identity} pairs")


Side = tuple[str, str] | list[dict[str, Any]]
"""(prompt, answer), or a conversation that ends with the answer."""


def _pairs(path: Path) -> Iterator[tuple[Side, str]]:
    """For each line, first the chosen and then the rejected answer, each with its position in the file."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                raw = json.loads(line)
            except (ValueError, RecursionError):
                raw = None
            if not isinstance(raw, dict) or "chosen" not in raw or "rejected" not in raw:
                raise ValueError(f"{where}: wanted {_WANTED}")
            sides = [_side(raw, raw[name]) for name in ("chosen", "rejected")]
            for side in sides:
                if side is None:
                    raise ValueError(f"{where}: wanted {_WANTED} of texts, or of messages with a role and a content")
                yield side, where
            if sides[0] == sides[1]:
                raise ValueError(f"{where}: chosen and rejected are the same answer, but must differ")


def _side(raw: dict[str, Any], answer: Any) -> Side | None:
    prompt = raw.get("messages", raw.get("prompt"))
    if isinstance(prompt, str):
        return (prompt, answer) if isinstance(answer, str) and answer else None
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    elif isinstance(answer, dict):
        answer = [answer]
    before = [] if prompt is None else prompt
    messages = [*before, *answer] if isinstance(before, list) and isinstance(answer, list) else []
    ends = len(answer) == 1 if before else len(messages) > 1
    if not ends or not all(is_message(one) for one in messages) or messages[-1]["role"] != "assistant":
        return None
    return messages


def _marked(
    side: Side, text: Callable[[str, str], Marked], render: Callable[[list[dict[str, Any]]], Marked] | None, where: str
) -> Marked:  # fmt: skip
    if isinstance(side, tuple):
        return text(*side)
    if render is None:
        raise ValueError(
            f"{where} has messages, which need a tokenizer with a chat template; set tokenizer to a folder that has one"
        )
    runs = render(side)
    # Only the last answer has a loss. Earlier answers of the assistant belong to the prompt.
    return [(ids, answer and index == len(runs) - 1) for index, (ids, answer) in enumerate(runs)]
