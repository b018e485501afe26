"""A server under twice the load that it can answer; `python -m tests.server.overload` does it to the embedded model, too."""

import asyncio
import random

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
