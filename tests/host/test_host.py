"""Models that break, are swapped, share their requests or stand behind one another; their processes are functions (fakes.py)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.host.fakes import SIGNATURE, Dies, Hangs, Makes, array, wire
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Expired, Failed, HostError, NotFound, Overloaded, Refused, Unavailable
from tilewright.host.host import Host, Source
from tilewright.host.repository import Repository
from tilewright.host.tensors import Signature, TensorSpec, Wire
from tilewright.host.version import Ask


def double(x: np.ndarray) -> np.ndarray:
    return 2 * x


def marked(x: np.ndarray) -> np.ndarray:
    """Doubles; a row of -1 raises, of -2 kills, of -3 hangs."""
    for value, error in ((-1, ValueError("a poisoned row")), (-2, Dies()), (-3, Hangs())):
        if (x == value).any():
            raise error
    return 2 * x


def served(makes: Makes, test: Callable[[Host], Awaitable[None]], **config: Any) -> None:
    """Run a test of one model, `m`."""

    async def run() -> None:
        host = Host(sources={"m": Source(ModelConfig(source="a:b", **config), None)}, start=makes)
        await host.start()
        try:
            await test(host)
        finally:
            await host.close()

    asyncio.run(run())


async def ask(host: Host, value: float = 1.0, rows: int = 1, name: str = "m", version: str | None = None, **said: Any) -> np.ndarray:
    answer = await host.infer(name, version, wire(rows, value), Ask(**said))
    return array(tuple(answer.outputs.values()))


async def ask_all(host: Host, values: list[float], **said: Any) -> list[Any]:
    return await asyncio.gather(*(ask(host, value, **said) for value in values), return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


def test_requests_that_wait_share_a_batch_and_get_their_own_rows() -> None:
    makes = Makes(double, seconds=0.01)

    async def test(host: Host) -> None:
        found = await asyncio.gather(*(ask(host, value, rows) for value, rows in ((1, 1), (2, 3), (3, 2), (4, 1))))
        assert [f.tolist() for f in found] == [[[2 * v] * 4] * r for v, r in ((1, 1), (2, 3), (3, 2), (4, 1))]
        assert makes.made[0].batches == [[1], [3, 2, 1]]

    served(makes, test)


def test_a_full_queue_and_a_passed_deadline() -> None:
    makes = Makes(double, seconds=0.05)

    async def test(host: Host) -> None:
        found = await asyncio.gather(
            ask(host, 0), *(ask(host, 1, timeout_s=0.01) for _ in range(2)), *(ask(host, 2) for _ in range(3)), return_exceptions=True
        )
        kinds = [type(f) for f in found]
        assert kinds == [np.ndarray, Expired, Expired, np.ndarray, np.ndarray, Overloaded]
        assert sum(map(sum, makes.made[0].batches)) == 3  # the expired ones were never computed
        with pytest.raises(Overloaded, match="2 requests are waiting|4 requests are waiting") as caught:
            await asyncio.gather(*(ask(host) for _ in range(8)))
        assert caught.value.retry_after_s is not None
        assert 0.04 < caught.value.retry_after_s < 1  # what two batches of 0.05 s tell

    served(makes, test, max_waiting=4, max_batch=2)


def test_a_request_that_raises_costs_its_batch_only_as_far_as_the_process_says() -> None:
    async def test(host: Host) -> None:
        found = await ask_all(host, [-1, 1])  # the first leaves alone
        assert isinstance(found[0], Failed)
        assert "a poisoned row" in str(found[0])
        assert found[1].tolist() == [[2.0] * 4]

    served(Makes(marked, seconds=0.001), test)


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
        with pytest.raises(Unavailable, match="broke and is being replaced") as caught:
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
    makes = Makes(marked, seconds=0.001)

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


def write_model(folder: Path, *versions: str, toml: str = "") -> None:
    for number, factor in enumerate(versions, 1):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
        (folder / str(number) / "factor.txt").write_text(factor)
    (folder / "model.toml").write_text(f"[model]\n{toml}")


def with_repository(folder: Path, test: Callable[[Host, Makes], Awaitable[None]], **makes: Any) -> None:
    async def run() -> None:
        start = Makes(makes.pop("compute", double), **makes)
        host = Host(Repository(folder), start=start)
        await host.start()
        try:
            await test(host, start)
        finally:
            await host.close()

    asyncio.run(run())


def test_versions_are_swapped_under_load_without_a_failed_request(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "1")

    async def test(host: Host, makes: Makes) -> None:
        found = list[float]()
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                found.append(float((await ask(host))[0, 0]))

        clients = [asyncio.ensure_future(client()) for _ in range(16)]
        for number in range(2, 6):
            await asyncio.sleep(0.01)
            write_model(tmp_path / "m", *(["1"] * (number - 1)), str(number))
            await host.load("m")
            assert (await ask(host))[0, 0] == 2 * number
        stop.set()
        await asyncio.gather(*clients)
        assert found == sorted(found)  # never an older version after a newer one
        assert set(found) == {2, 4, 6, 8, 10}
        await until(lambda: [fake.closed for fake in makes.made] == [True] * 4 + [False])

    with_repository(tmp_path, test, seconds=0.001)


def test_a_version_that_cannot_be_loaded_leaves_the_old_one(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "3")

    async def test(host: Host, makes: Makes) -> None:
        write_model(tmp_path / "m", "3", "broken")
        with pytest.raises(Refused, match="its weights are damaged; the version that was there goes on"):
            await host.load("m")
        assert (await ask(host))[0, 0] == 6
        (tmp_path / "m" / "model.toml").write_text("[model]\nmax_batsh = 3")
        with pytest.raises(Refused, match="the key 'max_batsh' is unknown"):
            await host.load("m")
        assert (await ask(host))[0, 0] == 6
        await host.unload("m")
        with pytest.raises(Unavailable, match="unloaded"):
            await ask(host)
        write_model(tmp_path / "m", "3", "4")
        await host.load("m")
        assert (await ask(host))[0, 0] == 8

    with_repository(tmp_path, test)


def test_what_is_unchanged_is_not_loaded_again(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "1")

    async def test(host: Host, makes: Makes) -> None:
        await host.load("m")
        assert len(makes.made) == 1
        write_model(tmp_path / "m", "7")
        await host.load("m")
        assert len(makes.made) == 2
        assert (await ask(host))[0, 0] == 14

    with_repository(tmp_path, test)


def test_versions_share_requests_by_weight_and_a_shadow_is_compared(tmp_path: Path) -> None:
    members = "versions = [{version = 1, weight = 3}, {version = 2, weight = 1}, {version = 3, weight = 1, shadow = true}]"
    write_model(tmp_path / "m", "1", "2", "1", toml=members)

    async def test(host: Host, makes: Makes) -> None:
        found = [float((await ask(host))[0, 0]) for _ in range(40)]
        assert found == [2, 2, 4, 2] * 10
        shadow = host.models["m"].versions[3].stats.shadow
        await until(lambda: shadow.compared == 40)
        assert shadow.different == 10  # those beside version 2
        assert shadow.largest_difference == pytest.approx(0.5)
        assert float((await ask(host, version="2"))[0, 0]) == 4
        with pytest.raises(NotFound, match=r"no version '9'; loaded are: 1, 2, 3"):
            await ask(host, version="9")

    with_repository(tmp_path, test)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('source = "os:abort"', "names the function 'os:abort'; allow its package with --package os"),
        ("versions = [{version = 9, weight = 1}]", "versions names 9, and there are 1"),
        ("versions = [{version = 1, weight = 1, shadow = true}]", "versions has nobody that answers"),
        ('max_batch = "8"', "max_batch is '8', wanted int"),
        ("max_batch = true", "max_batch is True, wanted int"),
        ("max_batch = 0", "max_batch is 0, wanted 1 to"),
        ('nan = "maybe"', "nan is 'maybe', wanted one of error, allow"),
        ('state = {x = "z"}', "no output 'z'"),
        ("[other]", "wanted one table"),
        ("= 3", "Invalid"),
    ],
)
def test_a_toml_that_is_wrong_is_one_sentence_in_the_index(tmp_path: Path, toml: str, words: str) -> None:
    write_model(tmp_path / "m", "1", toml=toml)
    write_model(tmp_path / "n", "1")

    async def test(host: Host, makes: Makes) -> None:
        assert words in host.failed["m"]
        assert "\n" not in host.failed["m"]
        assert (await ask(host, name="n"))[0, 0] == 2
        with pytest.raises(Unavailable, match="model m is not loaded"):
            await ask(host)

    with_repository(tmp_path, test)


def test_two_models_of_one_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "1")
    with pytest.raises(ValueError, match="two models have the name 'm'"):
        Host(Repository(tmp_path), {"m": Source(ModelConfig(source="a:b"), None)})


def test_links_out_of_the_repository_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "outside" / "1").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m").symlink_to(tmp_path / "outside")
    repository = Repository(tmp_path / "models")
    assert list(repository.names()) == []
    for name in ("m", "../outside", ".", "..", "", "a/b", "m\0"):
        assert name not in repository


def test_a_pipeline_runs_its_steps_and_fails_with_the_first(tmp_path: Path) -> None:
    steps = """steps = [
      {model = "b", inputs = {x = "middle"}, outputs = {y = "last"}},
      {model = "a", inputs = {x = "first"}, outputs = {y = "middle"}},
      {model = "a", inputs = {x = "first"}, outputs = {y = "side"}},
    ]"""
    for name, factor in (("a", "1"), ("b", "10")):
        write_model(tmp_path / name, factor)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model.toml").write_text("[model]\n" + steps)

    async def test(host: Host, makes: Makes) -> None:
        assert [spec.name for spec in host.models["p"].signature.inputs] == ["first"]
        answer = await host.infer("p", None, {"first": wire(2, 1.0)["x"]}, Ask())
        assert {name: array((w,)).tolist() for name, w in answer.outputs.items()} == {
            "last": [[40.0] * 4] * 2,
            "side": [[2.0] * 4] * 2,
        }
        with pytest.raises(Failed, match="pipeline p: model a, version 1: the model raised a poisoned row"):
            await host.infer("p", None, {"first": wire(1, -1.0)["x"]}, Ask())
        with pytest.raises(Refused, match=r"model p: the inputs are 'x', wanted 'first'"):
            await ask(host, name="p")

    with_repository(tmp_path, test, compute=marked)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ('{model = "a", inputs = {x = "u"}, outputs = {y = "u"}}', "wait for one another"),
        ('{model = "z", inputs = {x = "u"}, outputs = {y = "v"}}', "names the model 'z', which is not loaded"),
        ('{model = "a", inputs = {w = "u"}, outputs = {y = "v"}}', "differ in 'w'"),
        ('{model = "a", inputs = {}, outputs = {y = "v"}}', "differ in 'x'"),
        (
            '{model = "a", inputs = {x = "u"}, outputs = {y = "v"}}, {model = "a", inputs = {x = "u"}, outputs = {y = "v"}}',
            "two steps of the pipeline give 'v'",
        ),
    ],
)
def test_a_pipeline_that_is_none(tmp_path: Path, steps: str, words: str) -> None:
    write_model(tmp_path / "a", "1")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model.toml").write_text(f"[model]\nsteps = [{steps}]")

    async def test(host: Host, makes: Makes) -> None:
        assert words in host.failed["p"]

    with_repository(tmp_path, test)


def test_the_cache_answers_the_same_inputs_and_forgets_the_oldest() -> None:
    makes = Makes(double)

    async def test(host: Host) -> None:
        for value in (1, 1, 2, 1, 3, 2, 1):
            assert (await ask(host, value))[0, 0] == 2 * value
        assert len(makes.made[0].batches) == 5  # 1, 2, 3, and those that 3 and 2 pushed out
        assert host.models["m"].versions[1].stats.times["cache_hit"].count == 2

    served(makes, test, cache=2)


ADDS = Signature(
    (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("h", "FP32", (-1, 4))), (TensorSpec("y", "FP32", (-1, 4)),), True
)


def test_a_sequence_goes_on_from_its_state_and_sequences_share_batches() -> None:
    makes = Makes(double, seconds=0.002, signature=ADDS)

    async def test(host: Host) -> None:
        assert [spec.name for spec in host.models["m"].signature.inputs] == ["x"]
        with pytest.raises(Refused, match="the sequence 9 is not open"):
            await ask(host, 1, sequence=9)
        one = [ask(host, 1, sequence=1, starts=i == 0, ends=i == 3) for i in range(4)]
        two = [ask(host, 10, sequence="b", starts=i == 0) for i in range(4)]
        found = [float(f[0, 0]) for f in await asyncio.gather(*one, *two)]
        # h' = 2 (x + h)
        assert found == [2, 6, 14, 30, 20, 60, 140, 300]
        with pytest.raises(Refused, match="the sequence 1 is not open"):
            await ask(host, 1, sequence=1)
        assert float((await ask(host, 1, sequence="b"))[0, 0]) == 602
        assert float((await ask(host, 1))[0, 0]) == 2
        assert max(map(len, makes.made[0].batches)) == 2
        await ask(host, 1, sequence=3, starts=True)
        with pytest.raises(Overloaded, match="2 sequences are open"):
            await ask(host, 1, sequence=4, starts=True)

    served(makes, test, state={"h": "y"}, max_sequences=2, max_delay_ms=5)


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
    makes = Makes(marked, seconds=0.001)

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
