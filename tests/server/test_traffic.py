"""Mixed traffic against a real server: some seconds here, minutes with `make test-long`."""

import pytest

from tests.server.traffic import REQUESTS, traffic


def test_answers_do_not_depend_on_traffic() -> None:
    summary = traffic(4, clients=12, requests=REQUESTS[::3], options=("--fronts", "0"))
    assert not summary.failures
    assert summary.answers >= 10
    assert summary.left > 0


@pytest.mark.long
def test_nor_on_fronts() -> None:
    summary = traffic(8, clients=12, requests=REQUESTS[::3], options=("--fronts", "2"))
    assert not summary.failures
    assert summary.answers >= 10


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_minutes_of_traffic() -> None:
    summary = traffic(20 * 60)
    assert not summary.failures
    assert summary.preemptions >= 1000
