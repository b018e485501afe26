"""The memory of a model on a GPU is locked while it is mapped, and only then. The GPU is a fake that records the calls."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.host import computing
from tilewright.host.arena import SECONDS, Arena
from tilewright.host.computing import Computing
from tilewright.host.config import ModelConfig
from tilewright.host.intake import Arrived
from tilewright.host.loaded import Loaded
from tilewright.host.tensors import Signature, TensorSpec

ROWS = TensorSpec("x", "FP32", (-1, 4))
REQUEST = b'{"parts": [2], "inputs": [[0, [2, 4]]]}'


class OnDevice(Loaded):
    """A model on a GPU which is the host."""

    def moved(self, inputs: list[Tensor]) -> list[Tensor]:
        return inputs

    def mark(self) -> None:
        return None

    def wait(self, mark: object = None) -> None:
        pass


def memory(width: int) -> Computing:
    """That of a model whose outputs are so many times as wide as its inputs."""
    signature = Signature((ROWS,), (TensorSpec("output", "FP32", (-1, -1)),), True)
    loaded = OnDevice(lambda x: x.repeat(1, width), signature, torch.device("cuda"), ())
    return Computing(loaded, ModelConfig(source="a:b"), Arena.create(192), 64)


def answered(one: Computing) -> bytes:
    """The answer to a batch."""
    batch = one.begin(Arrived(0, REQUEST, {}, None, 0), marked=False)
    one.end(batch)
    return one.answer(batch)[SECONDS.size :]


def test_memory_that_grows_is_unlocked_before_and_locked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[tuple[str, int, int]]()

    def locked(memory: Tensor) -> Any:
        where = memory.data_ptr(), len(memory)
        log.append(("lock", *where))
        return lambda: log.append(("unlock", *where))

    monkeypatch.setattr(computing, "page_locked", locked)
    one = memory(width=100)
    assert answered(one) == answered(one)
    assert [(what, size) for what, _, size in log] == [("lock", 192), ("unlock", 192), ("lock", 128 + 3200)]
    assert log[0][1] == log[1][1]
    at = torch.frombuffer(one._arena.view, dtype=torch.uint8).data_ptr()
    assert log[2][1] == at, "what is locked is not what is mapped"


def test_memory_that_cannot_be_locked_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(memory: Tensor) -> Any:
        raise OSError("CUDA cannot lock it")

    monkeypatch.setattr(computing, "page_locked", refused)
    one = memory(width=1)
    one._arena.view[:32] = torch.arange(8.0).numpy().tobytes()
    said = answered(one)
    assert b'"errors": {}' in said
    assert bytes(one._arena.view[128:160]) == torch.arange(8.0).numpy().tobytes()
    assert "copied to the GPU more slowly: CUDA cannot lock it" in caplog.text
