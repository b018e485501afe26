"""A tokenizer of single characters, for small models on generated tasks."""

import json
from pathlib import Path

from tilewright.extras import needed

__all__ = ["ALPHABET", "Characters"]

ALPHABET = "0123456789+-*/()=<: "
"""The characters of the prompts and answers of the generated tasks."""
_END = "<end>"


class Characters:
    """A tokenizer with one token per character, and the token `end`, which ends an answer. Raises ValueError if a character
    occurs twice in the alphabet."""

    def __init__(self, alphabet: str = ALPHABET) -> None:
        if not alphabet or len(set(alphabet)) < len(alphabet):
            raise ValueError(f"alphabet is {alphabet!r}, wanted at least one character, and each character only once")
        self._signs = alphabet
        self._ids = {sign: number for number, sign in enumerate(alphabet)}
        self.end = len(alphabet)
        self.end_ids = (self.end,)
        self.vocab = len(alphabet) + 1

    def prompt(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            ValueError: a character is not in the alphabet.
        """
        if bad := [sign for sign in text if sign not in self._ids]:
            raise ValueError(
                f"a prompt contains {bad[0]!r}, which is not in the alphabet {self._signs!r}; add it to alphabet in the config"
            )
        return [self._ids[sign] for sign in text]

    reply = prompt

    def decode(self, ids: list[int]) -> str:
        """The text of these ids, without the end token."""
        return "".join(self._signs[number] for number in ids if number != self.end)

    def save(self, folder: Path) -> None:
        """Write the tokenizer, with the same ids, as tokenizer.json and tokenizer_config.json.

        Raises:
            MissingExtra: the library `tokenizers` is not installed.
        """
        library = needed("tokenizers", "llm")
        made = library.Tokenizer(library.models.WordLevel({**self._ids, _END: self.end}))  # raises for other characters
        made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
        made.decoder = library.decoders.Fuse()
        made.add_special_tokens([library.AddedToken(_END, special=True, normalized=False)])
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}) + "\n", encoding="utf-8")
