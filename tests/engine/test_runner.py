"""The runner on a CPU: what is in force when it launches. What it computes is test_invariance.py's."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from tests.engine.test_plan import TINY
from tilewright.engine import runner as runner_module
from tilewright.engine.config import EngineConfig
from tilewright.engine.llm import load_engine
from tilewright.engine.request import SamplingParams
from tilewright.engine.step import Step
from tilewright.engine.tickets import Ticket


def test_whatever_thread_steps_it_launches_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current device, and a thread begins with device 0."""
    engine = load_engine(TINY, EngineConfig(device="cpu", kv_cache_bytes=1 << 20))
    runner = engine.runner
    current: list[torch.device] = []
    seen: list[tuple[str, bool]] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def note(what: str) -> None:
        seen.append((what, current == [runner.device]))

    monkeypatch.setattr(runner_module, "on_device", on_device)
    runner.model.register_forward_pre_hook(lambda *_: note("forward"))
    logits = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda hidden: (note("logits"), logits(hidden))[1])

    def work() -> None:
        engine.submit([1, 2, 3], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1))
        while engine.has_work:
            engine.step()
        arrived = SimpleNamespace(synchronize=lambda: note("wait"))
        runner.collect(Ticket(Step.of(()), None, arrived))  # type: ignore[arg-type]

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert {what for what, _ in seen} == {"forward", "logits", "wait"}
    assert all(right for _, right in seen)
    assert current == []


def test_log_probabilities_take_no_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only edits do. And the samples and log-probabilities are the same beside a row that edits its logits."""
    engine = load_engine(TINY, EngineConfig(device="cpu", kv_cache_bytes=1 << 20))
    head, used = engine.runner._head, list[str]()
    for tail in head.tails:
        name = tail.__name__
        monkeypatch.setattr(head, name, lambda *args, name=name, tail=tail: (used.append(name), tail(*args))[1])

    def run(edits: bool) -> list[tuple[int, float]]:
        used.clear()
        common = {"max_tokens": 6, "ignore_eos": True, "seed": 3, "temperature": 1.0}
        explained = engine.submit([1, 2, 3], SamplingParams(**common, logprobs=2))  # type: ignore[arg-type]
        if edits:
            engine.submit([4, 5], SamplingParams(**common, frequency_penalty=0.5))  # type: ignore[arg-type]
        found: list[tuple[int, float]] = []
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                if delta.request_id == explained:
                    found += [(token, entry.logprob) for token, entry in zip(delta.token_ids, delta.logprobs, strict=True)]
        return found

    alone = run(False)
    assert used == ["scored"] * 6
    beside = run(True)
    assert used == ["full"] * 6
    assert [token for token, _ in alone] == [token for token, _ in beside]
    assert torch.allclose(*(torch.tensor([value for _, value in pairs]) for pairs in (alone, beside)), atol=1e-5)


def compiled() -> None:
    """What Triton reports when it has compiled a kernel."""
    source, target = SimpleNamespace(name="kernel"), SimpleNamespace(arch=90)
    if knobs.compilation.listener is not None:
        knobs.compilation.listener(src=source, metadata={"target": target}, metadata_group={}, times=None, cache_hit=False)


@pytest.mark.parametrize("strict", [True, False])
def test_a_kernel_is_late_in_a_step_alone(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """While this engine lives others may load, or compile what they like."""
    engine = load_engine(TINY, EngineConfig(device="cpu", kv_cache_bytes=1 << 20, strict=strict))
    engine.runner.warmup(lambda words: None)
    compiled()
    assert caplog.text == ""
    engine.runner.model.register_forward_pre_hook(lambda *_: compiled())
    engine.submit([1, 2, 3], SamplingParams(max_tokens=1))
    (delta,) = engine.step()
    assert "kernel was compiled after the start" in caplog.text
    assert (delta.finish_reason, "LateCompile" in (delta.error or "")) == (("error", True) if strict else ("length", False))
    caplog.clear()
    del engine
    gc.collect()
    compiled()
    assert caplog.text == ""
