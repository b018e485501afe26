"""A server under twice the load that it can answer; `python -m tests.server.overload` does it to the embedded model, too."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.host.fakes import Makes
from tests.server.fake_engine import fake_engine, running
from tests.server.overload import four_numbers, run
from tests.server.v2.running import double, serving
from tilewright.host.config import ModelConfig


@pytest.mark.long
def test_twice_the_load_is_answered_in_time_or_refused() -> None:
    """Steps of 100 ms that cost no processor, 64 requests at once: 40 requests a second."""
    with running(fake_engine(delay_s=0.1, max_seqs=64, max_waiting=4096, pages=4096)) as server:
        assert asyncio.run(run(server.port, 60.0, random.Random(0)))


@pytest.mark.long
def test_twice_the_load_of_an_ordinary_model() -> None:
    """Batches of 8 that take 0.2 s: 40 requests a second. At least 90 % of that is answered within 5 s."""
    models = {"m": ModelConfig(source="a:b", max_batch=8)}
    with serving(models, makes=Makes(double, seconds=0.2)) as server:
        assert asyncio.run(run(server.port, 60.0, random.Random(0), four_numbers, wanted=0.9))


def test_a_submission_that_fails_unheard_of_costs_those_behind_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive during a step are submitted together; a mistake in one of them is its own."""
    engine = fake_engine(delay_s=0.1)
    submit = engine.submit

    def broken(prompt: list[int], *args: object, **named: object) -> str:
        if ord("%") in prompt:
            raise LookupError("a mistake of the engine's")
        return submit(prompt, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "submit", broken)
    with running(engine) as server, ThreadPoolExecutor(6) as pool:
        prompts = ["a", "b", "a%", "b", "%", "a"]
        asked = [pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": p, "max_tokens": 2}) for p in prompts]
        assert [one.result().status_code for one in asked] == [500 if "%" in p else 200 for p in prompts]
        server.until_idle()
