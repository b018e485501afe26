"""torch's own calls as rivals of an optimised graph: they compute the same, and the faster one answers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewright.fuse import rivals
from tilewright.fuse.report import Report
from tilewright.fuse.rivals import fastest, torchs_calls
from tilewright.fuse.trace import trace


class Network(nn.Module):
    """A convolution, its transpose, a view of their result, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2)
        self.table, self.head = nn.Embedding(10, 5), nn.Linear(4 * 16 + 5, 6)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.up(torch.relu(self.norm(self.down(x))))
        return self.head(torch.cat([h.reshape(len(x), -1), self.table(ids)], 1))


def test_torchs_calls_compute_what_the_model_does() -> None:
    model = Network().eval()
    given = torch.randn(2, 3, 8, 8), torch.tensor([1, 9])
    traced = trace(model, given, {})
    before = {name: t.stride() for name, t in traced.state.items()}
    plain = torchs_calls(traced, torch.float32)
    with torch.no_grad():
        (got,) = plain(given[0].double(), given[1])
        torch.testing.assert_close(got, model(*given))
    assert plain.get_buffer("down.weight").is_contiguous(memory_format=torch.channels_last)
    assert {name: t.stride() for name, t in traced.state.items()} == before, "what was traced is as it was"


@pytest.mark.parametrize(
    ("ours", "graph", "inductor", "answers"),
    [
        (1.0, 2.0, 0.5, ""),  # so clear that Inductor is not asked
        (1.0, 1.2, 1.1, ""),
        (1.02, 1.2, 1.0, ""),  # not known to be slower
        (1.1, 1.0, 1.2, "a CUDA graph of torch's own calls"),
        (1.1, 1.0, 0.9, "Inductor on torch's own calls"),
        (1.1, 1.0, None, "a CUDA graph of torch's own calls"),
    ],
)
def test_the_fastest_answers(
    monkeypatch: pytest.MonkeyPatch, ours: float, graph: float, inductor: float | None, answers: str
) -> None:
    def compiled(compiler: Any) -> Any:
        if inductor is None:
            raise RuntimeError("no such kernel\nand a page more")
        return lambda tensors: inductor

    monkeypatch.setattr(rivals, "timed_us", lambda calls, device: [1e3 * call() for call in calls])
    made: Any = SimpleNamespace(device=None, graph=lambda: lambda tensors: graph, compiled=compiled)
    mine: Any = lambda tensors: ours  # noqa: E731
    found = Report()
    best, name = fastest(mine, [], made, found, lambda module, inputs: module)
    assert name == answers
    assert (best is mine) == (not answers)
    assert f"this graph {ours:.3f} ms" in found.facts["rivals"]
    assert ("no rival" in found.facts) == (inductor is None)
    assert ("Inductor" in found.facts["rivals"]) == (ours > graph / 1.5 and inductor is not None)


@pytest.mark.parametrize("words", ["out of memory\nand a page more", ""])
def test_a_rival_that_cannot_be_made_takes_nobody_down(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(words)

    monkeypatch.setattr(rivals, "timed_us", lambda calls, device: [1e3 * call() for call in calls])
    mine: Any = lambda tensors: 1.0  # noqa: E731
    for graph in (fails, lambda: lambda tensors: 1.0):
        found, made = Report(), SimpleNamespace(device=None, graph=graph, compiled=fails)
        best, name = fastest(mine, [], made, found, lambda module, inputs: module)  # type: ignore[arg-type]
        assert (best, name) == (mine, "")
        assert found.facts["no rival"].endswith(f"fails: {'out of memory' if words else 'RuntimeError'}")
