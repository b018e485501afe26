"""Models whose GPU copies inputs from clients' shared memory: with a stand-in for the GPU (copying.py), and with a GPU."""

import asyncio
import functools
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.host import models
from tests.host.asking import until
from tests.host.copying import StandIn
from tilewright.host import worker
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Failed, Refused
from tilewright.host.host import Host, Source
from tilewright.host.instance import Instance
from tilewright.host.regions import Place, Regions
from tilewright.host.tensors import Wire
from tilewright.host.waiting import Ask

WIDTH = 1 << 16
ROW_BYTES = 4 * WIDTH
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


class InThread:
    """A nursery whose processes are threads of this one; for each, a process that does nothing can be killed."""

    def __init__(self) -> None:
        self.processes = list[subprocess.Popen[bytes]]()
        self.threads = list[threading.Thread]()

    async def fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.processes.append(subprocess.Popen(["sleep", "600"]))
        self.threads.append(threading.Thread(target=worker.main, args=(theirs,), daemon=True))
        self.threads[-1].start()
        ours.setblocking(False)
        return self.processes[-1].pid, ours

    def close(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        for process in self.processes:
            process.kill()
            process.wait()


class Device:
    """A GPU or its stand-in, and where clients have their memory. `in_thread`: the model's process is a thread of this one."""

    def __init__(self, stand_in: StandIn | None, folder: Path, *, in_thread: bool):
        self.stand_in, self.folder, self.in_thread = stand_in, folder, in_thread

    def __call__(self, test: Callable[[Host, Regions], Awaitable[None]], model: str = "wide", **config: Any) -> None:
        """Run a test of a model."""

        async def run() -> None:
            nursery: Any = InThread() if self.in_thread else None
            start = None if nursery is None else functools.partial(Instance.start, nursery)
            options = {"threads": 1, "max_batch": 8, "device": "cuda" if self.stand_in is None else "cpu", **config}
            source = Source(ModelConfig(source=f"{models.__name__}:{model}", **options), None)
            host, regions = Host(sources={"m": source}, start=start), Regions(self.folder)
            await host.load("m")
            try:
                await asyncio.wait_for(test(host, regions), 100)
            finally:
                await host.close()
                if nursery is not None:
                    nursery.close()
            if self.stand_in is not None:
                assert not self.stand_in.wrong

        asyncio.run(run())


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    stand_in = StandIn() if request.param == "stand-in" else None
    if stand_in is not None:
        monkeypatch.setattr(worker, "_copies", lambda _: stand_in)
        monkeypatch.setattr(worker.os, "dup2", lambda *_: None)  # this process keeps its output
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Device(stand_in, Path(folder), in_thread=stand_in is not None)


def write(device: Device, name: str, *values: float) -> None:
    """Write rows of these values into an object."""
    with (device.folder / name).open("r+b" if (device.folder / name).exists() else "wb") as file:
        file.write(b"".join(np.full(WIDTH, value, np.float32).tobytes() for value in values))


def register(device: Device, regions: Regions, name: str, *values: float) -> None:
    write(device, name, *values)
    regions.register(name, name, 0, len(values) * ROW_BYTES)


async def ask(host: Host, regions: Regions, name: str, rows: int = 1, at: int = 0) -> np.ndarray:
    """The first numbers of the answer for rows from row `at` on."""
    part = regions.part(Place(name, at * ROW_BYTES, rows * ROW_BYTES))
    answer = await host.infer("m", None, {"x": Wire("FP32", (rows, WIDTH), part)}, Ask())
    return first(answer)


async def send(host: Host, *values: float) -> np.ndarray:
    """The same for rows that are sent."""
    x = np.repeat(np.array(values, np.float32)[:, None], WIDTH, 1)
    return first(await host.infer("m", None, {"x": Wire("FP32", x.shape, x.tobytes())}, Ask()))


def first(answer: Any) -> np.ndarray:
    found = answer.outputs["output"]
    values = np.frombuffer(found.raw, np.float32).reshape(found.shape)
    assert (values == values[:, :1]).all()
    return values[:, 0]


async def locked(host: Host, regions: Regions, name: str) -> None:
    """Ask until the region is locked."""
    stats = host.models["m"].versions[1].stats
    before = stats.traffic.direct
    while stats.traffic.direct == before:
        await ask(host, regions, name)


def test_concurrent_clients_get_their_own_answers_and_may_write_at_once_after_them(device: Device) -> None:
    """Each client overwrites its region when it has the answer, and asks again, alone or with others in a batch."""

    async def test(host: Host, regions: Regions) -> None:
        async def client(number: int) -> None:
            name, rows = f"client-{number}", 1 + number % 3
            register(device, regions, name, *[0.0] * rows)
            for turn in range(60):
                value = 100.0 * number + turn
                write(device, name, *[value + row for row in range(rows)])
                answer = await ask(host, regions, name, rows)
                write(device, name, *[-7.0] * rows)
                assert answer.tolist() == [2 * (value + row) for row in range(rows)]
            regions.unregister(name)

        await asyncio.gather(*map(client, range(12)))
        stats = host.models["m"].versions[1].stats
        assert stats.traffic.direct > stats.traffic.read
        assert stats.executions < 12 * 60, "nothing was computed together"
        if device.stand_in is not None:
            gone = device.stand_in
            await until(lambda: not gone.locked)

    device(test)


def test_a_batch_of_rows_that_were_sent_copied_and_read(device: Device) -> None:
    async def test(host: Host, regions: Regions) -> None:
        register(device, regions, "a", 1, 2, 3, 4)
        await locked(host, regions, "a")
        register(device, regions, "new", 5)  # which is not locked when it is first used
        for _ in range(20):
            asked = [ask(host, regions, "a", 2, 1), send(host, 6), ask(host, regions, "new"), ask(host, regions, "a")]
            found = await asyncio.gather(*asked, send(host, 7, 8))
            assert [answer.tolist() for answer in found] == [[4, 6], [12], [10], [2], [14, 16]]

    device(test)


def test_a_single_small_request_is_left_to_the_gpu(device: Device) -> None:
    async def test(host: Host, regions: Regions) -> None:
        stats = host.models["m"].versions[1].stats
        register(device, regions, "a", 1)
        await locked(host, regions, "a")
        before = stats.traffic
        assert (await ask(host, regions, "a")).tolist() == [2]
        assert stats.traffic == (before.direct + ROW_BYTES, before.read, ROW_BYTES)

    device(test)


@pytest.mark.parametrize("same_shape", [False, True], ids=["as they are", "padded"])
def test_a_model_that_writes_to_its_inputs_and_raises(device: Device, same_shape: bool) -> None:
    """Each request of the failed batch is computed alone, with the inputs that it had."""

    async def test(host: Host, regions: Regions) -> None:
        register(device, regions, "a", 1, 2, -1, 4)
        await locked(host, regions, "a")
        for _ in range(3):
            asked = [ask(host, regions, "a", at=row) for row in range(4)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(found[2], Failed)
            assert [answer.tolist() for answer in found if isinstance(answer, np.ndarray)] == [[2], [4], [8]]

    device(test, "writes", same_shape=same_shape)


def test_files_that_shrink_and_grow_again(device: Device) -> None:
    async def test(host: Host, regions: Regions) -> None:
        register(device, regions, "a", 1, 2)
        register(device, regions, "b", 3)
        await locked(host, regions, "a")
        await locked(host, regions, "b")
        for turn in range(4):
            os.truncate(device.folder / "a", ROW_BYTES)
            found = await asyncio.gather(
                ask(host, regions, "a"), ask(host, regions, "a", at=1), ask(host, regions, "b"), return_exceptions=True
            )
            assert isinstance(found[1], Refused)
            assert "is shorter than it was" in str(found[1])
            assert [list(found[0]), list(found[2])] == [[2 * (turn + 1)], [6]]  # pyright: ignore[reportArgumentType]
            os.truncate(device.folder / "a", 0)
            write(device, "a", turn + 2, 20 + turn)
            assert (await ask(host, regions, "a", 2)).tolist() == [2 * (turn + 2), 2 * (20 + turn)]

    device(test)


def test_a_region_that_is_unregistered_while_its_batch_is_under_way(device: Device) -> None:
    async def test(host: Host, regions: Regions) -> None:
        instance: Any = host.models["m"].versions[1]._instances[0]
        for turn in range(4):
            register(device, regions, "a", *[turn] * 8)
            await locked(host, regions, "a")
            asked = asyncio.ensure_future(ask(host, regions, "a", 8))
            await until(lambda: instance.busy)
            regions.unregister("a")
            assert (await asked).tolist() == [2 * turn] * 8

    device(test, "slow")


def test_batches_that_are_sent_ahead_and_recalled(device: Device) -> None:
    """The slow model computes a batch in a tenth of a second; a more urgent request has the next batch recalled."""

    async def test(host: Host, regions: Regions) -> None:
        register(device, regions, "a", *range(8))
        await locked(host, regions, "a")
        part = regions.part(Place("a", 3 * ROW_BYTES, ROW_BYTES))
        for _ in range(3):
            asked = [asyncio.ensure_future(ask(host, regions, "a", 4, 4 * (number % 2))) for number in range(4)]
            await asyncio.sleep(0.05)
            urgent = await host.infer("m", None, {"x": Wire("FP32", (1, WIDTH), part)}, Ask(priority=-1))
            assert first(urgent).tolist() == [6]
            for number, answer in enumerate(await asyncio.gather(*asked)):
                begin = 4 * (number % 2)
                assert answer.tolist() == [2 * value for value in range(begin, begin + 4)]

    device(test, "slow")


def test_regions_are_not_locked_if_the_config_says_so(device: Device) -> None:
    async def test(host: Host, regions: Regions) -> None:
        register(device, regions, "a", 1, 2)
        for _ in range(10):
            assert (await ask(host, regions, "a", 2)).tolist() == [2, 4]
        traffic = host.models["m"].versions[1].stats.traffic
        assert traffic == (0, 20 * ROW_BYTES, 0)

    device(test, lock_regions=False)
