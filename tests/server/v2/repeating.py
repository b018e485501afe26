"""A server's end of a front (link.py) without the front: a test writes the front's messages and reads the answers."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.host.fakes import Makes
from tilewright.host.config import ModelConfig
from tilewright.host.host import Host, Source
from tilewright.host.regions import Regions
from tilewright.server.metrics import HttpCounts
from tilewright.server.v2.link import Link
from tilewright.server.v2.relay import (
    DEFINE_ANSWER,
    DEFINE_REQUEST,
    REPEATED_ANSWERS,
    REPEATED_REQUESTS,
    Frames,
    frame,
    numbers,
    packed,
)
from tilewright.server.v2.repeats import Repeats

SLOT = 32
"""Bytes of a request in the file: 16 of its input, 16 of its output."""
SLOTS = 40


class World:
    """A server's end of a front, a model, and a file in which each request has a slot of its own."""

    def __init__(self, folder: Path, makes: Makes):
        self.folder, self.makes = folder, makes
        self.file = folder / "memory"
        self.file.write_bytes(bytes(SLOT * SLOTS))
        self.regions = Regions(folder)
        self.register()
        self.draining = False
        self.frames, self.bodies = Frames(), dict[int, bytes]()
        self.answers = dict[int, tuple[int, bytes]]()
        self.repeated = list[list[int]]()
        """The requests of each REPEATED_ANSWERS message."""
        self.next = 0

    async def begin(self, **config: Any) -> None:
        fields = {"source": "a:b", "max_batch": 64, **config}
        sources = {"m": Source(ModelConfig(**fields), None)}
        self.host = Host(None, sources, start=self.makes)  # pyright: ignore[reportArgumentType]
        await self.host.start()
        self.counts = HttpCounts(lambda: 0, Counter())
        about = {"host": self.host, "regions": self.regions, "counts": self.counts, "draining": lambda: self.draining}
        about["repeats"] = Repeats(self.host, self.regions, about["draining"])
        self.about = SimpleNamespace(**about)
        self.link = self.another()
        for slot in range(SLOTS):
            self.define(slot)

    def another(self) -> Link:
        """The end of another front, which numbers requests and contents as the first one does."""
        link = Link(self.about, None, None)  # pyright: ignore[reportArgumentType]
        link._stream = SimpleNamespace(write=self._heard)  # pyright: ignore[reportAttributeAccessIssue]
        return link

    @property
    def version(self) -> Any:
        return self.host.models["m"].versions[1]

    @property
    def fake(self) -> Any:
        return self.makes.made[-1]

    def register(self) -> None:
        self.regions.register("r", "memory", 0, SLOT * SLOTS)

    def define(self, slot: int, **parameters: Any) -> None:
        """The content with this number is the request that uses this slot."""

        def place(at: int) -> dict[str, Any]:
            return {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": at}

        asked = {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place(SLOT * slot)}],
            "outputs": [{"name": "y", "parameters": place(SLOT * slot + 16)}],
            "parameters": parameters,
        }
        body = json.dumps(asked).encode()
        self.link.data_received(frame(DEFINE_REQUEST, slot, b"/v2/models/m/infer\0", body))

    def write(self, values: dict[int, float]) -> None:
        with self.file.open("r+b") as file:
            for slot, value in values.items():
                file.seek(SLOT * slot)
                file.write(np.full(4, value, np.float32).tobytes() + bytes(16))

    def outputs(self) -> list[float]:
        return np.frombuffer(self.file.read_bytes(), np.float32).reshape(-1, 8)[:, 4].tolist()

    def ask(self, *slots: int) -> list[int]:
        """The numbers of new requests, which arrive in one message."""
        first, self.next = self.next, self.next + len(slots)
        self.link.data_received(frame(REPEATED_REQUESTS, first, body=packed(slots)))
        return list(range(first, self.next))

    async def answered(self, *asked: int) -> list[int]:
        """The statuses of requests, when all of them are answered."""
        while not all(number in self.answers for number in asked):
            await asyncio.sleep(0.001)
        return [self.answers[number][0] for number in asked]

    async def twice(self, *slots: int) -> None:
        """Ask each of these slots alone, until the answer is known."""
        for _ in range(2):
            assert set(await self.answered(*self.ask(*slots))) == {200}
        self.repeated.clear()

    def _heard(self, data: bytes) -> None:
        for kind, number, text, body in self.frames.messages(data):
            if kind == DEFINE_ANSWER:
                self.bodies[number] = body
            elif kind == REPEATED_ANSWERS:
                self.repeated.append(list(numbers(body)))
                for request in numbers(body):
                    assert request not in self.answers
                    self.answers[request] = 200, self.bodies[number]
            else:
                assert number not in self.answers
                assert b"content-type: application/json" in text
                self.answers[number] = kind, body

    async def end(self) -> None:
        assert not self.link._open
        assert self.host.running == 0
        await self.host.close()
