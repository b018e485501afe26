"""Recipes for cleaning data: the input, the steps in their order, and the output. They are read from TOML and checked.

    seed = 0
    [[input]]
    paths = ["crawl/*.warc.gz"]
    [[step]]
    use = "extract"
    [[step]]
    use = "gopher-quality"
    min_words = 20
    [[step]]
    use = "near-duplicates"
    [tokens]
    tokenizer = "tokenizer.json"

Paths are relative to the recipe's folder. The settings of a step are the arguments of its class (steps.py).
"""

import glob
import hashlib
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tilewright.data.read import FORMATS, format_of

__all__ = ["Input", "Recipe", "Tokens", "load"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Input(_Part):
    """The files of one source. weight: how often its documents are in the tokens; 0.5: half of them, 2: each twice."""

    paths: tuple[str, ...] = Field(min_length=1)
    name: str = ""
    format: str = ""
    text_field: str = "text"
    weight: float = Field(default=1.0, ge=0, le=1000)


class Tokens(_Part):
    """Token shards: a `tokenizer.json`, the tokens per shard, and the token after each document ("" for none)."""

    tokenizer: str
    shard_tokens: int = Field(default=100_000_000, ge=1, le=2_000_000_000)
    end_of_text: str = ""


class Recipe(_Part):
    """A whole recipe. `seed` determines the order of the documents in the token shards."""

    input: tuple[Input, ...] = Field(min_length=1)
    step: tuple[dict[str, Any], ...] = ()
    tokens: Tokens | None = None
    seed: int = 0

    def files(self) -> list[tuple[Path, str, int]]:
        """(path, format, index of the input) of every file, in order; raises ValueError if a pattern matches nothing."""
        found: list[tuple[Path, str, int]] = []
        for number, source in enumerate(self.input):
            for pattern in source.paths:
                paths = sorted(Path(path) for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
                if not paths:
                    raise ValueError(f"input {pattern}: there is no such file")
                found += [(path, source.format or format_of(path), number) for path in paths]
        if twice := [str(path) for path, times in Counter(path for path, _, _ in found).items() if times > 1]:
            raise ValueError(f"the input {min(twice)} is named twice; to count a source twice, set its weight to 2")
        return found

    def fingerprint(self) -> str:
        """A hash over everything that determines the output: the recipe, the names, sizes and times of files, step files."""
        rows = [[str(path), kind, path.stat().st_size, path.stat().st_mtime_ns] for path, kind, _ in self.files()]
        used = [path for step in self.step for key in _PATHS if key in step for path in _listed(step[key])]
        if self.tokens:
            used.append(self.tokens.tokenizer)
        rows += [[path, hashlib.sha256(Path(path).read_bytes()).hexdigest()] for path in used]
        text = json.dumps([self.model_dump(mode="json"), rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_PATHS = ("evaluation", "model")


def _listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, list | tuple) else [value]


def load(path: Path) -> Recipe:
    """Read a recipe; raises ValueError with one sentence if it is invalid, OSError if it cannot be read."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {where}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    for source in recipe.input:
        if source.format and source.format not in FORMATS:
            raise ValueError(f"{path}: format is {source.format!r}, wanted one of {', '.join(FORMATS)}")
    return _absolute(recipe, path.parent.absolute())


def _absolute(recipe: Recipe, base: Path) -> Recipe:
    # The folder's own name may contain [ or *, but only names in the recipe are patterns.
    patterns = [tuple(str(Path(glob.escape(str(base))) / p) for p in source.paths) for source in recipe.input]
    inputs = tuple(source.model_copy(update={"paths": paths}) for source, paths in zip(recipe.input, patterns))
    steps = []
    for step in recipe.step:
        changed = dict(step)
        for key in _PATHS:
            if key in changed:
                if not changed[key] or not all(isinstance(name, str) for name in _listed(changed[key])):
                    raise ValueError(f"step {step.get('use')!r}: {key} is {changed[key]!r}, wanted the path of a file")
                files = [str(base / path) for path in _listed(changed[key])]
                changed[key] = files[0] if isinstance(changed[key], str) else files
                if missing := [name for name in files if not Path(name).is_file()]:
                    raise ValueError(f"step {step.get('use')!r}: {key} {missing[0]}: there is no such file")
        steps.append(changed)
    tokens = recipe.tokens
    if tokens:
        tokens = tokens.model_copy(update={"tokenizer": str(base / tokens.tokenizer)})
        if not Path(tokens.tokenizer).is_file():
            raise ValueError(f"tokenizer {tokens.tokenizer}: there is no such file; wanted the path of a tokenizer.json")
    return recipe.model_copy(update={"input": inputs, "step": tuple(steps), "tokens": tokens})
