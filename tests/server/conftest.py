"""Fixtures of the server's tests."""

from collections.abc import Iterator

import pytest

from tests.server import fake_engine


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
