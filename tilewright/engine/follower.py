"""The program of every rank of a served model except the first: `python -m tilewright.engine.follower`, started by team.py.

It has no engine, no requests and no head. It loads its share of the model, reads steps from standard input, and runs them. It
ends when the first rank ends.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tilewright.engine.config import EngineConfig
from tilewright.engine.graphs import DecodeGraphs
from tilewright.engine.layout import Inputs, Layout
from tilewright.engine.plan import cache_dtype
from tilewright.engine.runner import on_device, scope_of
from tilewright.engine.share import Share
from tilewright.engine.team import HEADER, Notice
from tilewright.engine.warm import padding_inputs, warm_sizes
from tilewright.hw.env import Launched, launched
from tilewright.models import ModelError
from tilewright.parallel.mesh import join

__all__ = ["Follower", "main"]

_TURNS = 3


class Follower:
    """Runs steps on a share of a model (`ServedPart`), as `ModelRunner` does on the first rank."""

    def __init__(self, model: Any, options: EngineConfig, *, pages: int, page_size: int, max_model_len: int):
        self.model, self.options, self.device = model, options, model.device
        self._scope = scope_of(options.invariant)
        self._max_pages = -(-max_model_len // page_size)
        self.cache = model.empty_cache(pages, page_size, cache_dtype(model, options))
        self._graphs: DecodeGraphs | None = None
        pinned = self.device.type == "cuda"
        self._staging = [torch.zeros(1 << 16, dtype=torch.uint8, pin_memory=pinned) for _ in range(_TURNS)]
        self._read: list[torch.cuda.Event | None] = [None] * _TURNS
        self._turn = 0

    def warmup(self) -> None:
        """Launch the same as `ModelRunner.warmup`, in the same order, because this includes exchanges between ranks."""
        if self.device.type == "cpu":
            return
        options = self.options
        with on_device(self.device), torch.inference_mode(), self._scope():
            for tokens, longest in warm_sizes(options.max_tokens_per_step):
                self._body(padding_inputs(tokens, longest, options.max_seqs, options.max_samples, self.device))
            self._graphs = DecodeGraphs(
                (self._body, None), None, device=self.device, max_seqs=options.max_seqs, max_pages=self._max_pages,
                row_tokens=options.row_tokens, max_samples=options.max_samples, progress=lambda words: None,
            )  # fmt: skip
            torch.cuda.synchronize(self.device)

    def follow(self, steps: IO[bytes]) -> None:
        """Run steps until the stream ends."""
        with on_device(self.device), torch.inference_mode(), self._scope():
            while len(header := steps.read(HEADER.size)) == HEADER.size:
                self._step(Notice(*HEADER.unpack(header)), steps)

    def _step(self, notice: Notice, steps: IO[bytes]) -> None:
        pairs = 16 * notice.copies
        arrived = self._received(notice.size + pairs, steps)
        layout = Layout(notice.tokens, notice.seqs, notice.samples, notice.each or None)
        packed, table = arrived[: layout.nbytes], arrived[layout.nbytes : notice.size]
        if pairs:
            copies = arrived[notice.size :].clone().view(torch.int64).view(-1, 2)
            self.cache.copy_pages(copies[:, 0], copies[:, 1])
        block_table = table.view(torch.int32).view(1, -1, notice.width)
        if notice.rows:
            assert self._graphs is not None
            self._graphs.of(notice.rows, notice.row_tokens).replay(packed, block_table)
        else:
            self._body(layout.device(packed, block_table, notice.longest))

    def _received(self, size: int, steps: IO[bytes]) -> Tensor:
        """The next `size` bytes of `steps`, on the device."""
        turn = self._turn = (self._turn + 1) % _TURNS
        if (read := self._read[turn]) is not None:
            read.synchronize()
        if self._staging[turn].numel() < size:
            self._staging[turn] = torch.zeros(2 * size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        staging = self._staging[turn][:size]
        if steps.readinto(staging.numpy()) != size:  # pyright: ignore[reportAttributeAccessIssue]
            raise EOFError("the first rank is gone")
        there = staging.to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            self._read[turn] = torch.cuda.Event()
            self._read[turn].record()  # pyright: ignore[reportOptionalMemberAccess]
        return there

    def _body(self, inputs: Inputs) -> Tensor:
        return self.model(inputs.token_ids, inputs.batch, self.cache)


def _run(place: Launched, store: Any, steps: IO[bytes]) -> None:
    spec = json.loads(steps.readline())
    options = EngineConfig(**spec["options"])
    share = Share.of(spec["model"], options, place.rank)
    store.set(f"here/{place.rank}", "")
    mesh = join(options.plan, rank=place.rank, device=share.device, store=store, invariant=options.ordered)
    plan = share.planned()
    store.set(f"plan/{place.rank}", json.dumps([plan.num_pages, plan.max_model_len]))
    pages, length = json.loads(store.get("agreed"))
    follower = Follower(
        share.loaded(mesh, length, lambda words: None), options, pages=pages, page_size=plan.page_size, max_model_len=length
    )
    store.set(f"loaded/{place.rank}", "")
    follower.warmup()
    follower.follow(steps)


def _ends_with(parent: int) -> None:
    """End this process when the first rank ends, even if this rank waits for something."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> int:
    """Run the rank; returns the exit code."""
    place = launched()
    assert place is not None, "team.py starts this program"
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends these to all ranks; only the first rank decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_ends_with, args=(os.getppid(),), daemon=True).start()
    store = TCPStore(place.address, place.port, is_master=False)
    try:
        _run(place, store, sys.stdin.buffer)
    except EOFError:
        return 0
    except (ArithmeticError, LookupError, MemoryError, ModelError, OSError, RuntimeError, TypeError, ValueError) as error:
        words = str(error).strip() or type(error).__name__
        print(f"error: rank {place.rank}: {words}", file=sys.stderr, flush=True)
        store.set(f"failed/{place.rank}", words)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # without cleanup, which might wait for ranks that have ended
