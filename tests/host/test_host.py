"""Requests to models that break, and requests that are none; the models' processes are functions (fakes.py)."""

import asyncio
import time

import numpy as np
import pytest

from tests.host.asking import ask, ask_all, double, first_alone, marked, served, until
from tests.host.fakes import SIGNATURE, Makes, wire
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Expired, Failed, HostError, Overloaded, Refused, Unavailable
from tilewright.host.host import Host, Source
from tilewright.host.tensors import Signature, Wire
from tilewright.host.version import Ask
from tilewright.host.waiting import WithCallback


def test_requests_that_wait_share_a_batch_and_get_their_own_rows() -> None:
    makes = Makes(double, seconds=0.01)

    async def test(host: Host) -> None:
        found = await first_alone(host, makes, *(ask(host, value, rows) for value, rows in ((1, 1), (2, 3), (3, 2), (4, 1))))
        assert [f.tolist() for f in found] == [[[2 * v] * 4] * r for v, r in ((1, 1), (2, 3), (3, 2), (4, 1))]
        assert makes.made[0].batches == [[1], [3, 2, 1]]

    served(makes, test)


def test_requests_of_one_turn_of_the_event_loop_are_one_batch() -> None:
    makes = Makes(double)

    async def test(host: Host) -> None:
        found = await ask_all(host, [1, 2, 3])
        assert [f.tolist() for f in found] == [[[2 * value] * 4] for value in (1, 2, 3)]
        assert makes.made[0].batches == [[1, 1, 1]]

    served(makes, test)


def test_a_lone_client_does_not_wait_for_the_turn_to_end_and_others_are_one_batch_again() -> None:
    """After a few batches of one request the next is computed as it is asked; when more come at once, that ends."""
    makes = Makes(double)

    async def test(host: Host) -> None:
        version = host.model("m").versions[1]

        class Noting(WithCallback):
            def deliver(self, found: object) -> None:
                told.append(found)

        def began(value: float) -> bool:
            """Whether a request is computed before the event loop has its turn."""
            version.begin(wire(1, value), Ask(), Noting())
            return makes.made[0].busy

        told, at_once = list[object](), list[bool]()
        for value in range(6):
            at_once.append(began(value))
            await until(lambda: len(told) == value + 1)  # noqa: B023 (awaited here)
        assert at_once == [False] * 4 + [True] * 2
        found = await ask_all(host, [1, 2, 3])
        assert [f.tolist() for f in found] == [[[2 * value] * 4] for value in (1, 2, 3)]
        await ask_all(host, [1, 2, 3])
        assert makes.made[0].batches == [[1]] * 6 + [[1], [1, 1], [1, 1, 1]]

    served(makes, test)


def test_a_full_queue_and_a_passed_deadline() -> None:
    makes = Makes(double, seconds=0.05)

    async def test(host: Host) -> None:
        found = await first_alone(
            host,
            makes,
            ask(host, 0),
            *(ask(host, 1, timeout_s=0.01) for _ in range(2)),
            *(ask(host, 2) for _ in range(3)),
        )
        kinds = [type(f) for f in found]
        assert kinds == [np.ndarray, Expired, Expired, np.ndarray, np.ndarray, Overloaded]
        assert sum(map(sum, makes.made[0].batches)) == 3  # the expired ones were never computed
        with pytest.raises(Overloaded, match="4 requests are waiting") as caught:
            await asyncio.gather(*(ask(host) for _ in range(8)))
        assert caught.value.retry_after_s is not None
        assert 0.04 < caught.value.retry_after_s < 1  # what two batches of 0.05 s tell

    served(makes, test, max_waiting=4, max_batch=2)


def test_a_request_that_raises_costs_its_batch_only_as_far_as_the_process_says() -> None:
    makes = Makes(marked, seconds=0.02)

    async def test(host: Host) -> None:
        found = await first_alone(host, makes, ask(host, -1), ask(host, 1))
        assert isinstance(found[0], Failed)
        assert "a poisoned row" in str(found[0])
        assert found[1].tolist() == [[2.0] * 4]

    served(makes, test)


def test_clients_that_send_poison_do_not_open_the_circuit() -> None:
    makes = Makes(marked)

    async def test(host: Host) -> None:
        for _ in range(10):
            with pytest.raises(Failed, match="poisoned"):
                await ask(host, -1)
        await until(lambda: not makes.made[0].busy)
        assert (await ask(host)).tolist() == [[2.0] * 4]
        assert host.models["m"].versions[1].circuit.opened == 0
        assert len(makes.made) == 1

    served(makes, test)


def test_a_model_that_always_fails_is_replaced_and_its_circuit_opens() -> None:
    broken = [True]

    def compute(x: np.ndarray) -> np.ndarray:
        if broken[0]:
            raise ValueError("the weights are gone")
        return 2 * x

    makes = Makes(compute)

    async def test(host: Host) -> None:
        for _ in range(3):
            with pytest.raises(Failed):
                await ask(host)
        version = host.models["m"].versions[1]
        await until(lambda: version.circuit.opened == 1)
        with pytest.raises(Unavailable, match="failed and is being replaced") as caught:
            await ask(host)
        assert caught.value.retry_after_s is not None
        assert not host.models["m"].ready
        broken[0] = False
        version.circuit._until_s = 0.0  # its second is over
        await until(lambda: len(makes.made) == 2)
        assert (await ask(host)).tolist() == [[2.0] * 4]
        assert version.circuit.state == "closed"
        assert version.stats.restarts == 1

    served(makes, test)


