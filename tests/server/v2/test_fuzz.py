"""Some random requests; `python -m tests.server.v2.fuzz` sends as many as one likes."""

from tests.server.v2.fuzz import run


def test_random_requests_hurt_nobody() -> None:
    found = run(count=150, seed=0)
    assert not found.wrong, "\n".join(found.wrong)
    assert {200, 400} <= set(found.statuses)
