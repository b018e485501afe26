"""Fixtures of the server's tests."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
import uvicorn.server

from tests.server import fake_engine
from tilewright.server import engine_process

UVICORNS_S, OURS_S = 0.1, 0.01


@pytest.fixture(scope="session", autouse=True)
def _ends_sooner() -> Iterator[None]:
    """uvicorn looks ten times a second whether it should end, and waits as long again, at the end of hundreds of tests; and
    an engine's process looks twice a second."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(OURS_S if seconds == UVICORNS_S else seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "TICK_S", 0.05)
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        yield


@pytest.fixture(scope="session", autouse=True)
def _clients_are_patient() -> Iterator[None]:
    """httpx gives up after five seconds, which a machine that halts may take."""
    with pytest.MonkeyPatch.context() as patch:
        for asks in (
            httpx.Client.__init__,
            httpx.AsyncClient.__init__,
            httpx.get,
            httpx.post,
            httpx.stream.__wrapped__,
            httpx.request,
        ):
            patch.setitem(asks.__kwdefaults__, "timeout", httpx.Timeout(60))
        yield


@pytest.fixture(scope="module", params=fake_engine.SHAPES)
def shape(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything that uses this is tested twice: with the engine in the server's process, and behind the socket of its own."""
    yield from _set(request.param)


@pytest.fixture(scope="module", params=["thread", pytest.param("process", marks=pytest.mark.long)])
def long_shape(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same where the second time takes several processes, each of which takes seconds to start."""
    yield from _set(request.param)


def _set(shape: str) -> Iterator[str]:
    before, fake_engine.shape_now = fake_engine.shape_now, shape
    yield shape
    fake_engine.shape_now = before


@pytest.fixture(autouse=True)
def _one_shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that use neither run once, whatever those around them use."""
    if not {"shape", "long_shape"} & set(request.fixturenames):
        monkeypatch.setattr(fake_engine, "shape_now", "thread")
