"""Model processes that are functions on the event loop: what they compute, and how they break, is the test's to say."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from pathlib import Path

import numpy as np

from tilewright.host.config import ModelConfig
from tilewright.host.forking import LoadFailed
from tilewright.host.regions import Part, Read, read_all
from tilewright.host.runs import RECALLED, Done, Reply
from tilewright.host.tensors import Signature, TensorSpec, Wire

SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), True)


ADDS = Signature(
    (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("h", "FP32", (-1, 4))), (TensorSpec("y", "FP32", (-1, 4)),), True
)
"""Of a model whose second input is a sequence's state."""


class Dies(Exception):
    """The process ends in the middle of a batch."""


class Hangs(Exception):
    """The batch never comes back."""


class Fake:
    """An instance whose model is `compute`, from an array of rows to an array of rows; it has `places` for batches."""

    def __init__(self, compute: Callable[[np.ndarray], np.ndarray], seconds: float = 0.0, places: int = 1):
        self.compute, self.seconds, self.places = compute, seconds, places
        self.closed = False
        self.batches: list[list[int]] = []
        """Rows of the requests of each batch that was begun."""
        self.handed: list[list[int]] = []
        self.capacity, self.most, self.blameless = 1 << 20, None, False
        self.on_end: Callable[[], object] = lambda: None
        self._waiting = deque[tuple[Sequence[int], Sequence[Sequence[Wire]], Done, float]]()
        self._recalled = False

    @property
    def busy(self) -> bool:
        return self.closed or bool(self._waiting)

    @property
    def room(self) -> bool:
        return not self.closed and 0 < len(self._waiting) < self.places

    def run(self, parts: Sequence[int], batch: Sequence[Sequence[Wire]], done: Done, until_s: float = inf) -> None:
        assert not self.closed
        assert len(self._waiting) < self.places
        self.handed.append(list(parts))
        self._waiting.append((parts, batch, done, until_s))
        if len(self._waiting) == 1:
            self._begin()

    def recall(self) -> None:
        self._recalled = len(self._waiting) > 1

    def _begin(self) -> None:
        """Compute the first batch, unless it is too late."""
        parts, batch, _, until_s = self._waiting[0]
        if self._recalled or time.monotonic() >= until_s:
            self._recalled = False
            asyncio.get_running_loop().call_soon(self._answer, RECALLED)
            return
        self.batches.append(list(parts))
        # What has several inputs is given their sum.
        unread = dict[int, str]()
        inputs = [[_array(wire, number, unread) for wire in wires] for number, wires in enumerate(batch)]
        rows = np.concatenate([np.sum(arrays, axis=0, dtype=np.float32) for arrays in inputs])
        try:
            found, errors = self._computed(rows, parts)
        except Hangs:
            return
        except Dies:
            asyncio.get_running_loop().call_later(self.seconds, self.close)
            return
        wire = Wire("FP32", found.shape, np.ascontiguousarray(found, np.float32).tobytes())
        asyncio.get_running_loop().call_later(self.seconds, self._answer, Reply((wire,), errors, self.seconds, unread))

    def _computed(self, rows: np.ndarray, parts: Sequence[int]) -> tuple[np.ndarray, dict[int, str]]:
        """As `host/worker.py`: where a batch fails, each request is computed alone."""
        try:
            return self.compute(rows), {}
        except ValueError as error:
            if len(parts) == 1:
                return rows, {0: f"the model raised {error}"}
        alone = [self._computed(own, own.shape[:1]) for own in np.split(rows, np.cumsum(parts)[:-1])]
        return np.concatenate([own for own, _ in alone]), {i: errors[0] for i, (_, errors) in enumerate(alone) if errors}

    def _answer(self, reply: Reply) -> None:
        if self._waiting:
            done = self._waiting.popleft()[2]
            if self._waiting:
                self._begin()  # before the server hears of the other
            done(reply)

    def close(self) -> None:
        self.closed = True
        told = None
        while self._waiting:
            self._waiting.popleft()[2](told)
            told = RECALLED
        on_end, self.on_end = self.on_end, lambda: None
        on_end()


def _array(wire: Wire, number: int, unread: dict[int, str]) -> np.ndarray:
    """A request's input, wherever it is."""
    data = wire.data
    if isinstance(data, Part):
        part, data = data, bytearray(len(data))
        unread |= read_all([Read(number, part, memoryview(data))])
    return np.frombuffer(data, np.float32).reshape(wire.shape)


class Makes:
    """Starts fakes: `compute` is made anew for each, from the config's source, the folder and how many came before."""

    def __init__(
        self,
        compute: Callable[[np.ndarray], np.ndarray],
        seconds: float = 0.0,
        signature: Signature = SIGNATURE,
        places: int = 1,
        may_load: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0),
    ):
        self.may_load = may_load
        """Awaited before a model is there."""
        self.compute, self.seconds, self.signature, self.places = compute, seconds, signature, places
        self.made: list[Fake] = []
        self.failing: str | None = None

    async def __call__(
        self, config: ModelConfig, folder: Path | None, threads: int, note: Callable[[str], None]
    ) -> tuple[Fake, Signature]:
        note("beginning")
        await self.may_load()
        if self.failing is not None:
            raise LoadFailed(self.failing)
        factor = 1.0
        if folder is not None:
            said = (folder / "factor.txt").read_text()
            if said == "broken":
                raise LoadFailed("its weights are damaged")
            factor = float(said)
        compute = self.compute
        self.made.append(Fake(lambda x: compute(x) * np.float32(factor), self.seconds, self.places))
        return self.made[-1], self.signature


def wire(rows: int = 1, value: float = 1.0) -> dict[str, Wire]:
    """An input of that many rows, all of one value."""
    array = np.full((rows, 4), value, np.float32)
    return {"x": Wire("FP32", array.shape, array.tobytes())}


def array(outputs: Sequence[Wire]) -> np.ndarray:
    """The only output."""
    return np.frombuffer(outputs[0].data, np.float32).reshape(outputs[0].shape)
