"""How many processes and threads a server uses by default."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.engine.config import EngineConfig
from tilewright.server import cores
from tilewright.server.config import ServerConfig
from tilewright.server.cores import SMALL_BYTES, fronts_of, share_cores


@pytest.fixture(params=[1, 2, 8], ids="{} cores".format)
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The cores of the machine."""
    monkeypatch.setattr(cores, "cpu", lambda: SimpleNamespace(cores=request.param))
    return request.param


def test_a_language_model_alone_has_a_front_where_there_is_a_core_for_it(count: int) -> None:
    engine = EngineConfig(model="bookworm")
    assert fronts_of(ServerConfig(), engine, beside=False) == (count > 1)
    assert fronts_of(ServerConfig(fronts=0), engine, beside=False) == 0
    assert fronts_of(ServerConfig(fronts=3), engine, beside=False) == 3


@pytest.mark.parametrize("fields", [{"replicas": 2}, {"ray": True}, {"shared_memory": True}], ids=str)
def test_other_servers_have_none(fields: dict[str, Any], count: int) -> None:
    engine = EngineConfig(model="bookworm")
    assert fronts_of(ServerConfig(**fields), engine, beside=False) == 0
    assert fronts_of(ServerConfig(), engine, beside=True) == 0
    assert fronts_of(ServerConfig(), None, beside=True) == 0
    assert fronts_of(ServerConfig(), EngineConfig(model="bookworm", tp=2), beside=False) == 0


@dataclass
class Loaded:
    """A model of so many bytes, on the CPU or not."""

    weights: int
    asynchronous: bool = False

    @property
    def plan(self) -> SimpleNamespace:
        return SimpleNamespace(weights_bytes=self.weights)

    @property
    def engine(self) -> SimpleNamespace:
        return SimpleNamespace(runner=SimpleNamespace(asynchronous=self.asynchronous))


@pytest.mark.parametrize(
    ("model", "chosen", "leaves"),
    [
        (Loaded(SMALL_BYTES), False, True),
        (Loaded(SMALL_BYTES + 1), False, False),
        (Loaded(SMALL_BYTES, asynchronous=True), False, False),
        (Loaded(SMALL_BYTES), True, False),
    ],
    ids=["small", "large", "on a GPU", "threads chosen"],
)
def test_a_small_model_on_a_cpu_leaves_a_core_to_http(
    model: Any, chosen: bool, leaves: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = count
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    set_to = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", str(count))
    share_cores(model)
    assert set_to == ([max(1, count - 1)] if leaves else [])
