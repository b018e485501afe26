"""Checkpoints of a run: the optimizer state as safetensors (written by torch.distributed.checkpoint), and the progress as JSON.

    OUT/step-00000100/model-*.safetensors   master weights, moments and the optimizer's control values, by name
    OUT/step-00000100/state.json            step, tokens, positions in the data
    OUT/step-00000100/config.toml           the config of the run

A folder receives this name only when all of its files are completely on disk. So a checkpoint either is complete or does not
exist. Older checkpoints are deleted only after that. The model weights are not saved separately, because they are the rounded
master weights. Nothing is pickled.
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from tilewright.parallel.pieces import Piece
from tilewright.parallel.saved import read_pieces
from tilewright.parallel.shards import MANIFEST, read_shards

__all__ = ["Checkpoints", "load", "to_disk", "write"]

_PREFIX, _PARTIAL = "step-", ".partial"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: folder of the run; it is created if it does not exist.
        keep: how many of the newest checkpoints to keep.
        asynchronous: write checkpoints while training continues. The state is first copied to the host.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool):
        self.folder, self._keep, self._asynchronous = folder, keep, asynchronous
        self._pending: tuple[Path, Future[Any]] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def latest(self) -> Path | None:
        """The newest complete checkpoint; None if there is none."""
        found = self._whole()
        return found[-1] if found else None

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step exists and is complete."""
        return self._path(step) in self._whole()

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config: str) -> str | None:
        """Wait for a save in progress, then save the state after `step` updates. Returns a message if the earlier save failed,
        or if this one failed and is not asynchronous; else None."""
        before = self.finish()
        partial = self.partial(step)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write(partial / "state.json", json.dumps(state, indent=1) + "\n")
            write(partial / "config.toml", config)
        except OSError as error:
            return self._failed(partial, error)
        # A copy, because the copy that DCP makes shares the memory of tensors that are already on the host.
        held: dict[str, Any] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        _expect_one_process()
        started = state_dict_saver.async_save(held, storage_writer=HuggingFaceStorageWriter(str(partial)), no_dist=True)
        assert isinstance(started, Future)
        self._pending = (partial, started)
        return before if self._asynchronous else before or self.finish()

    def poll(self) -> str | None:
        """If a save has ended, give the checkpoint its final name. Returns a message if the save failed, else None."""
        return self.finish() if self._pending is not None and self._pending[1].done() else None

    def finish(self) -> str | None:
        """Wait for a save in progress. Returns a message if it failed, else None. A failure does not affect older
        checkpoints."""
        if self._pending is None:
            return None
        (partial, done), self._pending = self._pending, None
        try:
            done.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            return self._failed(partial, error)
        return self._named(partial)

    def close(self) -> None:
        """Finish writing. Also called if the run ends with an error."""
        self.finish()

    def partial(self, step: int) -> Path:
        """The folder of a checkpoint while it is being written."""
        return self._path(step).with_suffix(_PARTIAL)

    def _named(self, partial: Path) -> str | None:
        """Give a complete checkpoint its final name. Returns a message if this failed, else None."""
        try:
            for path in partial.iterdir():
                to_disk(path)
            to_disk(partial)
            whole = partial.with_suffix("")
            shutil.rmtree(whole, ignore_errors=True)
            partial.rename(whole)
            to_disk(self.folder)
        except OSError as error:
            return self._failed(partial, error)
        for old in self._whole()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return None

    def _failed(self, partial: Path, error: BaseException) -> str:
        shutil.rmtree(partial, ignore_errors=True)
        last = self.latest()
        words = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        kept = f"{last.name} is kept" if last is not None else "there is no earlier one"
        return f"checkpoint {partial.stem} could not be written ({words[0]}); {kept}; make room in {self.folder}"

    def _path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:08d}"

    def _whole(self) -> list[Path]:
        found = self.folder.glob(f"{_PREFIX}*")
        return sorted(path for path in found if path.suffix != _PARTIAL and (path / "state.json").is_file())


def load(
    folder: Path, tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint: (the saved tensors with the names of `tensors`, on the CPU; the contents of state.json).

    pieces: which part of each parameter this rank holds; None if it holds all parameters completely.

    Raises:
        ValueError: the checkpoint is damaged, or belongs to another model or optimizer.
    """
    held = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        _expect_one_process()
        if (folder / MANIFEST).is_file():
            return read_shards(folder, tensors, pieces or {}), state
        if pieces is not None:
            return read_pieces(folder, tensors, pieces), state
        state_dict_loader.load(held, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        words = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise ValueError(
            f"{folder} cannot be read ({words[0][:300]}); remove it to continue from the checkpoint before it"
        ) from error
    return held, state


def _expect_one_process() -> None:
    """Silence DCP's warning that there is only one process. The filter stays in place, because the warning comes from the
    thread that saves."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def write(path: Path, text: str) -> None:
    """Write a text file."""
    path.write_text(text, encoding="utf-8")


def to_disk(path: Path) -> None:
    """Wait until a file, or the list of entries of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
