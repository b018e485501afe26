"""An instance that is handed its next batch while it computes one; the models' processes are functions (fakes.py)."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.host.asking import ask, double, marked, served, until
from tests.host.fakes import Fake, Makes, array, wire
from tilewright.host.errors import Expired, Failed, Unavailable
from tilewright.host.host import Host
from tilewright.host.version import Version
from tilewright.host.waiting import Ask, WithCallback

Asked = asyncio.Future[np.ndarray]


def with_one_behind(
    test: Callable[[Host, Version, Fake, list[Asked]], Awaitable[None]],
    compute: Callable[[np.ndarray], np.ndarray] = double,
    first: float = 1.0,
    behind: tuple[dict[str, Any], ...] = ({}, {}),
    seconds: float = 0.05,
    **config: Any,
) -> Makes:
    """Run a test while a batch of two requests of value `first` is computed and one of the values 2 and 3 is behind it."""
    makes = Makes(compute, seconds, places=2)

    async def run(host: Host) -> None:
        asked: list[Asked] = [asyncio.ensure_future(ask(host, first)) for _ in range(2)]
        await until(lambda: makes.made[0].busy)
        asked += [asyncio.ensure_future(ask(host, value, **said)) for value, said in zip((2, 3), behind, strict=True)]
        await until(lambda: len(makes.made[0].handed) == 2)
        assert makes.made[0].batches == [[1, 1]]
        await test(host, host.models["m"].versions[1], makes.made[0], asked)
        assert host.running == 0

    served(makes, run, max_batch=2, **config)
    return makes


def values(found: list[Any]) -> list[Any]:
    """The first number of an answer, or the error's class."""
    return [type(one) if isinstance(one, BaseException) else one[0, 0] for one in found]


