"""Random requests hurt nobody: a short run here, a long one by `python -m tests.server.fuzz --count 10000`."""

import pytest

from tests.server.fuzz import fuzz


@pytest.mark.usefixtures("long_shape")
def test_two_hundred_requests() -> None:
    found = fuzz(200, seed=0)
    assert not found.wrong
    assert found.statuses[200] > 30, "not all of them are refused"
    assert found.statuses[400] > 30, "not all of them are fine"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_requests() -> None:
    assert not fuzz(10_000, seed=1).wrong
