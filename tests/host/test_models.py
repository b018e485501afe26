"""Models in a repository: versions that are swapped and share requests, pipelines, caches, sequences."""

import asyncio
from pathlib import Path

import pytest

from tests.host.asking import ask, double, marked, served, until, with_repository, write_model
from tests.host.fakes import ADDS, Makes, array, wire
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Failed, NotFound, Overloaded, Refused, Unavailable
from tilewright.host.host import Host, Source
from tilewright.host.repository import Repository
from tilewright.host.version import Ask


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
        with pytest.raises(Refused, match="its weights are damaged; the version that was loaded before stays"):
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
        ("versions = [{version = 9, weight = 1}]", "versions names 9, wanted some of 1"),
        ("versions = [{version = 1, weight = 1, shadow = true}]", "versions has none that answers"),
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
            "two steps of the pipeline produce 'v'",
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
