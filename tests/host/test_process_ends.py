"""Processes that end at inconvenient moments: while they have no batch, when they get one, and when several have begun."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.host import models
from tests.host.asking import ask, double, served, until
from tests.host.fakes import Fake, Makes
from tilewright.host import version
from tilewright.host.arena import Arena
from tilewright.host.channel import Channel
from tilewright.host.circuit import Circuit
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Failed, Unavailable
from tilewright.host.host import Host, Source
from tilewright.host.instance import Instance, _Handed, _Place
from tilewright.host.regions import Part, Region
from tilewright.host.runs import RECALLED
from tilewright.host.tensors import Wire
from tilewright.host.waiting import Ask

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The number of a process that does nothing."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def with_instance(pid: int, test: Callable[[Instance, Ends], Awaitable[None]]) -> None:
    """An instance with two places whose process is `pid`, and the other ends of its channels."""

    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ahead, behind = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one = Instance(pid, ours)
        one._ahead = Channel(ahead, one.close)
        one._places = tuple(_Place(number, Arena.create(1 << 20)) for number in range(2))
        one.capacity = 1 << 19
        await test(one, (theirs, behind))
        one.close()
        for end in (theirs, behind):
            end.close()

    asyncio.run(run())


def test_a_process_that_has_just_ended_gives_its_batch_back(sleeper: int) -> None:
    """The server learns it when it sends the file of a region."""

    async def test(one: Instance, ends: Ends) -> None:
        for end in ends:
            end.close()
        fd = os.memfd_create("region")
        os.ftruncate(fd, 1 << 18)
        wire = Wire("FP32", (1, 1 << 15), Part(Region("r", "r", 0, 1 << 18, fd), 0, 1 << 17))
        told, ended = list[Any](), list[bool]()
        one.on_end = lambda: ended.append(True)
        one.run([1, 1], [(wire,), (wire,)], told.append)
        assert one.closed
        assert told == [RECALLED]
        assert ended == [True]

    with_instance(sleeper, test)


@pytest.mark.parametrize(
    ("begun", "blameless"), [([], False), ([True], False), ([False], False), ([True, False], False), ([True, True], True)]
)
def test_a_batch_is_to_blame_if_only_it_had_begun(sleeper: int, begun: list[bool], blameless: bool) -> None:
    async def test(one: Instance, ends: Ends) -> None:
        told = list[Any]()
        for place, has_begun in zip(one._places, begun, strict=False):
            place.arena.begin_by(one.capacity)
            if has_begun:
                place.arena.begins(one.capacity)
                place.arena.recall(one.capacity)  # which comes too late
            one._batches.append(_Handed(place, told.append, 0))
        one.on_end = lambda: told.append("ended")
        one.close()
        assert one.blameless == blameless
        assert told == [*[None if begun[:1] == [True] else RECALLED, RECALLED][: len(begun)], "ended"]

    with_instance(sleeper, test)


def test_a_process_that_dies_while_it_has_nothing_to_do_is_replaced() -> None:
    async def answer(host: Host) -> float:
        x = np.full((1, 4), 0.5, np.float32)
        found = await host.infer("m", None, {"x": Wire("FP32", x.shape, x.tobytes())}, Ask())
        return float(np.frombuffer(next(iter(found.outputs.values())).raw, np.float32)[0])

    async def test() -> None:
        host = Host(sources={"m": Source(ModelConfig(source=f"{models.__name__}:marked", threads=1, device="cpu"), None)})
        await host.load("m")
        first, version = await answer(host), host.models["m"].versions[1]
        instance = version._instances[0]
        assert isinstance(instance, Instance)
        signal.pidfd_send_signal(instance._pidfd, signal.SIGKILL)
        await until(lambda: version.stats.restarts == 1 and version.ready)
        assert await answer(host) == first
        await host.close()

    asyncio.run(test())


def test_an_instance_that_ends_before_it_is_watched_is_replaced() -> None:
    makes = Makes(double)

    async def test(host: Host) -> None:
        version = host.models["m"].versions[1]
        makes.made[0].close()
        assert not version._instances
        with pytest.raises(Unavailable):
            await ask(host, 1)
        await until(lambda: len(makes.made) == 2 and version.ready)
        dead = makes.made[-1]
        dead.on_end = lambda: None  # it ended while nobody watched
        dead.close()
        version._watch(dead)
        await until(lambda: len(makes.made) == 3 and version.ready)
        assert version.stats.restarts == 2

    served(makes, test)


def test_nothing_is_sent_ahead_behind_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that ended the process, too, it would have to be the cause."""
    makes, pairs, run = Makes(double, 0.03, places=2), list[tuple[int, float, float]](), Fake.run

    def noted(fake: Fake, parts: Any, batch: Any, *rest: Any) -> None:
        value = _value(batch)
        pairs.extend((makes.made.index(fake), _value(running[1]), value) for running in fake._waiting)
        run(fake, parts, batch, *rest)

    monkeypatch.setattr(Fake, "run", noted)

    async def test(host: Host) -> None:
        asked = [asyncio.ensure_future(ask(host, value)) for value in (1, 2)]
        await until(lambda: bool(makes.made) and len(makes.made[0].handed) == 2)
        makes.made[0].blameless = True
        makes.made[0].close()
        await until(lambda: host.models["m"].versions[1].ready)
        asked += [asyncio.ensure_future(ask(host, value)) for value in (3, 4, 5)]
        found = await asyncio.gather(*asked)
        assert [float(x[0, 0]) for x in found] == [2, 4, 6, 8, 10]

    served(makes, test, max_batch=1)
    assert (0, 1.0, 2.0) in pairs
    assert [pair for pair in pairs if pair[0] == 1], "others are sent ahead"
    assert not [pair for pair in pairs if pair[:2] == (1, 1.0)]