@pytest.mark.parametrize("value", [-2.0, -3.0], ids=["dies", "hangs"])
def test_who_kills_a_process_is_alone_without_an_answer(value: float) -> None:
    makes = Makes(marked, seconds=0.02)

    async def test(host: Host) -> None:
        first = asyncio.ensure_future(ask(host, 5))  # so that the others share a batch
        found = await ask_all(host, [1, value, 2])
        assert (await first).tolist() == [[10.0] * 4]
        assert isinstance(found[1], Failed)
        assert "died, or hung" in str(found[1])
        assert [found[0].tolist(), found[2].tolist()] == [[[2.0] * 4], [[4.0] * 4]]
        version = host.models["m"].versions[1]
        version.circuit._until_s = None
        await until(lambda: version.ready)
        assert (await ask(host)).tolist() == [[2.0] * 4]

    served(makes, test, batch_timeout_s=0.05)


def test_the_time_that_the_server_takes_to_hand_over_a_batch_is_not_the_models() -> None:
    def held_up(x: np.ndarray) -> np.ndarray:  # a fake computes while it is handed the batch
        time.sleep(0.15)
        return 2 * x

    makes = Makes(held_up, seconds=0.01)

    async def test(host: Host) -> None:
        assert (await ask(host)).tolist() == [[2.0] * 4]
        assert host.models["m"].versions[1].stats.restarts == 0

    served(makes, test, batch_timeout_s=0.1)


def test_a_model_beside_a_broken_one_notices_nothing() -> None:
    async def test() -> None:
        sources = {name: Source(ModelConfig(source="a:b", batch_timeout_s=0.02), None) for name in ("bad", "good")}
        host = Host(sources=sources, start=Makes(marked))
        await host.start()
        bad = asyncio.ensure_future(ask_all(host, [-1, -2, -3] * 20, name="bad"))
        good = await ask_all(host, [float(i) for i in range(200)], name="good")
        assert [g.tolist() for g in good] == [[[2.0 * i] * 4] for i in range(200)]
        assert all(isinstance(error, HostError) for error in await bad)
        await host.close()

    asyncio.run(test())


HUGE = 1 << 40
REFUSED = [
    ({"z": Wire("FP32", (1, 4), bytes(16))}, r"the inputs are 'z', wanted 'x'"),
    ({}, "the inputs are"),
    ({**wire(), "z": Wire("FP32", (1, 4), bytes(16))}, r"the inputs are 'x', 'z', wanted 'x'"),
    ({"x": Wire("INT32", (1, 4), bytes(16))}, "has datatype INT32, wanted FP32"),
    ({"x": Wire("FP32", (1, 5), bytes(20))}, r"has shape \[1, 5\], wanted \[-1, 4\]"),
    ({"x": Wire("FP32", (4,), bytes(16))}, r"has shape \[4\], wanted \[-1, 4\]"),
    ({"x": Wire("FP32", (1, 4), bytes(15))}, r"has 15 bytes of data, and FP32 of shape \[1, 4\] has 16"),
    ({"x": Wire("FP32", (HUGE, 4), bytes(16))}, f"has {HUGE * 16}"),
    ({"x": Wire("FP32", (HUGE, HUGE), bytes(16))}, r"has shape"),
    ({"x": Wire("FP32", (0, 4), b"")}, "has 0 rows, wanted 1 to 64"),
    ({"x": Wire("FP32", (65, 4), bytes(16 * 65))}, "has 65 rows, wanted 1 to 64"),
    ({"x": Wire("FP32", (-1, 4), bytes(16))}, r"has shape \[-1, 4\]"),
]


@pytest.mark.parametrize(("inputs", "words"), REFUSED)
def test_inputs_that_are_none_of_the_models(inputs: dict[str, Wire], words: str) -> None:
    makes = Makes(double)

    async def test(host: Host) -> None:
        with pytest.raises(Refused, match=words):
            await host.infer("m", None, inputs, Ask())
        assert not makes.made[0].batches

    served(makes, test)


def test_requests_that_go_away_are_not_computed() -> None:
    makes = Makes(double, seconds=0.3)

    async def test(host: Host) -> None:
        first = asyncio.ensure_future(ask(host))
        await asyncio.sleep(0)
        gone = [asyncio.ensure_future(ask(host)) for _ in range(5)]
        await asyncio.sleep(0)
        for one in gone:
            one.cancel()
        await first
        await asyncio.sleep(0)
        assert makes.made[0].batches == [[1]]
        assert host.running == 0

    served(makes, test)


def test_a_model_whose_process_cannot_be_made_again_says_so_until_it_can() -> None:
    makes = Makes(marked, seconds=0.02)

    async def test(host: Host) -> None:
        version = host.models["m"].versions[1]
        makes.failing = "the disk is gone"
        with pytest.raises(Failed):
            await ask(host, -2)
        with pytest.raises(Unavailable):
            await ask(host)
        makes.failing = None
        await until(lambda: len(makes.made) == 2)
        version.circuit._until_s = None
        assert (await ask(host))[0, 0] == 2

    served(makes, test)


def test_the_signature_is_read_as_it_was_written() -> None:
    assert Signature.of(SIGNATURE.json()) == SIGNATURE
    for said, words in (({}, "cannot be read"), ({**SIGNATURE.json(), "inputs": [{"name": 1}]}, "cannot be read")):
        with pytest.raises(ValueError, match=words):
            Signature.of(said)
