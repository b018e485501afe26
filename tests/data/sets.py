"""Where the public data sets lie that the long tests measure on, and small texts for the quick ones."""

import json
import lzma
import random
import re
from functools import cache
from pathlib import Path

import pytest

from tests.paths import SHARED

__all__ = ["books", "folder", "prose"]

WORDS = re.findall(
    r"\w+",
    "the of and to in a is that for it was on as with by be at this had not are but from or have an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its about than into "
    "them can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also did many off before must well back through years where much your way down should because long each "
    "just state those people too mr how little good ",
)


def folder(name: str) -> Path:
    """A folder of the data sets; skips the test where it is not there."""
    found = SHARED / "data" / name
    if not found.is_dir():
        pytest.skip(
            f"needs the data set {name!r}, which is not at {found}: TILEWRIGHT_TEST_DATA names the folder that has data/"
        )
    return found


@cache
def books(part: str) -> tuple[str, ...]:
    """The texts of the books, "train" or "val"."""
    with lzma.open(folder("books") / f"{part}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return tuple(json.loads(line)["text"] for line in lines)


def prose(random: random.Random, words: int) -> str:
    """Made-up text of so many words: sentences, lines, paragraphs."""
    parts: list[str] = []
    left = 0
    for _ in range(words):
        word = (
            random.choice(WORDS)
            if random.random() < 0.8
            else "".join(random.choices("abcdefghiklmnoprstuvw", k=random.randint(3, 9)))
        )
        parts.append(word.capitalize() if left == 0 else word)
        left = random.randint(4, 16) if left == 0 else left - 1
        if left == 0:
            parts[-1] += random.choice(".....?!") + random.choice(["", "", "", "\n", "\n\n"])
    return " ".join(parts).replace("\n ", "\n").strip() + "."
