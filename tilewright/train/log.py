"""The log of a run: one JSON line per update. Optionally, the entries are also written for TensorBoard."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.extras import require

__all__ = ["Log", "Silent"]


class Log:
    """`log.jsonl` of a run. Lines after `step` are removed, because they belong to updates that were lost.

    Args:
        folder: folder of the run.
        step: number of updates in the checkpoint from which the run continues.
        tensorboard: also write events for TensorBoard.

    Raises:
        MissingExtra: `tensorboard` is set, but TensorBoard is not installed.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool):
        self.path = folder / "log.jsonl"
        kept = [line for line in _lines(self.path) if _step(line) <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._board: Any = _board(folder) if tensorboard else None

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Write an entry, which must have a "step"."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in entry.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


class Silent:
    """The log of a rank that does not write a log."""

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _lines(path: Path) -> list[str]:
    """The complete lines of a log. The last line may be incomplete if the run was killed."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]


def _step(line: str) -> int:
    return int(json.loads(line)["step"])


def _board(folder: Path) -> Any:
    require("writing the log for TensorBoard", "tensorboard")
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
