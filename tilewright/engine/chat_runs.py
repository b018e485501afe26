"""Conversations as training data: which tokens of a chat belong to the assistant."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.engine.chat import ChatTemplateError
from tilewright.engine.tokenizer import Tokenizer

__all__ = ["chat_runs"]


def chat_runs(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], bool]]:
    """A conversation as runs (token ids, whether the assistant says them). Control tokens and errors: see `Tokenizer.chat_ids`.

    Each run is encoded separately, like a prompt before its answer is generated. Messages after the last answer are left out.
    If the template changes the text of earlier messages when more messages follow, the conversation cannot be used for training
    and ChatTemplateError is raised.
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
