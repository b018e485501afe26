"""Requests that a front repeats pass through the server in groups: answers, errors, limits, and requests that are given up."""

import asyncio
import gc
import json
import weakref
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.host.fakes import Dies, Makes
from tests.server.v2.repeating import SLOT, World
from tests.server.v2.running import double
from tilewright.server.v2 import repeats
from tilewright.server.v2.relay import CANCEL, REPEATED_ANSWERS, REPEATED_REQUESTS, Frames, frame, numbers, packed

Test = Callable[[World], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def ran(test: Test, makes: Makes | None = None, **config: Any) -> None:
        async def whole() -> None:
            world = World(tmp_path, makes or Makes(double))
            await world.begin(**config)
            await test(world)
            await world.end()

        asyncio.run(whole())

    return ran


def test_requests_of_a_message_are_one_item_and_one_message_back(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(10))
        before, stats = len(world.fake.batches), world.version.stats
        counted, ok = stats.inferences, world.counts.requests["/v2/models/*", 200]
        world.write({slot: slot + 1 for slot in range(10)})
        asked = world.ask(*range(10))
        assert set(world.link._open) == set(), "they begin at the end of the turn"
        assert set(await world.answered(*asked)) == {200}
        assert world.outputs()[:10] == [2.0 * (slot + 1) for slot in range(10)]
        assert world.repeated == [asked]
        assert world.fake.batches[before:] == [[1] * 10]
        assert stats.inferences - counted == 10
        assert world.counts.requests["/v2/models/*", 200] - ok == 10
        assert stats.times["success"].count == stats.times["queue"].count == stats.inferences
        assert json.loads(world.answers[asked[0]][1])["outputs"][0]["shape"] == [1, 4]

    run(test)


def test_messages_of_one_turn_and_of_several_fronts_are_one_group(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(8))
        heard, other = list[tuple[int, list[int]]](), world.another()
        for slot in range(4):
            other.contents.define(slot, *world.link.contents.known[slot + 4])
        for number, link in enumerate((world.link, other)):
            link._stream.write = lambda data, number=number: heard.extend(  # pyright: ignore
                (number, list(numbers(body))) for kind, _, _, body in Frames().messages(data) if kind == REPEATED_ANSWERS
            )
        world.write({slot: slot + 1 for slot in range(8)})
        handed = len(world.fake.handed)
        for first, some in ((50, [0, 1]), (52, [2]), (53, [3])):
            for link in (world.link, other):
                link.data_received(frame(REPEATED_REQUESTS, first, body=packed(some)))
        other.data_received(frame(CANCEL, 52))
        while len(heard) < 2:
            await asyncio.sleep(0.001)
        assert sorted(heard) == [(0, [50, 51, 52, 53]), (1, [50, 51, 53])]
        assert world.fake.handed[handed:] == [[1] * 7]
        assert world.outputs()[:8] == [2, 4, 6, 8, 10, 12, 0, 16]
        assert not other._open
        world.fake.seconds = 0.02
        for link in (world.link, other):
            link.data_received(frame(REPEATED_REQUESTS, 60, body=packed([0, 1])))
        await asyncio.sleep(0.005)
        other.give_up()
        while len(heard) < 3:
            await asyncio.sleep(0.001)
        assert heard[2:] == [(0, [60, 61])]

    run(test)


def test_one_by_one_they_begin_at_once(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(0)
        for _ in range(8):
            await world.answered(*world.ask(0))
        asked = world.ask(0)
        assert world.fake.busy
        assert await world.answered(*asked) == [200]

    run(test)


def test_groups_are_divided_where_batches_end(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(20))
        before = len(world.fake.batches)
        world.write({slot: slot for slot in range(20)})
        asked = [*world.ask(*range(10)), *world.ask(*range(10, 20))]
        assert set(await world.answered(*asked)) == {200}
        assert world.outputs()[:20] == [2.0 * slot for slot in range(20)]
        assert sorted(map(len, world.fake.batches[before:])) == [2, 6, 6, 6]

    run(test, max_batch=6)


def test_what_finds_no_room_is_refused(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(8))
        world.fake.seconds = 0.05
        busy = world.ask(0)
        await asyncio.sleep(0.02)
        asked = world.ask(*range(8))
        statuses = await world.answered(*asked)
        assert sorted(statuses) == [200] * 5 + [429] * 3
        assert statuses[-3:] == [429] * 3, "who came first is taken"
        assert "5 requests are waiting" in json.loads(world.answers[asked[-1]][1])["error"]
        await world.answered(*busy)
        assert world.version.stats.refused == world.version.stats.times["fail"].count == 3
        assert world.counts.requests["/v2/models/*", 429] == 3

    run(test, max_waiting=5, max_batch=4)


def test_what_is_late_is_never_computed(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        for slot in range(4):
            world.define(slot, timeout=20_000)
        await world.twice(*range(8))
        world.fake.seconds, batches = 0.1, len(world.fake.batches)
        busy = world.ask(4)
        await asyncio.sleep(0.005)
        asked = world.ask(*range(4), 5, 6)
        assert await world.answered(*asked) == [504] * 4 + [200] * 2
        assert "was not started within its timeout" in json.loads(world.answers[asked[0]][1])["error"]
        await world.answered(*busy)
        assert world.fake.batches[batches:] == [[1], [1, 1]]
        assert world.version.stats.expired == 4

    run(test)


def test_more_urgent_requests_are_another_group_and_come_first(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        for slot in (3, 5):
            world.define(slot, priority=1)
        await world.twice(*range(8))
        world.fake.seconds = 0.02
        busy = world.ask(0)
        await asyncio.sleep(0.005)
        asked = world.ask(*range(8))
        assert set(await world.answered(*busy, *asked)) == {200}
        assert list(world.answers)[-8:-6] == [asked[3], asked[5]]

    run(test, max_batch=2)


def test_the_error_of_a_request_is_its_own(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(6))
        world.write({0: 1, 1: -1, 2: 3, 3: 4, 4: -1, 5: 6})
        asked = world.ask(*range(6))
        assert await world.answered(*asked) == [200, 500, 200, 200, 500, 200]
        assert "the model raised a poisoned row" in json.loads(world.answers[asked[1]][1])["error"]
        assert world.outputs()[:6] == [2, 0, 6, 8, 0, 12]
        assert world.version.stats.times["fail"].count == 2
        world.write({0: -1, 1: -1})
        assert await world.answered(*world.ask(0, 1)) == [500, 500]

    run(test)


def test_a_file_that_became_shorter_costs_the_others_nothing(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(4))
        world.write({slot: slot + 1 for slot in range(4)})
        size = world.file.stat().st_size
        with world.file.open("r+b") as file:
            file.truncate(SLOT * 2 + 16)  # the third request has an input and no output, the fourth has neither
            asked = world.ask(*range(4))
            assert await world.answered(*asked) == [200, 200, 400, 400]
            for number in asked[2:]:
                assert "is shorter than it was" in json.loads(world.answers[number][1])["error"]
            file.truncate(size)
        assert world.outputs()[:4] == [2, 4, 0, 0]
        assert await world.answered(*world.ask(*range(4))) == [200] * 4

    run(test)


def test_outputs_of_another_shape_take_the_usual_way(run: Callable[..., None]) -> None:
    wide = False

    def compute(x: np.ndarray) -> np.ndarray:
        return np.repeat(2 * x, 2, axis=1) if wide else 2 * x

    async def test(world: World) -> None:
        nonlocal wide
        await world.twice(*range(3))
        wide = True
        asked = world.ask(*range(3))
        assert await world.answered(*asked) == [400] * 3
        assert "it has 32 bytes, but its place in region 'r' has 16" in json.loads(world.answers[asked[0]][1])["error"]

    run(test, Makes(compute))


def test_who_leaves_the_queue_is_not_computed_and_who_leaves_later_has_no_answer(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(8))
        world.fake.seconds, batches = 0.05, len(world.fake.batches)
        world.write({slot: slot + 1 for slot in range(8)})
        running = world.ask(0, 1, 2)
        await asyncio.sleep(0.01)
        waiting = world.ask(*range(3, 8))
        for number in (running[1], waiting[0], waiting[3]):
            world.link.data_received(frame(CANCEL, number))
        assert world.version.waiting == 3
        rest = [running[0], running[2], waiting[1], waiting[2], waiting[4]]
        assert await world.answered(*rest) == [200] * 5
        assert world.fake.batches[batches:] == [[1] * 3, [1] * 3]
        assert world.outputs()[:8] == [2, 0, 6, 0, 10, 12, 0, 16]
        gone = world.ask(0, 1)
        world.link.data_received(b"".join(frame(CANCEL, number) for number in gone))
        assert world.version.waiting == 0
        assert not set(gone) & set(world.answers)

    run(test)


@pytest.mark.parametrize("gone", [2, 4])
def test_a_batch_that_was_sent_ahead_is_recalled_if_nobody_waits_for_it(run: Callable[..., None], gone: int) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(8))
        world.fake.seconds, batches = 0.05, len(world.fake.batches)
        running = world.ask(*range(4))
        await asyncio.sleep(0.01)
        ahead = world.ask(*range(4, 8))
        await asyncio.sleep(0.01)
        assert world.fake.handed[-1] == [1] * 4
        assert len(world.fake.batches) == batches + 1
        world.link.data_received(b"".join(frame(CANCEL, number) for number in ahead[:gone]))
        assert set(await world.answered(*running, *ahead[gone:])) == {200}
        while world.host.running:
            await asyncio.sleep(0.001)
        assert len(world.fake.batches) == batches + (2 if gone < 4 else 1)

    run(test, Makes(double, places=2), max_batch=4)


def test_a_recalled_group_goes_on_without_those_who_left(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        world.define(8, priority=1)
        await world.twice(*range(9))
        world.fake.seconds, batches = 0.05, len(world.fake.batches)
        running = world.ask(*range(4))
        await asyncio.sleep(0.01)
        ahead = world.ask(*range(4, 8))
        await asyncio.sleep(0.01)
        world.link.data_received(frame(CANCEL, ahead[1]))
        urgent = world.ask(8)
        assert set(await world.answered(*running, *urgent, ahead[0], *ahead[2:])) == {200}
        assert world.fake.batches[batches:] == [[1] * 4, [1] * 4]
        assert ahead[1] not in world.answers

    run(test, Makes(double, places=2), max_batch=4)


def test_requests_of_a_process_that_dies_are_computed_again_each_alone(run: Callable[..., None]) -> None:
    def compute(x: np.ndarray) -> np.ndarray:
        if (x == 7).any():
            raise Dies
        return 2 * x

    async def test(world: World) -> None:
        await world.twice(*range(4))
        world.write({0: 1, 1: 7, 2: 3, 3: 4})
        asked = world.ask(*range(4))
        world.link.data_received(b"")
        await asyncio.sleep(0)
        world.link.data_received(frame(CANCEL, asked[3]))
        assert await world.answered(*asked[:3]) == [200, 500, 200]
        assert world.outputs()[:4] == [2, 0, 6, 0]
        assert world.version.stats.restarts == 2

    run(test, Makes(compute))


def test_a_region_that_is_unregistered_is_forgotten(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(3))
        region = weakref.ref(world.regions._regions["r"])
        world.fake.seconds = 0.03
        asked = world.ask(*range(3))
        await asyncio.sleep(0.01)
        world.regions.unregister("r")
        assert region() is not None, "requests still name it"
        assert await world.answered(*world.ask(0, 1)) == [404] * 2
        assert await world.answered(*asked) == [200] * 3
        await asyncio.sleep(0.01)
        gc.collect()
        assert region() is None
        world.register()
        await world.twice(*range(3))

    run(test)


def test_another_version_answers_as_soon_as_it_is_loaded(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(3))
        await world.host.unload("m")
        assert await world.answered(*world.ask(*range(3))) == [503] * 3
        await world.host.load("m")
        assert len(world.makes.made) == 2
        await world.twice(*range(3))
        asked = world.ask(*range(3))
        assert await world.answered(*asked) == [200] * 3
        assert world.repeated == [asked]

    run(test)


def test_a_server_that_ends_refuses_them(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(3))
        world.draining = True
        assert await world.answered(*world.ask(*range(3))) == [503] * 3
        world.draining = False
        world.host.abort("the server ends")
        assert await world.answered(*world.ask(*range(3))) == [503] * 3

    run(test)


def test_a_front_that_ends_gives_its_requests_up(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(6))
        world.fake.seconds = 0.02
        world.ask(0, 1)
        await asyncio.sleep(0.005)
        world.ask(2, 3, 4)
        world.link.give_up()
        assert world.version.waiting == 0
        while world.host.running:
            await asyncio.sleep(0.001)
        assert not world.repeated

    run(test)


def test_models_that_need_more_than_a_version_take_the_usual_way(run: Callable[..., None]) -> None:
    async def test(world: World) -> None:
        await world.twice(*range(3))
        await world.answered(*world.ask(*range(3)))
        assert not world.link.contents.repeats

    run(test, cache=8)


def test_contents_that_get_the_number_of_another(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MAX_LANES", 1)

    async def test(world: World) -> None:
        world.define(1, priority=1)  # another lane, for which there is no room
        await world.twice(*range(3))
        world.write({0: 1, 1: 2, 2: 3})
        assert await world.answered(*world.ask(0, 1, 2, 0)) == [200] * 4
        assert world.outputs()[:3] == [2, 4, 6]
        world.link.contents.define(0, *world.link.contents.known[2])
        world.write({0: 1, 2: 5})
        assert await world.answered(*world.ask(0, 0)) == [200] * 2
        assert world.outputs()[:3] == [0, 4, 10]

    run(test)


def test_numbers_of_requests_are_32_bits() -> None:
    assert array("I").itemsize == 4
