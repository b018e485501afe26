"""/v1/embeddings, /v1/score and /v1/rerank over HTTP: by OpenAI's client, against `LLM`, in company, and with bad input."""

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.models.folders import rewrite_config
from tests.server import fake_engine
from tests.server.fake_engine import behind_a_socket
from tests.server.tiny_encoder import write_encoder
from tests.server.tiny_model import write_tiny_model
from tests.server.victim import server_process, victim
from tilewright import LLM
from tilewright.engine.pooling import Pass
from tilewright.server.app import create_app
from tilewright.server.config import ServerConfig
from tilewright.server.front import front_app
from tilewright.server.prompts import Served
from tilewright.server.serve import HttpServer, bind, url_of

TEXTS = ["Once upon a time", "b", "a" * 60, "Call me", "été"]


@contextmanager
def serving(llm: LLM, run_pass: Callable[[Pass], np.ndarray] | None = None, **config: Any) -> Iterator[str]:
    """The address of a server around a model, in a thread."""
    settings = ServerConfig(port=0, **config)
    assert llm.pooler is not None
    served = Served.of(llm.engine, "tiny", pooled=llm.pooler.pooled, generates=llm.generates)
    listener = bind(settings)
    run_pass = run_pass or llm.pooler.run
    with ExitStack() as stack:
        if fake_engine.shape_now == "process":
            _, address = stack.enter_context(behind_a_socket(llm.engine, served, run_pass))
            app = front_app(address, settings, served)
        else:
            app = create_app(llm.engine, served, settings, run_pass)
        server = HttpServer(app, listener)
        server.config.timeout_graceful_shutdown = 2
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    rewrite_config(folder, is_matryoshka=True)
    return LLM(str(folder), device="cpu", max_seqs=4, max_tokens_per_step=64, kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def url(decoder: LLM, shape: str) -> Iterator[str]:
    with serving(decoder, max_inputs=40) as url:
        yield url


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_encoder(tmp_path_factory.mktemp("models") / "cross", labels=1)), device="cpu")


def post(url: str, path: str, **body: Any) -> Any:
    response = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_openai_client(url: str, decoder: LLM) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    want = decoder.embed(TEXTS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        # The client asks for base64 where nothing is said.
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = client.embeddings.create(model="tiny", input=TEXTS, **options)
            rows = [
                np.frombuffer(base64.b64decode(one.embedding), np.float32) if isinstance(one.embedding, str) else one.embedding
                for one in found.data
            ]
            assert np.abs(np.array(rows) - want).max() < 1e-6
            assert [one.index for one in found.data] == list(range(5))
        ids = [decoder.tokenizer.encode(text) for text in TEXTS]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        for given, rows in ((ids, want), (ids[3], want[3:4]), (TEXTS[3], want[3:4])):
            found = client.embeddings.create(model="tiny", input=given)
            assert np.abs(np.array([one.embedding for one in found.data]) - rows).max() < 1e-5
        cut = client.embeddings.create(model="tiny", input=TEXTS, dimensions=7)
        assert np.abs(np.array([one.embedding for one in cut.data]) - decoder.embed(TEXTS, dimensions=7)).max() < 1e-5
        with pytest.raises(openai.BadRequestError, match="wanted 1 to 32"):
            client.embeddings.create(model="tiny", input="a", dimensions=33)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")


def test_company_changes_nothing(url: str) -> None:
    """Many requests at once, of many lengths, for numbers and for text: each gets what it gets alone."""

    def embed(i: int) -> Any:
        return post(url, "embeddings", input=[*TEXTS[i % 3 :], "x" * (i % 50 + 1)])["data"]

    def write(i: int) -> Any:
        return post(url, "completions", prompt=TEXTS[i % 5], max_tokens=9, temperature=0, ignore_eos=True)["choices"][0]["text"]

    alone = [embed(i) for i in range(12)], [write(i) for i in range(5)]
    with ThreadPoolExecutor(12) as threads:
        numbers, texts = threads.map(embed, range(12)), threads.map(write, range(10))
        for found, wanted in zip(numbers, alone[0], strict=True):
            for one, want in zip(found, wanted, strict=True):
                assert np.abs(np.array(one["embedding"]) - want["embedding"]).max() < 1e-5
        for i, text in enumerate(texts):
            assert text == alone[1][i % 5]


def test_a_pair_is_scored_together_by_a_head(cross: LLM) -> None:
    documents = ["a man is playing", "cats", "rates raised", "the street"]
    want = cross.score("cats", documents)
    with serving(cross) as url:
        found = post(url, "score", text_1="cats", text_2=documents)
        assert found["object"] == "list"
        assert [one["score"] for one in found["data"]] == pytest.approx(want, abs=1e-6)
        assert post(url, "score", text_1=documents, text_2=documents)["data"][1]["score"] == pytest.approx(want[1], abs=1e-6)
        found = post(url, "rerank", query="cats", documents=[{"text": documents[0]}, *documents[1:]], top_n=3)
        assert [one["index"] for one in found["results"]] == sorted(range(4), key=lambda i: -want[i])[:3]
        best = found["results"][0]
        assert best["relevance_score"] == pytest.approx(max(want), abs=1e-6)
        assert best["document"] == {"text": documents[best["index"]]}
        assert found["usage"]["total_tokens"] == sum(5 + len(text.split()) - 1 for text in documents)
        assert "document" not in post(url, "rerank", query="a", documents=["b"], return_documents=False)["results"][0]
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert response.status_code == 400
        assert "is an encoder, which generates no text; use /v1/embeddings" in response.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/live").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert np.array(post(url, "embeddings", input="cats")["data"][0]["embedding"]).shape == (32,)


def test_a_decoder_scores_by_cosines(url: str, decoder: LLM) -> None:
    want = decoder.score("Call me", TEXTS)
    assert want[3] == pytest.approx(1, abs=1e-5)
    assert [one["score"] for one in post(url, "score", text_1="Call me", text_2=TEXTS)["data"]] == pytest.approx(want, abs=1e-5)
    ranked = post(url, "rerank", query="Call me", documents=TEXTS)["results"]
    assert ranked[0]["index"] == 3
    assert [one["index"] for one in ranked] == sorted(range(5), key=lambda i: -want[i])


REFUSED: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "no input": ("embeddings", {}, "input", "input is missing"),
    "no inputs": ("embeddings", {"input": []}, "input", "input is an empty list, wanted a string"),
    "an empty list of ids": ("embeddings", {"input": [[]]}, "input", "none of them empty"),
    "a number": ("embeddings", {"input": 3}, "input", "input is of type int"),
    "words and numbers": ("embeddings", {"input": ["a", 3]}, "input", "input is a list of int and str"),
    "true": ("embeddings", {"input": [True]}, "input", "input is a list of bool"),
    "an id too large": ("embeddings", {"input": [[1], [10**20]]}, "input", "has the token id 100000000000000000000"),
    "too long": ("embeddings", {"input": ["a", "a" * 130]}, "input.1", "a text has 13[0-9] tokens, wanted at most 128"),
    "far too long": ("embeddings", {"input": "a" * 1_000_000}, "input", "tokens"),
    "too many": ("embeddings", {"input": ["a"] * 41}, "input", "input has 41 inputs, wanted at most 40"),
    "a surrogate": ("embeddings", {"input": "\ud800"}, None, "the body is not valid JSON: unexpected end of hex escape"),
    "a format": ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "wanted 'float' or 'base64'"),
    "no dimensions": ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0, wanted at least 1"),
    "dimensions": ("embeddings", {"input": "a", "dimensions": "8"}, "dimensions", "dimensions is '8', wanted"),
    "no text": ("score", {"text_1": "a"}, "text_2", "text_2 is missing, empty or not text"),
    "unequal": ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "2 queries and 3 documents"),
    "a text that is none": ("score", {"text_1": "a", "text_2": ["b", 4]}, "text_2.1", "is of type int, wanted a text"),
    "pair too long": ("score", {"text_1": "a", "text_2": "b" * 200}, "text_2", "wanted at most 128"),
    "two queries": ("rerank", {"query": ["a", "b"], "documents": ["c"]}, "query", "query has 2 texts, wanted one"),
    "no documents": ("rerank", {"query": "a", "documents": []}, "documents", "documents is missing, empty"),
    "a document": ("rerank", {"query": "a", "documents": [{"body": "b"}]}, "documents.0", "of type NoneType, wanted a text"),
    "many documents": ("rerank", {"query": "a", "documents": ["b"] * 41}, "documents", "has 41 texts, wanted at most 40"),
    "top_n": ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n is 0, wanted at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(url: str, name: str) -> None:
    path, body, field, message = REFUSED[name]
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{url}/v1/{path}", content=json.dumps(body), headers=headers, timeout=30)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert re.search(message, error["message"]), error["message"]


