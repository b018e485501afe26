"""Some random requests; `python -m tests.server.v2.fuzz` sends as many as one likes."""

import pytest

from tests.server.v2.fuzz import run


@pytest.mark.parametrize("fronts", [0, 2])
def test_random_requests_hurt_nobody(fronts: int) -> None:
    found = run(count=150, seed=0, fronts=fronts)
    assert not found.wrong, "\n".join(found.wrong)
    assert {200, 400} <= set(found.statuses)
