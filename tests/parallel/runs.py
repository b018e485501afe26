"""Small runs by the command line: a model, texts, a config."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.tiny_model import write_tiny_model
from tilewright.train.config import TrainConfig, to_toml

__all__ = ["config_of", "log_of", "write_books"]


def write_books(path: Path) -> Path:
    """JSON lines of texts; returns the path."""
    random = np.random.default_rng(0)
    texts = ["the quick brown fox jumps over the lazy dog. " * int(random.integers(1, 9)) + f"book {i}" for i in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def config_of(folder: Path, name: str, **changes: Any) -> Path:
    """The config of a run `name` of the tiny model in a folder, which is given what is missing."""
    model, books = folder / "tiny", folder / "books.jsonl"
    if not model.exists():
        write_tiny_model(model)
        write_books(books)
    small: dict[str, Any] = {"row_tokens": 48, "micro_rows": 2, "micro_batches": 4, "steps": 4, "warmup": 2, "lr": 3e-3}
    small |= {"dtype": "float32", "accumulate": "tree", "save_every": 2, "log_every": 1, "device": "cpu", "init": "random"}
    small |= {"model": str(model), "data": (str(books),), "out": str(folder / name)}
    config = TrainConfig(**{**small, **changes})
    path = folder / f"{name}.toml"
    path.write_text(to_toml(config))
    return path


def log_of(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm) of each update."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"], entry["norm"]) for entry in entries if "loss" in entry]
