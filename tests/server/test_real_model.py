"""The server around a real, tiny model on the CPU: what comes out of a busy server is what comes out of an idle one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.fake_engine import Running, events, running
from tests.server.tiny_model import write_tiny_model
from tilewright.engine.llm import LLM

PROMPTS = ["Once upon a time", "Once upon a hill", "Call me", "", "été", "a" * 60, "Once upon a time there", "b"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    llm = LLM(str(folder), device="cpu", max_seqs=4, max_tokens_per_step=64, page_size=8, kv_cache_bytes=1 << 20)
    with running(llm.engine) as server:
        yield server


def text(server: Running, prompt: str, **fields: object) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()["choices"][0]["text"]
    return "".join(event["choices"][0]["text"] for event in events(response.text)[:-1])


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=["greedy", "seeded"])
def test_company_changes_nothing(server: Running, fields: dict[str, object]) -> None:
    alone = [text(server, prompt, **fields) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for stream in (False, True):
            together = list(pool.map(lambda prompt: text(server, prompt, stream=stream, **fields), PROMPTS))  # noqa: B023
            assert together == alone
    server.until_idle()


def test_echoed_logprobs_are_those_of_the_generation(server: Running) -> None:
    body = {"prompt": "Call me", "max_tokens": 6, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    made = httpx.post(url, json=body, timeout=60).json()["choices"][0]["logprobs"]
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "Call me"}).json()["tokens"]
    whole = httpx.post(url, json={**body, "echo": True}, timeout=60).json()["choices"][0]["logprobs"]
    assert whole["token_logprobs"][0] is None
    assert whole["tokens"][len(ids) :] == made["tokens"]
    assert whole["token_logprobs"][len(ids) :] == pytest.approx(made["token_logprobs"], abs=1e-4)
    assert max(whole["token_logprobs"][1:]) <= 0