def test_who_leaves_takes_his_texts_along(decoder: LLM) -> None:
    """A client that goes away in the middle: its other texts do not go through the model."""
    assert decoder.pooler is not None
    run, passes = decoder.pooler.run, []

    def slowly(work: Pass) -> np.ndarray:
        passes.append(work)
        time.sleep(0.1)
        return run(work)

    with serving(decoder, run_pass=slowly) as url:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{url}/v1/embeddings", json={"input": ["a" * 120] * 100}, timeout=httpx.Timeout(5, read=0.5))
        assert len(post(url, "embeddings", input=TEXTS)["data"]) == 5
        assert 1 < len(passes) < 50  # of the 100 passes that it had asked for


def test_a_fault_of_the_model_ends_its_own_requests(decoder: LLM) -> None:
    assert decoder.pooler is not None
    run = decoder.pooler.run

    def faulty(work: Pass) -> np.ndarray:
        if any(len(text.ids) == 14 for text in work.texts):
            raise RuntimeError("out of memory")
        rows = run(work)
        return rows * np.nan if len(work.texts[0].ids) == 15 else rows

    with serving(decoder, run_pass=faulty) as url:
        for count, code in ((14, "internal_error"), (15, "not_numbers")):
            response = httpx.post(f"{url}/v1/embeddings", json={"input": [5] * count}, timeout=20)
            assert (response.status_code, response.json()["error"]["code"]) == (500, code)
        assert len(post(url, "embeddings", input=TEXTS)["data"]) == 5
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.long
def test_a_stream_does_not_feel_it(tmp_path: Path) -> None:
    """The command line serves a decoder's text and its embeddings: a stream goes on while clients send all they may."""
    folder = write_tiny_model(tmp_path / "tiny")
    body = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    with server_process("tilewright.cli", "serve", str(folder), "--device", "cpu", "--port", "0") as server:
        alone = json.loads(server.post(**body)[2])["choices"][0]["text"]
        with victim(server.port, body, alone), ThreadPoolExecutor(4) as threads:
            done = threads.map(
                lambda _: server.post("/v1/embeddings", input=["a" * 100] * 200, encoding_format="base64"), range(16)
            )
            assert {status for status, _, _ in done} == {200}
        assert not [line for line in server.lines if "Traceback" in line]
