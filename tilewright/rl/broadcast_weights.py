"""Transfers a model's parameters from a trainer to samplers on other devices, by broadcasts of torch.distributed.

GPUs use NCCL, CPUs use gloo. The trainer is rank 0 of a group, and its samplers are the other ranks. Parameters are received
directly in the memory of the model, without a copy on either side. Only small parameters are copied, because they are sent
together. All ranks must take part in a broadcast, so a sampler takes weights between two calls, in three steps: a message in
the sampler's pipe requests it; the sampler reports in the store that it is ready; then the trainer begins the broadcast. While
the trainer waits, it calls `alive` to detect that a sampler has ended.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tilewright.models import Model
from tilewright.parallel.mesh import abort, join, leave
from tilewright.parallel.plan import Plan
from tilewright.rl.shared_weights import layout_of, parameters_of

__all__ = ["BroadcastWeights"]

_SMALL_BYTES = 1 << 20
_STORE = "ranks"
_LAYOUT = "layout"


class BroadcastWeights:
    """The parameters of `model`, on one rank of `size`.

    folder: a folder for this run, on this machine. The ranks find each other through a file in it.

    Raises:
        ValueError: the model on rank 0 is different.
    """

    def __init__(self, model: Model, folder: Path, *, rank: int, size: int) -> None:
        self._rank, self._size, self._times = rank, size, 0
        parameters = parameters_of(model)
        self._device = parameters[0].device
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        self._large = [_bytes(parameter) for parameter in parameters if parameter.nbytes > _SMALL_BYTES]
        self._small = [_bytes(parameter) for parameter in parameters if parameter.nbytes <= _SMALL_BYTES]
        self._together = torch.empty(sum(map(len, self._small)), dtype=torch.uint8, device=self._device)
        self._store = FileStore(str(folder / _STORE), size)
        layout = layout_of(parameters).hex()
        if rank == 0:
            self._store.set(_LAYOUT, layout)
        elif self._store.get(_LAYOUT).decode() != layout:
            raise ValueError("the trainer's weights have other shapes or dtypes than this model's")

    def join(self) -> None:
        """Connect with the other ranks. All ranks must call this."""
        plan = Plan(dp=self._size)
        join(plan, rank=self._rank, device=self._device, store=self._store, invariant=False)

    def push(self, version: int, alive: Callable[[], None]) -> dict[str, float]:
        """Send the parameters to the samplers, which must have been told to call `pull`. Returns how long it took until they
        were ready, how long the transfer took, and its rate.

        Raises:
            ConnectionError: raised by `alive`, which is called while this method waits.
        """
        began = time.perf_counter()
        self._times += 1
        there = [self._key(rank) for rank in range(1, self._size)]
        _until(lambda: self._store.check(there), alive)
        met = time.perf_counter()
        self._exchange(alive)
        took = time.perf_counter() - met
        return {"push_s": took, "push_gb_per_s": self.nbytes / took / 1e9, "push_waited_s": met - began}

    def pull(self) -> None:
        """Receive the parameters that the trainer is sending."""
        self._times += 1
        self._store.set(self._key(self._rank), "")
        self._exchange(lambda: None)

    def close(self) -> None:
        """Leave the group, whether or not other ranks are still in it."""
        if self._device.type == "cuda":
            abort()
        leave()

    def _key(self, rank: int) -> str:
        return f"{self._times} {rank}"

    def _exchange(self, alive: Callable[[], None]) -> None:
        """Broadcast all parameters. With gloo, the end of a rank raises RuntimeError here; `alive` then states which one
        ended."""
        if self._small and not self._rank:
            torch.cat(self._small, out=self._together)
        try:
            works = [dist.broadcast(x, 0, async_op=True) for x in (self._together, *self._large) if len(x)]
            for work in works:
                assert work is not None
                _until(work.is_completed, alive)
                work.wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError:
            alive()
            raise
        if self._rank:
            for parameter, given in zip(self._small, self._together.split([len(x) for x in self._small])):
                parameter.copy_(given)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _until(done: Callable[[], bool], alive: Callable[[], None]) -> None:
    waits = 0
    while not done():
        waits += 1
        if waits % 100 == 0:
            alive()
        time.sleep(1e-4)
