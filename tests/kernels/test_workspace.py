"""Counters of split kernels: whose they are while a graph is captured."""

import pytest
import torch

from tilewright.kernels.launch import counters as workspace
from tilewright.kernels.launch.counters import own_tickets, tickets

CPU = torch.device("cpu")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a CUDA graph is captured, on a device that has none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(workspace, "_TICKETS", {})


def test_a_graph_has_its_own_counters(capturing: None) -> None:
    with own_tickets(CPU, 8) as own:
        assert tickets(CPU, 8) is own
        with own_tickets(CPU, 16) as inner:
            assert tickets(CPU, 9) is inner
    assert tickets(CPU, 8) is not own


def test_a_launch_that_wants_more_than_its_graph_has_is_refused(capturing: None) -> None:
    wanted = "needs 9 counters, but the graph has 8; capture it with own_tickets\\(device, 9\\) or more"
    with own_tickets(CPU, 8), pytest.raises(RuntimeError, match=wanted):
        tickets(CPU, 9)
