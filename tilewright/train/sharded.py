"""Checkpoints of several ranks. Each rank writes its part while training continues; the first rank gives the folder its name.

    OUT/step-00000100/rank-0000.safetensors ...   see parallel/shards.py
    OUT/step-00000100/shards.json                 which file contains which tensors
    OUT/step-00000100/state.json, config.toml     see checkpoint.py

The folder receives this name only when every file is completely on disk, so a run may be killed at any time. `out` must be a
folder that all ranks share.
"""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tilewright.parallel.pieces import Piece
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.shards import MANIFEST, exchanged, file_of
from tilewright.train.checkpoint import Checkpoints, to_disk, write

__all__ = ["ShardedCheckpoints"]


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of all ranks of `world`. All of them must call `save_shards` and `finish` at the same steps."""

    def __init__(self, folder: Path, keep: int, asynchronous: bool, world: Ranks):
        super().__init__(folder, keep, asynchronous)
        self._world = world
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save_shards(
        self, step: int, tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece], state: Mapping[str, Any], config: str
    ) -> str | None:
        """Wait for a save in progress, then save the state after `step` updates. Returns a message about a failure, as
        `save`."""
        before = self.finish()
        partial = self.partial(step)
        manifest, own = exchanged(tensors, pieces, self._world)
        files = {MANIFEST: json.dumps(manifest), "state.json": json.dumps(state, indent=1) + "\n", "config.toml": config}
        words = self._world.texts(self._begun(partial, files) if self._world.rank == 0 else "")[0]
        if words:
            return words
        self._pending = (partial, self._writer.submit(_write_shard, own, partial / file_of(self._world.rank)))
        now = None if self._asynchronous else self.finish()  # on every rank, whatever `before` is on this rank
        return before or now

    def _begun(self, partial: Path, files: Mapping[str, str]) -> str:
        """Create the folder, with all files except the tensors. Returns a message about a failure, or ""."""
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for name, text in files.items():
                write(partial / name, text)
        except OSError as error:
            return self._failed(partial, error)
        return ""

    def poll(self) -> str | None:
        """On the first rank: if a save has ended on all ranks, give the checkpoint its final name."""
        if self._world.rank == 0 and self._pending is not None and self._pending[1].done():
            partial, done = self._pending
            if done.exception() is None and len(list(partial.glob("rank-*.safetensors"))) == self._world.size:
                self._pending = None
                return self._named(partial)
        return None

    def finish(self) -> str | None:
        """Wait until a save in progress has ended on all ranks. Returns a message about a failure on any of them, else None."""
        words, partial = "", None
        if self._pending is not None:
            (partial, done), self._pending = self._pending, None
            words = _outcome(done)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(self._world.texts(words)) if text]
        if self._world.rank or partial is None:
            return failed[0] if failed else None
        return self._failed(partial, OSError(failed[0])) if failed else self._named(partial)

    def close(self) -> None:
        """Finish writing this rank's files, whatever the other ranks do."""
        self._writer.shutdown(wait=True)


def _write_shard(tensors: dict[str, Tensor], path: Path) -> None:
    begun = path.with_suffix(".begun")
    save_file(tensors, begun)
    to_disk(begun)
    begun.rename(path)


def _outcome(done: Future[None]) -> str:
    try:
        done.result()
    except (OSError, SafetensorError, RuntimeError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return ""