def _value(batch: Any) -> float:
    """The first number of a batch's first request."""
    return float(np.frombuffer(batch[0][0].data, np.float32)[0])


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("drain_s", [None, 30.0])
def test_a_version_that_goes_away_before_a_batch_begins_tells_its_request(
    monkeypatch: pytest.MonkeyPatch, instances: int, drain_s: float | None
) -> None:
    """`drain_s`: the process ends while the version waits for it; None: the version ends it."""
    makes = Makes(double)
    monkeypatch.setattr(Fake, "_begin", lambda _: None)

    def close(fake: Fake) -> None:
        fake.closed = True
        while fake._waiting:
            fake._waiting.popleft()[2](RECALLED)
        fake.on_end()

    monkeypatch.setattr(Fake, "close", close)

    async def test(host: Host) -> None:
        asked = asyncio.ensure_future(ask(host, 1))
        await until(lambda: any(fake.busy for fake in makes.made))
        version = host.models["m"].versions[1]
        if drain_s is None:
            version.abort("the server ends")
        else:
            closing = asyncio.ensure_future(version.close(drain_s=drain_s))
            await asyncio.sleep(0)
            for fake in makes.made:
                fake.close()
            async with asyncio.timeout(10):
                await closing
        async with asyncio.timeout(10):
            with pytest.raises(Unavailable):
                await asked

    served(makes, test, instances=instances)


def test_a_request_whose_processes_end_before_it_begins_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = Makes(double)
    monkeypatch.setattr(Circuit, "broken", lambda self, now_s: 0.0)

    def ends(fake: Fake, parts: Any, batch: Any, done: Any, *rest: Any) -> None:
        fake.handed.append(list(parts))

        def close() -> None:
            fake.closed = True
            done(RECALLED)
            fake.on_end()

        asyncio.get_running_loop().call_soon(close)

    monkeypatch.setattr(Fake, "run", ends)

    async def test(host: Host) -> None:
        with pytest.raises(Failed, match="its process died"):
            await ask(host, 1)
        assert sum(len(fake.handed) for fake in makes.made) == version.MAX_UNBEGUN + 2

    served(makes, test)
