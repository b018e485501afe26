"""Adapters over HTTP: each is a model of its own; they come and go while others are answered, and no bad one is noticed."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from tests.engine.test_adapters import write_adapter
from tests.server.fake_engine import Running, running
from tests.server.tiny_model import write_tiny_model
from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.llm import LLM
from tilewright.models import load_model, save_model
from tilewright.models.adapters import merge, read_adapter, targets_of
from tilewright.server.adapter_desk import AdapterDesk
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError
from tilewright.server.forward_adapters import ReplicaAdapters
from tilewright.server.prompts import Served
from tilewright.server.wire import WireError

pytestmark = pytest.mark.usefixtures("shape")

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("server")
    base = write_tiny_model(home / "base")
    one, two = (write_adapter(base, home / "adapters" / name, seed) for seed, name in enumerate(("one", "two"), 1))
    (home / "adapters/out").symlink_to(base)
    (home / "adapters/damaged").mkdir()
    shutil.copy(one / "adapter_config.json", home / "adapters/damaged")
    return {"home": home, "base": base, "one": one, "two": two}


@pytest.fixture(scope="module")
def server(shape: str, folders: dict[str, Path]) -> Iterator[Running]:
    llm = LLM(
        str(folders["base"]), device="cpu", max_seqs=8, max_tokens_per_step=64, page_size=8, kv_cache_bytes=1 << 20,
        max_adapters=2, adapters=(f"one={folders['one']}",),
    )  # fmt: skip
    with running(llm.engine, adapter_dir=str(folders["home"] / "adapters")) as server:
        yield server


@pytest.fixture(scope="module")
def merged(folders: dict[str, Path]) -> dict[str, str]:
    found = {}
    for name in ("one", "two"):
        model = load_model(folders["base"], device="cpu")
        merge(model, read_adapter(folders[name], targets_of(model)))
        save_model(model, folders["home"] / f"merged-{name}", folders["base"])
        llm = LLM(str(folders["home"] / f"merged-{name}"), device="cpu", kv_cache_bytes=1 << 20)
        with running(llm.engine) as alone:
            found[name] = text(alone, None)
    return found


def text(server: Running, model: str | None, **fields: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "model": model, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert model is None or response.json()["model"] == model
    return response.json()["choices"][0]["text"]


def post(server: Running, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    return response.status_code, response.json()


def test_each_adapter_is_a_model(server: Running, merged: dict[str, str]) -> None:
    assert text(server, "one") == merged["one"]
    assert text(server, None) != merged["one"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    name = client.models.list().data[0].id
    assert [model.id for model in client.models.list()] == [name, "one"]
    assert client.models.retrieve("one").id == "one"
    answer = client.completions.create(
        model="one", prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == merged["one"]
    chat = client.chat.completions.create(model="one", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    assert chat.model == "one"
    with pytest.raises(openai.NotFoundError, match="there is no adapter 'two' here; there are one"):
        client.completions.create(model="two", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError, match=r"this server has .*, one"):
        client.models.retrieve("two")


def test_adapters_come_and_go_while_others_are_answered(server: Running, merged: dict[str, str]) -> None:
    base = text(server, None)
    with ThreadPoolExecutor(4) as pool:
        asked = [(model, pool.submit(text, server, model)) for _ in range(10) for model in (None, "one")]
        for _ in range(3):
            status, made = post(server, "load_lora_adapter", lora_name="two", lora_path="two")
            assert (status, made["id"], made["parent"]) == (200, "two", server.server.served.name)
            assert text(server, "two") == merged["two"]
            assert post(server, "unload_lora_adapter", lora_name="two") == (
                200, {"id": "two", "object": "model", "deleted": True},
            )  # fmt: skip
        answers = [(model, future.result()) for model, future in asked]
    assert all(answer == (base if model is None else merged["one"]) for model, answer in answers)
    status, error = post(server, "completions", model="two", prompt=PROMPT)
    assert (status, error["error"]["code"]) == (404, "model_not_found")


def test_what_a_client_gets_wrong_is_one_sentence(server: Running, folders: dict[str, Path], merged: dict[str, str]) -> None:
    wrong = "wanted a folder below the server's folder for adapters"
    name = server.server.served.name
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("load", {"lora_name": "x", "lora_path": "/etc"}, 400, wrong),
        ("load", {"lora_name": "x", "lora_path": "../base"}, 400, wrong),
        ("load", {"lora_name": "x", "lora_path": "."}, 400, wrong),
        ("load", {"lora_name": "x", "lora_path": "out"}, 400, wrong),  # a link to elsewhere
        ("load", {"lora_name": "x", "lora_path": "two/../../base"}, 400, wrong),
        ("load", {"lora_name": "x", "lora_path": "a\0b"}, 400, "lora_path is"),
        ("load", {"lora_name": "x", "lora_path": "nobody"}, 400, wrong),
        ("load", {"lora_name": "x", "lora_path": "a" * 5000}, 400, "lora_path is"),
        ("load", {"lora_name": "x" * 200, "lora_path": "two"}, 400, "lora_name is"),
        ("load", {"lora_name": "a b", "lora_path": "two"}, 400, "wanted at most 128 letters, digits"),
        ("load", {"lora_name": name, "lora_path": "two"}, 400, "the name of the model itself"),
        ("load", {"lora_name": "one", "lora_path": "two"}, 400, "there is an adapter 'one' already"),
        ("load", {"lora_name": "x", "lora_path": "damaged"}, 400, "has no adapter_model.safetensors"),
        ("load", {"lora_name": "x"}, 400, "lora_path is missing"),
        ("unload", {"lora_name": "x"}, 404, "there is no adapter 'x' here"),
        ("unload", {"lora_name": 3}, 400, "lora_name is 3"),
    ]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(text, server, "one") for _ in range(6)]
        for verb, body, status, words in cases:
            got, error = post(server, f"{verb}_lora_adapter", **body)
            assert (got, words in error["error"]["message"]) == (status, True), error
            assert "\n" not in error["error"]["message"]
        assert [one.result() for one in asked] == [merged["one"]] * 6


def test_nothing_is_loaded_where_the_operator_does_not_say_so(folders: dict[str, Path]) -> None:
    llm = LLM(str(folders["base"]), device="cpu", kv_cache_bytes=1 << 20, max_adapters=1)
    with running(llm.engine) as server:
        for verb in ("load", "unload"):
            status, error = post(server, f"{verb}_lora_adapter", lora_name="one", lora_path=str(folders["one"]))
            assert (status, error["error"]["code"]) == (403, "adapters_not_allowed")
    plain = LLM(str(folders["base"]), device="cpu", kv_cache_bytes=1 << 20)
    with running(plain.engine, adapter_dir=str(folders["home"])) as server:
        status, error = post(server, "load_lora_adapter", lora_name="one", lora_path="adapters/one")
        assert (status, "--max-adapters" in error["error"]["message"]) == (400, True)
        status, error = post(server, "completions", model="one", prompt=PROMPT)
        assert (status, error["error"]["code"]) == (404, "model_not_found")


def test_an_adapter_cannot_have_the_models_name(folders: dict[str, Path]) -> None:
    llm = LLM(str(folders["base"]), device="cpu", kv_cache_bytes=1 << 20, adapters=(f"base={folders['one']}",))
    with pytest.raises(ValueError, match="an adapter and the model are both named 'base'"):
        Served.of(llm.engine, "base")


def test_an_engine_that_is_started_again_has_the_adapters_of_the_one_before(folders: dict[str, Path]) -> None:
    """Those that came while it ran, and not those that went; a folder that is gone is left out."""

    def desk() -> AdapterDesk:
        llm = LLM(
            str(folders["base"]), device="cpu", kv_cache_bytes=1 << 20, max_adapters=3, adapters=(f"one={folders['one']}",)
        )  # fmt: skip
        return AdapterDesk(llm.engine, folders["home"])

    def names(desk: AdapterDesk) -> list[str]:
        desk.ask(b"f", 1, "list", "", "")
        return next(answer for _, number, answer in desk.answers() if number == 1)

    gone = folders["home"] / "gone"
    shutil.copytree(folders["two"], gone)
    first = desk()
    for number, (name, folder) in enumerate((("two", folders["two"]), ("three", gone)), 2):
        first.ask(b"f", number, "load", name, str(folder))
    answered: list[tuple[bytes, int, Any]] = []
    while len(answered) < 2:
        answered += first.answers()
    first.ask(b"f", 4, "unload", "one", "")
    answered += first.answers()
    assert [(number, answer) for _, number, answer in answered] == [(2, None), (3, None), (4, None)]
    assert names(first) == ["two", "three"]
    shutil.rmtree(gone)
    assert names(desk()) == ["two"]
    first.ask(b"f", 5, "unload", "four", "")
    ((_, _, error),) = first.answers()
    assert isinstance(error, UnknownAdapter)
    with pytest.raises(WireError, match="wanted one of list, load, unload"):
        first.ask(b"f", 6, "burn", "", "")
    (folders["home"] / "adapters.json").unlink()


def test_replicas_have_the_same_adapters(folders: dict[str, Path], merged: dict[str, str]) -> None:
    """Loaded on all or on none; and one that was away comes back to what the others have."""
    options: dict[str, Any] = {"device": "cpu", "max_seqs": 4, "page_size": 8, "kv_cache_bytes": 1 << 20}
    home = {"adapter_dir": str(folders["home"] / "adapters")}
    given = (f"one={folders['one']}",)
    large = LLM(str(folders["base"]), **options, max_adapters=2, adapters=given)
    small = LLM(str(folders["base"]), **options, adapters=given)  # has room for no other
    with running(large.engine, **home) as first, running(small.engine, **home) as second:
        urls = [first.url]

        async def all_of_it() -> None:
            async with aiohttp.ClientSession() as session:
                fan = ReplicaAdapters(ServerConfig(**home), given, lambda: urls, lambda: session)
                two = b'{"lora_name": "two", "lora_path": "two"}'
                assert (await fan.load(two)).status_code == 200
                assert text(first, "two") == merged["two"]
                assert (await fan.unload(b'{"lora_name": "two"}')).status_code == 200
                urls.append(second.url)
                refused = await fan.load(two)
                assert (refused.status_code, b"no more: unload one" in bytes(refused.body)) == (400, True)
                assert post(first, "completions", model="two", prompt=PROMPT)[0] == 404, "it is on none"
                assert (await fan.unload(b'{"lora_name": "one"}')).status_code == 200
                assert (await fan.load(two)).status_code == 200
                assert [text(server, "two") for server in (first, second)] == [merged["two"]] * 2
                post(second, "unload_lora_adapter", lora_name="two")  # as if it had been started again
                post(second, "load_lora_adapter", lora_name="one", lora_path="one")
                await fan.prepare(second.url)
                assert text(second, "two") == merged["two"]
                assert post(second, "completions", model="one", prompt=PROMPT)[0] == 404
                urls.append("http://127.0.0.1:9")
                assert (await fan.load(b'{"lora_name": "x", "lora_path": "two"}')).status_code in (400, 503)
                with pytest.raises(ApiError, match="wanted a folder below"):
                    await fan.load(b'{"lora_name": "x", "lora_path": "/etc"}')

        asyncio.run(all_of_it())
