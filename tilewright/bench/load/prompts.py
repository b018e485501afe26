"""Generates prompts of a given length, optionally with the shared prefixes recorded in a trace.

Given as token ids, a prompt has exactly the requested length. Ids are among the first few hundred, which every vocabulary has.
Given as text (chat), it consists of short words; the service reports in its usage how many tokens they were.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

from tilewright.bench.load.schedule import BLOCK_TOKENS

__all__ = ["Prompts"]

_FIRST_ID, _LAST_ID = 100, 250
_WORDS = (
    *("a", "all", "and", "are", "as", "at", "be", "but", "by", "can", "do", "for", "from", "had", "has", "he", "her", "his"),
    *("how", "if", "in", "is", "it", "may", "me", "new", "no", "not", "now", "of", "on", "one", "or", "out", "put", "say"),
    *("see", "set", "she", "sky", "so", "sun", "ten", "the", "they", "this", "to", "top", "two", "up", "us", "was", "we"),
)


@lru_cache(maxsize=4096)
def _ids(name: str, count: int) -> tuple[int, ...]:
    """`count` token ids that depend only on the name."""
    return tuple(random.Random(name).choices(range(_FIRST_ID, _LAST_ID), k=count))


class Prompts:
    """Makes prompts: those of two runs with one seed are equal.

    Args:
        seed: seed of all random choices.
        shared: number of tokens that all prompts have in common at their beginning, like a system prompt.
        block_tokens: length of a block that is named in a trace.
    """

    def __init__(self, seed: int, shared: int = 0, block_tokens: int = BLOCK_TOKENS):
        self._seed, self._shared, self._block_tokens = seed, shared, max(1, block_tokens)
        self._made = 0

    def ids(self, tokens: int, blocks: Sequence[int] = ()) -> list[int]:
        """Token ids of a prompt: the shared beginning or the blocks, then tokens of its own."""
        self._made += 1
        found: list[int] = []
        if blocks:
            for block in blocks:
                if len(found) >= tokens:
                    break
                found += _ids(f"{self._seed} block {block}", self._block_tokens)
        elif self._shared:
            found += _ids(f"{self._seed} shared", self._shared)
        del found[tokens:]
        own = random.Random(f"{self._seed} own {self._made}")
        return found + own.choices(range(_FIRST_ID, _LAST_ID), k=tokens - len(found))

    def text(self, tokens: int, blocks: Sequence[int] = ()) -> str:
        """A text of as many short words."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.ids(tokens, blocks))
