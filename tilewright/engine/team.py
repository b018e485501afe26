"""The other ranks of a served model. The first rank starts them on this machine, sends them each step, and watches them.

The first rank runs the engine. The others (follower.py) run the same steps on their shares of the model, in the same order;
`parallel.serving.ServedPart` exchanges data between the shares. They receive each step through their standard input: a header,
then the packed buffer that also goes to the first rank's device. When the pipe closes, a rank ends, so no rank outlives the
first. The end of a rank is noticed within half a second; exchanges that wait for it on a GPU are then aborted.
"""

import json
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tilewright.engine.config import EngineConfig
from tilewright.engine.step import DeviceLost
from tilewright.hw.env import Launched, variables_of_rank
from tilewright.parallel.launch import how_it_ended
from tilewright.parallel.mesh import Mesh, abort, join
from tilewright.parallel.plan import Plan

__all__ = ["HEADER", "Notice", "Team"]

_LOOK_S = 0.25
_NAMING_S = 5.0
"""How long to wait, after a failed exchange, for the end of the process that caused it, so that the message can name it."""


class Notice(NamedTuple):
    """The header of a step that is sent to other ranks, before its packed buffer.

    tokens, seqs, samples, each: those of its `Layout`; each is 0 for packed rows. longest: tokens of the longest row. width:
    pages of the block table. rows, row_tokens: those of the captured step in which it runs; 0 for none. copies: number of pairs
    of pages after the buffer. size: bytes of the buffer.
    """

    tokens: int
    seqs: int
    samples: int
    each: int
    longest: int
    width: int
    rows: int
    row_tokens: int
    copies: int
    size: int


HEADER = struct.Struct(f"<{len(Notice._fields)}q")


class Team:
    """The other ranks of a plan, started on this machine. `mesh` is valid after `join`.

    Args:
        model: name or folder; every rank loads its share of this model.
        device: device of the first rank: a CPU, or GPU number 0.
    """

    def __init__(self, plan: Plan, model: str, options: EngineConfig, device: torch.device):
        self.plan, self.device = plan, device
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._words: str | None = None
        self._lock = threading.Lock()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self.mesh = Mesh()
        self.end = weakref.finalize(self, _end, self._ranks)
        spec = json.dumps({"model": model, "options": asdict(options)}).encode() + b"\n"
        for rank in range(1, plan.ranks):
            place = Launched(rank=rank, world=plan.ranks, local_rank=rank, address="127.0.0.1", port=self._store.port)
            command = [sys.executable, "-m", "tilewright.engine.follower"]
            self._ranks.append(subprocess.Popen(command, env=variables_of_rank(place), stdin=subprocess.PIPE, bufsize=0))
            self._write(self._ranks[-1], spec)

    def join(self, *, invariant: bool) -> Mesh:
        """Connect the ranks. Raises ConnectionError if one has ended."""
        self.said("here")
        self.mesh = join(self.plan, rank=0, device=self.device, store=self._store, invariant=invariant)
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="tilewright-ranks", daemon=True).start()
        return self.mesh

    def said(self, what: str) -> list[str]:
        """Wait for the values that the other ranks store under a name. Raises ConnectionError if one has ended."""
        found: list[str] = []
        for rank in range(1, self.plan.ranks):
            while not self._store.check([f"{what}/{rank}"]):
                if (words := self._ended()) is not None:
                    raise ConnectionError(words)
                time.sleep(0.02)
            found.append(self._store.get(f"{what}/{rank}").decode())
        return found

    def say(self, what: str, value: str) -> None:
        """Store a value for the other ranks, before the first step."""
        self._store.set(what, value)

    def tell(self, notice: Notice, packed: Any, copies: Sequence[tuple[int, int]]) -> None:
        """Send a step to the other ranks. Raises DeviceLost if one has ended."""
        message = HEADER.pack(*notice) + bytes(packed) + b"".join(struct.pack("<2q", *pair) for pair in copies)
        try:
            for process in self._ranks:
                self._write(process, message)
        except OSError as error:
            raise self.lost(error) from error

    def check(self) -> None:
        """Raises DeviceLost if a rank has ended."""
        if self._words is not None or self._ended() is not None:
            raise self.lost(None)

    def lost(self, error: BaseException | None) -> DeviceLost:
        """The error that ends the engine: which rank has ended, or what failed in an exchange."""
        deadline = time.monotonic() + _NAMING_S
        while self._ended() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return DeviceLost(self._words or f"the ranks are not at the same step any more: {error}")

    def _ended(self) -> str | None:
        with self._lock:
            for rank, process in enumerate(self._ranks, 1):
                code = process.poll()
                if self._words is None and code is not None:
                    why = self._store.get(f"failed/{rank}").decode() if self._store.check([f"failed/{rank}"]) else ""
                    words = f"rank {rank} of {self.plan.ranks} {how_it_ended(code)}"
                    self._words = f"{words}: {why}" if why else words
            return self._words

    @staticmethod
    def _write(process: "subprocess.Popen[bytes]", message: bytes) -> None:
        assert process.stdin is not None
        left = memoryview(message)
        while left:
            left = left[process.stdin.write(left) or 0 :]


def _watch(held: "weakref.ref[Team]") -> None:
    """Check the ranks until one ends; then abort the exchanges on the GPU that would wait for it for ever."""
    while (team := held()) is not None:
        if team._ended() is not None:
            if team.device.type == "cuda":
                abort()
            return
        del team
        time.sleep(_LOOK_S)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + 5
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
