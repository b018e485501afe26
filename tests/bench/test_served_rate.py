"""The rate of a model without its server, measured in its own process when another asks for it."""

import threading
from pathlib import Path
from typing import Any

import torch

from tilewright.bench import served_rate
from tilewright.host.loaded import Loaded
from tilewright.host.tensors import Signature, TensorSpec

SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("output", "FP32", (-1, 4)),), True)


def test_the_process_that_has_the_model_answers(tmp_path: Path, monkeypatch: Any) -> None:
    loaded = Loaded(lambda x: 2 * x, SIGNATURE, torch.device("cpu"), ())
    monkeypatch.setattr(served_rate, "environment", lambda card: {"card": card})
    monkeypatch.setattr(served_rate.gc, "get_objects", lambda: [1, loaded])
    served_rate.wait_to_be_asked(tmp_path, torch.ones(1, 4))
    found = list(served_rate.ask(tmp_path, [2, 8], 0.05, 20))
    assert [(one["what"], one.get("rows"), one.get("tensors_in")) for one in found] == [
        ("offline", 2, "device"),
        ("offline", 2, "host"),
        ("offline", 8, "device"),
        ("offline", 8, "host"),
        ("environment", None, None),
    ]
    assert all(one["rows_per_s"] > 0 for one in found[:-1])


def test_a_process_without_a_model_and_one_that_does_not_answer(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(served_rate.gc, "get_objects", list)
    (only,) = served_rate.ask(tmp_path, [2], 0.05, 0.3)
    assert only == {"what": "failed", "why": "0 of 2 rates without requests are there after 0 s"}
    thread = threading.Thread(target=served_rate._answer, args=(tmp_path, torch.ones(1, 4)))
    thread.start()
    thread.join()
    (only,) = served_rate.ask(tmp_path, [2], 0.05, 20)
    assert only["why"] == "the rate without requests cannot be measured: StopIteration: "
