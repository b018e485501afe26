"""Converts between the texts of an environment and the tokens of a model: by single characters, or with a model's tokenizer."""

import shutil
from pathlib import Path
from typing import Protocol

from tilewright.engine.tokenizer import Tokenizer

__all__ = ["Text", "Tokens"]

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "*.jinja")


class Text(Protocol):
    """How prompts and answers are converted to tokens."""

    end_ids: tuple[int, ...]
    """Tokens that end an answer."""
    vocab: int
    """The number of token ids."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt; an answer follows them. Raises ValueError for a text without tokens."""
        ...

    def reply(self, text: str) -> list[int]:
        """The tokens of a reply in the middle of a conversation."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of an answer, without the token that ends it."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that a server needs to use the same tokens."""
        ...


class Tokens:
    """The tokenizer of a model folder.

    Args:
        folder: a folder that contains tokenizer.json.
        chat: render a prompt as a user message in the folder's chat template. Otherwise, a prompt is plain text.

    Raises:
        TokenizerError: the folder has no readable tokenizer.
        ValueError: `chat` is set and there is no template, or the tokenizer has no token that ends an answer.
    """

    def __init__(self, folder: Path, *, chat: bool = False) -> None:
        self._folder, self._chat, self._tokenizer = folder, chat, Tokenizer.load(folder)
        self.end_ids, self.vocab = self._tokenizer.eos_ids, self._tokenizer.vocab_size
        if chat and self._tokenizer.chat_template is None:
            raise ValueError(f"chat is true, but the tokenizer of {folder} has no chat template; set chat to false")
        if not self.end_ids:
            raise ValueError(
                f"the tokenizer of {folder} has no end-of-text token (eos_token), so answers could never end; add one"
            )

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, including those that the tokenizer or the chat template adds."""
        if self._chat:
            return self._tokenizer.chat_ids([{"role": "user", "content": text}])
        found = self._tokenizer.encode(text)
        ends = set(self.end_ids)
        while found and found[-1] in ends:  # some tokenizers add an end token after a text, but here an answer must follow
            found.pop()
        if not found:
            raise ValueError(f"the prompt {text!r} has no tokens; prompts need at least one")
        return found

    def reply(self, text: str) -> list[int]:
        """The tokens of the text, without special tokens."""
        return self._tokenizer.encode(text, add_special=False)

    def decode(self, ids: list[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(ids)

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files."""
        for pattern in _FILES:
            for path in self._folder.glob(pattern):
                shutil.copyfile(path, folder / path.name)
