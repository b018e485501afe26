"""The memory of a model on a GPU is locked while it is mapped, and only then. The GPU is a fake that records the calls."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.host import worker
from tilewright.host.arena import Arena
from tilewright.host.config import ModelConfig
from tilewright.host.tensors import Signature, TensorSpec

ROWS = TensorSpec("x", "FP32", (-1, 4))
REQUEST = b'{"parts": [2], "inputs": [[0, [2, 4]]]}'


def instance(width: int) -> worker._Instance:
    """An instance whose outputs are so many times as wide as its inputs."""
    loaded: Any = SimpleNamespace(
        device=torch.device("cuda"),
        signature=Signature((ROWS,), (TensorSpec("y", "FP32", (-1, -1)),), True),
        moved=lambda inputs: inputs,
        padded=lambda rows: rows,
        call=lambda inputs: [inputs[0].repeat(1, width)],
    )
    return worker._Instance(loaded, ModelConfig(source="a:b"), Arena.create(192), 128)


def test_memory_that_grows_is_unlocked_before_and_locked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[tuple[str, int, int]]()

    def locked(memory: Tensor) -> Any:
        where = memory.data_ptr(), len(memory)
        log.append(("lock", *where))
        return lambda: log.append(("unlock", *where))

    monkeypatch.setattr(worker, "page_locked", locked)
    one = instance(width=100)
    one.answer(REQUEST)
    one.answer(REQUEST)
    assert [(what, size) for what, _, size in log] == [("lock", 192), ("unlock", 192), ("lock", 128 + 3200)]
    assert log[0][1] == log[1][1]
    at = torch.frombuffer(one._arena.view, dtype=torch.uint8).data_ptr()
    assert log[2][1] == at, "what is locked is not what is mapped"


def test_memory_that_cannot_be_locked_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(memory: Tensor) -> Any:
        raise OSError("CUDA cannot lock it")

    monkeypatch.setattr(worker, "page_locked", refused)
    one = instance(width=1)
    one._arena.view[:32] = torch.arange(8.0).numpy().tobytes()
    said = one.answer(REQUEST)
    assert b'"errors": {}' in said
    assert bytes(one._arena.view[128:160]) == torch.arange(8.0).numpy().tobytes()
    assert "copied to the GPU more slowly: CUDA cannot lock it" in caplog.text