def test_the_next_batch_is_there_before_the_first_is_answered() -> None:
    async def test(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        assert (version.waiting, version.running) == (0, 4)
        assert values(await asyncio.gather(*asked)) == [2, 2, 4, 6]
        times = version.stats.times
        assert times["queue"].count == 4
        assert times["queue"].ns > 0.3e9  # the second batch's two waited for the first, which took 0.2 s
        assert times["compute_input"].ns < 0.3e9  # which is not their way there

    with_one_behind(test, seconds=0.2)


def test_a_batch_that_has_room_is_not_handed_over_ahead_and_neither_are_batches_of_several_instances() -> None:
    for config, count in (({}, 3), ({"instances": 2}, 6)):
        makes = Makes(double, 0.03, places=2)

        async def test(host: Host, count: int = count, makes: Makes = makes) -> None:
            asked = [asyncio.ensure_future(ask(host, 1)) for _ in range(count)]
            await until(lambda: makes.made[0].busy)
            await asyncio.sleep(0.01)
            assert [len(fake.handed) for fake in makes.made] == [1] * len(makes.made)
            await asyncio.gather(*asked)

        served(makes, test, max_batch=2, **config)


def test_who_is_more_urgent_does_not_wait_for_the_batch_that_is_behind() -> None:
    async def test(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        order = list[float]()
        asked += [asyncio.ensure_future(ask(host, 4)), asyncio.ensure_future(ask(host, 9, priority=-1))]
        for one, value in zip(asked, (1, 1, 2, 3, 4, 9), strict=True):
            one.add_done_callback(lambda _, value=value: order.append(value))
        assert values(await asyncio.gather(*asked)) == [2, 2, 4, 6, 8, 18]
        assert sorted(order[2:4]) == [2, 9]  # and nobody who came after 2 and 3 is before them
        assert order[:2] + order[4:] == [1, 1, 3, 4]
        assert version.stats.executions == 3

    with_one_behind(test)


def test_a_batch_that_nobody_waits_for_any_more_is_not_computed() -> None:
    async def test(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        asked[2].cancel()
        await asyncio.sleep(0)
        assert not fake._recalled, "somebody waits for it still"
        asked[3].cancel()
        assert values(await asyncio.gather(*asked[:2])) == [2, 2]
        await until(lambda: not fake.busy)
        assert fake.batches == [[1, 1]]

    with_one_behind(test)


def test_who_expires_behind_a_batch_is_never_computed_and_the_others_are() -> None:
    async def test(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        assert values(await asyncio.gather(*asked, return_exceptions=True)) == [2, 2, Expired, 6]
        assert fake.batches == [[1, 1], [1]]
        assert version.stats.expired == 1

    with_one_behind(test, behind=({"timeout_s": 0.1}, {}), seconds=0.2)  # what batches take is not known yet


@pytest.mark.parametrize("value", [-2.0, -3.0], ids=["dies", "hangs"])
def test_a_batch_behind_one_that_loses_the_process_is_computed_by_the_next(value: float) -> None:
    async def test(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        found = values(await asyncio.gather(*asked, return_exceptions=True))
        assert found[2:] == [4, 6]
        assert found[0] == Failed
        # Each of the first batch was tried again alone; whoever came when nothing lived was told so.
        assert found[1] in (Failed, Unavailable)

    makes = with_one_behind(test, marked, first=value, seconds=0.02, batch_timeout_s=0.06)
    assert [1, 1] in [batch for fake in makes.made[1:] for batch in fake.batches], "those behind are not to blame"


@pytest.mark.parametrize("blameless", [False, True])
def test_a_request_that_is_alone_when_the_process_ends_is_to_blame_unless_another_one_may_be(blameless: bool) -> None:
    makes = Makes(double, 0.05, places=2)

    async def test(host: Host) -> None:
        asked: list[Asked] = [asyncio.ensure_future(ask(host, value)) for value in (1, 2)]
        await until(lambda: bool(makes.made) and len(makes.made[0].handed) == 2)
        makes.made[0].blameless = blameless
        makes.made[0].close()
        found = values(await asyncio.gather(*asked, return_exceptions=True))
        assert found == [2 if blameless else Failed, 4]

    served(makes, test, max_batch=1)


def test_a_batch_has_its_whole_time_though_it_was_behind_another() -> None:
    """Three batches of 0.05 s each, where one must not take 0.08 s."""

    async def test(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        more = [asyncio.ensure_future(ask(host, 4)) for _ in range(2)]
        await until(lambda: len(fake.handed) == 3)
        assert len(fake.batches) == 2
        assert values(await asyncio.gather(*asked, *more)) == [2, 2, 4, 6, 8, 8]
        assert version.stats.restarts == 0

    with_one_behind(test, batch_timeout_s=0.08)


def test_a_model_that_fails_is_tried_with_zeros_when_nothing_is_behind() -> None:
    def broken(x: np.ndarray) -> np.ndarray:
        raise ValueError("the weights are gone")

    async def test(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        more = [asyncio.ensure_future(ask(host, 4)) for _ in range(4)]
        assert values(await asyncio.gather(*asked, return_exceptions=True)) == [Failed] * 4
        await until(lambda: version.circuit.opened == 1)
        assert fake.batches == fake.handed == [[1, 1], [1, 1], [1]]
        await asyncio.gather(*more, return_exceptions=True)

    with_one_behind(test, broken, max_failures=1)


def test_a_version_that_goes_away_finishes_both_batches_or_tells_both() -> None:
    async def drained(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        await version.close(drain_s=5.0)
        assert fake.closed
        assert values(await asyncio.gather(*asked)) == [2, 2, 4, 6]

    async def aborted(host: Host, version: Version, fake: Fake, asked: list[Asked]) -> None:
        version.abort("the server ends")
        assert values(await asyncio.gather(*asked, return_exceptions=True)) == [Failed, Failed, Unavailable, Unavailable]

    with_one_behind(drained)
    with_one_behind(aborted)


@pytest.mark.parametrize("places", [1, 2])
def test_random_requests(places: int) -> None:
    """Of all kinds and fates: each has its own answer or the error that it is to blame for, and nothing is left."""
    makes, rng = Makes(marked, 0.002, places=places), random.Random(places)

    async def one(host: Host, value: float) -> str:
        said: dict[str, Any] = {"priority": rng.choice((0, 0, 0, -1, 1))}
        if rng.random() < 0.2:
            said["timeout_s"] = rng.choice((0.001, 0.004, 1.0))
        asked = ask(host, value, rng.choice((1, 1, 2, 4)), **said)
        try:
            found = await asyncio.wait_for(asked, 0.003 if rng.random() < 0.1 else 20)
        except TimeoutError:
            return "gave up"
        except Expired:
            assert "timeout_s" in said
            return "expired"
        except Unavailable:  # while the only process is replaced
            return "unavailable"
        except Failed:
            assert value < 0
            return "failed"
        assert (found == 2 * value).all()
        return "answered"

    async def test(host: Host) -> None:
        version, asked = host.models["m"].versions[1], list[asyncio.Task[str]]()
        for number in range(600):
            kind = rng.random()
            value = -2.0 if kind < 0.004 else -1.0 if kind < 0.05 else float(1 + number)
            asked.append(asyncio.ensure_future(one(host, value)))
            version.circuit._until_s = None
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0, 0, 0.001, 0.003)))
        found = await asyncio.gather(*asked)
        await until(lambda: host.running == 0)
        assert {"answered", "failed", "expired", "gave up"} <= set(found)
        assert found.count("answered") > 300
        ahead = sum(len(fake.handed) - len(fake.batches) for fake in makes.made)
        assert (ahead > 0) == (places > 1), "no batch was recalled"

    served(makes, test, max_batch=4, max_wait_s=60.0)  # a machine that stalls must not have requests refused


@pytest.mark.parametrize("places", [1, 2])
def test_an_instance_gets_its_next_batch_before_the_answers_of_the_last_one_are_made(places: int) -> None:
    """If there is one behind the last one, the one behind that."""
    makes = Makes(double, 0.03, places=places)

    async def test(host: Host) -> None:
        version, handed = host.models["m"].versions[1], list[int]()

        class Notes(WithCallback):
            def deliver(self, found: Any) -> None:
                assert array(found)[0, 0] == 2
                handed.append(len(makes.made[0].handed))

        for _ in range(2):
            version.begin(wire(), Ask(), Notes())
        await until(lambda: makes.made[0].busy)
        later = [asyncio.ensure_future(ask(host, 2 + number)) for number in range(2 * places)]
        await until(lambda: len(makes.made[0].handed) + version.waiting // 2 == 1 + places)
        assert values(await asyncio.gather(*later)) == [4 + 2 * number for number in range(2 * places)]
        assert handed == [1 + places] * 2, "the model waited for the answers"
        assert makes.made[0].batches == [[1, 1]] * (1 + places)

    served(makes, test, max_batch=2)
