"""Conversations to learn from: which tokens of a chat the assistant says."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.engine.chat import ChatTemplateError
from tilewright.engine.tokenizer import Tokenizer

__all__ = ["chat_runs"]


def chat_runs(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], bool]]:
    """A conversation as runs of token ids, True for what the assistant says. Safe, and raises, as `Tokenizer.chat_ids`.

    Each run is encoded alone, as a prompt is before an answer is generated. What follows the last answer is left out. A
    conversation that reads otherwise once more messages follow cannot be learned from, and is a ChatTemplateError.
    """
    cut, safe = tokenizer.safe(messages, {})
    runs, done = [], ""
    for i, message in enumerate(safe):
        if message.get("role") != "assistant":
            continue
        for end, opens in ((i, True), (i + 1, False)):
            text = tokenizer.apply_chat_template(safe[:end], add_generation_prompt=opens)
            if not text.startswith(done):
                raise ChatTemplateError(f"the chat template writes the first {end} messages unlike those before")
            pieces = text[len(done) :].split(cut.mark)
            runs.append(([token for piece in pieces for token in tokenizer.encode(piece, add_special=False)], end > i))
            done = text
    return runs
