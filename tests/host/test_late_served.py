"""Served models whose next batch begins before the last one ends, or is answered: with stand-ins for the GPU, and with a GPU.

The model's process is a thread of this one, so that the test can count these batches.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.copying import StandIn
from tests.host.late import Deferred
from tests.host.test_direct_served import GPU, Device, ask, register, send, write
from tilewright.host import computing, turns, worker
from tilewright.host.errors import Failed
from tilewright.host.host import Host
from tilewright.host.loaded import load
from tilewright.host.regions import Regions

Served = tuple[Device, str, list[Any]]
"""The device, the model, and the batches that began at once."""


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=GPU)])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    stand_in = StandIn() if request.param == "stand-in" else None
    begun, locks = list[Any](), list[tuple[Any, Callable[[], object]]]()
    begin, lock = turns.Turns._begun_at_once, computing.page_locked

    def counted(*args: Any) -> Any:
        found = begin(*args)
        begun.extend([] if found is None else [found])
        return found

    def locked(memory: Any) -> Callable[[], object]:
        locks.append((memory, lock(memory)))  # it must not be unmapped before it is unlocked
        return locks[-1][1]

    if stand_in is not None:
        monkeypatch.setattr(worker, "_copies", lambda _: stand_in)
        monkeypatch.setattr(worker, "load", lambda *args: Deferred.of(load(*args)))
    monkeypatch.setattr(turns.Turns, "_begun_at_once", counted)
    monkeypatch.setattr(computing, "page_locked", locked)
    monkeypatch.setattr(worker.os, "dup2", lambda *_: None)  # this process keeps its output
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Device(stand_in, Path(folder), in_thread=True), "replayed" if stand_in is None else "overflows", begun
    for _, unlock in locks:
        unlock()


def test_each_of_many_batches_has_the_outputs_of_its_own_inputs(served: Served) -> None:
    """Clients of shared memory overwrite it at once after each answer; others send their rows. No two rows are equal."""
    device, model, begun = served
    numbers = itertools.count(1)  # up to 1,440, which float16 has exactly

    async def test(host: Host, regions: Regions) -> None:
        async def client(number: int) -> None:
            name, rows = f"client-{number}", 1 + number % 4
            register(device, regions, name, *[0.0] * rows)
            for _ in range(60):
                values = [float(next(numbers)) for _ in range(rows)]
                write(device, name, *values)
                answer = await ask(host, regions, name, rows)
                write(device, name, *[-7.0] * rows)
                assert answer.tolist() == [2 * value for value in values]

        async def sender() -> None:
            for _ in range(60):
                values = [float(next(numbers)) for _ in range(2)]
                assert (await send(host, *values)).tolist() == [2 * value for value in values]

        await asyncio.gather(*map(client, range(8)), sender(), sender())
        assert host.models["m"].versions[1].stats.traffic.direct
        assert len(begun) > 10, "hardly any batch was there when the one before it had ended"

    device(test, model, same_shape=True)


def test_a_nan_among_many_batches_is_the_error_of_its_request(served: Served) -> None:
    """On a GPU the inputs are looked at while the next batch is computed there."""
    device, model, _ = served

    async def test(host: Host, regions: Regions) -> None:
        register(device, regions, "a", 1, 2, 3, 4, 5, 6, 3e38)  # the last is infinite as float16, so that zeros make it NaN

        async def client(number: int) -> None:
            for turn in range(20):
                if number == 4 and turn % 4 == 0:
                    with pytest.raises(Failed, match="the model returned NaN in output 'output' for finite inputs"):
                        await ask(host, regions, "a", 1, 6)
                begin = number % 3 * 2
                assert (await ask(host, regions, "a", 2, begin)).tolist() == [2 * (begin + 1), 2 * (begin + 2)]

        await asyncio.gather(*map(client, range(9)))

    device(test, model, same_shape=True)
