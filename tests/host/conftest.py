"""Fixtures of several files."""

from collections.abc import Iterator

import pytest

from tests.host.late import Makes


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Makes]:
    """Makes models' processes, each of which is a thread with a stand-in for a GPU."""
    makes = Makes(monkeypatch)
    yield makes
    for one in makes.made:
        one.close()
