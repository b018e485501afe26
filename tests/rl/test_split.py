"""A sampler in a process of its own: its versions are honest, their age is bounded, and its end ends the run."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.rl.test_loop import CLOCKED, TINY
from tilewright.models import Model
from tilewright.rl.batch import Sample, pack
from tilewright.rl.config import read_config
from tilewright.rl.gather import Ahead, Gathered, Gatherer
from tilewright.rl.loop import Trainer
from tilewright.rl.policies import small_model
from tilewright.rl.policy import logprobs_of
from tilewright.rl.rollout import Answer, Samples
from tilewright.rl.samplers import RemoteSamplers, check_devices, dealt
from tilewright.rl.shared_weights import SharedWeights

PUSHED = ("push_s", "push_gb_per_s", "push_waited_s")
APART = replace(TINY, sampler="cpu", updates=4)


def bare(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key not in (*CLOCKED, *PUSHED)}


def rows_of(trainer: Trainer) -> list[dict[str, float]]:
    return [bare(row) for row in trainer]


@pytest.mark.parametrize("handover", ["memory", "broadcast"])
def test_two_processes_give_the_numbers_of_one_and_the_samplers_end_is_the_runs(handover: str) -> None:
    with Trainer(replace(APART, sampler="")) as together:
        wanted = rows_of(together)
    with Trainer(replace(APART, updates=5, handover=handover)) as trainer:
        steps = iter(trainer)
        assert [bare(next(steps)) for _ in wanted] == wanted
        assert all(row["oldest"] == 0 for row in wanted)
        path = dies(trainer, steps)
        assert path.exists()
    assert not path.exists()


def dies(trainer: Trainer, steps: Iterator[dict[str, float]]) -> Path:
    """Kill the sampler: the next steps fail, with a sentence that names it. Returns what `place` it had."""
    assert isinstance(trainer.remote, RemoteSamplers)
    process = trainer.remote.samplers[-1].process
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ConnectionError, match=f"the sampler's process {process.pid} ended with code -9 before it"):
        list(steps)
    assert isinstance(process.args, list)
    return Path(str(process.args[-1]))


def test_a_sampler_that_ends_while_weights_are_on_their_way_is_noticed() -> None:
    with Trainer(replace(APART, handover="broadcast", sampler="cpu, cpu")) as trainer:
        assert isinstance(trainer.remote, RemoteSamplers)
        process = trainer.remote.samplers[1].process
        os.kill(process.pid, signal.SIGSTOP)  # it never comes to take them
        threading.Timer(0.5, lambda: os.kill(process.pid, signal.SIGKILL)).start()
        with pytest.raises(ConnectionError, match=f"process {process.pid} ended with code -9 before it received weights"):
            trainer.remote.push(1)


@pytest.mark.parametrize(
    ("handover", "own", "others", "words"),
    [
        ("memory", "cuda:0", ["cuda:0", "cpu"], ""),
        ("card", "cuda:0", ["cuda", "cuda:0"], ""),
        ("card", "cuda:0", ["cuda:1"], "on the same GPU, but they are on cuda:0, cuda:1; use"),
        ("card", "cpu", ["cpu"], "on the same GPU, but they are on cpu, cpu; use"),
        ("broadcast", "cpu", ["cpu", "cpu"], ""),
        ("broadcast", "cuda:0", ["cuda:1", "cuda:2"], ""),
        ("broadcast", "cuda:0", ["cuda:0"], "or only CPUs, but they are on cuda:0, cuda:0; use"),
        ("broadcast", "cuda:0", ["cuda:1", "cuda:1"], "a separate GPU for"),
        ("broadcast", "cpu", ["cuda:1"], "a separate GPU for"),
    ],
)
def test_devices_that_cannot_be_handed_weights_so(handover: str, own: str, others: list[str], words: str) -> None:
    refused = pytest.raises(ValueError, match=words) if words else nullcontext()
    with refused:
        check_devices(handover, torch.device(own), others)


@pytest.mark.parametrize("handover", ["memory", pytest.param("broadcast", marks=pytest.mark.long)])
def test_versions_are_honest_and_never_older_than_the_bound(handover: str) -> None:
    """The log-probabilities of each sample are those of the weights that its version names, and of no others."""
    staleness, updates = 2, 8
    weights: dict[int, dict[str, torch.Tensor]] = {}
    config = replace(APART, staleness=staleness, updates=updates, correction="truncated", handover=handover)
    with Trainer(replace(config, learning_rate=0.02)) as trainer:
        seen: list[tuple[int, Sample]] = []
        taken = trainer._gathered

        def noted() -> Gathered:
            found = taken()
            weights[trainer.update] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            seen.extend((trainer.update, sample) for sample in found.samples)
            return found

        trainer._gathered = noted
        steps = iter(trainer)
        oldest = [next(steps)["oldest"] for _ in range(updates)]
        trainer.config = replace(trainer.config, updates=50)
        dies(trainer, iter(trainer))
    assert max(oldest) <= staleness
    assert any(oldest)  # it did go on ahead
    model = small_model(TINY).requires_grad_(False)
    for update, sample in seen:
        assert update - staleness <= sample.version <= update
    for version in weights:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[version][name])
        batch = pack([sample for _, sample in seen])
        off = (logprobs_of(model, batch) - batch.sampled).abs()
        of_this = batch.spread(batch.versions) == version
        assert _most(off[batch.mask & of_this]) < 1e-4
        assert _most(off[batch.mask & ~of_this]) > 1e-2


def _most(x: torch.Tensor) -> float:
    return float(x.max()) if len(x) else 0.0


def test_prompts_are_dealt_in_order_with_their_places() -> None:
    calls: list[tuple[int, list[int], list[int]]] = []

    def sampler(number: int) -> Samples:
        def sample(
            prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
        ) -> list[list[Answer]]:
            assert places is not None
            calls.append((number, [first for first, *_ in prompts], list(places)))
            return [[_said(first)] for first, *_ in prompts]

        return sample

    def _said(token: int) -> Answer:
        return Answer(tokens=[token], logprobs=[0.0], kept=[0], whole=[0.0], truncated=False)

    for count, number in ((5, 2), (5, 3), (2, 3), (0, 2), (4, 1)):
        calls.clear()
        given = [[100 + i] for i in range(count)]
        found = dealt([sampler(i) for i in range(number)], given, answers=3, max_tokens=1, seed=0, places=None)
        assert [group[0].tokens for group in found] == given
        ordered = sorted(calls)
        assert [place for _, _, places in ordered for place in places] == [3 * i for i in range(count)]
        assert all(abs(len(prompts) - count / number) < 1 for _, prompts, _ in ordered)
    calls.clear()
    dealt([sampler(0), sampler(1)], [[1], [2]], answers=1, max_tokens=1, seed=0, places=[7, 9])
    assert sorted(calls) == [(0, [1], [7]), (1, [2], [9])]


def test_several_samplers_give_the_samples_of_one() -> None:
    config = replace(APART, sampler="cpu, cpu", updates=2)
    with Trainer(replace(config, sampler="")) as together:
        wanted = list(together)
    with Trainer(config) as trainer:
        assert isinstance(trainer.remote, RemoteSamplers)
        assert len(trainer.remote.samplers) == 2
        for row, alone in zip(trainer, wanted, strict=True):
            assert (row["reward"], row["length"], row["oldest"]) == (alone["reward"], alone["length"], 0)
            assert row["ratio_off"] < 1e-4


class Slow(Gatherer):
    """Notes how many updates had been made when each step began to be sampled."""

    def __init__(self) -> None:
        self.lock, self.began, self.updates = threading.Lock(), list[int](), 0

    def gather(self) -> Gathered:
        self.began.append(self.updates)
        return Gathered()


@pytest.mark.parametrize("staleness", [1, 3])
def test_sampling_waits_for_the_trainer(staleness: int) -> None:
    gatherer = Slow()
    with Ahead(gatherer, first=0, staleness=staleness) as ahead:
        for update in range(6):
            ahead.take()
            deadline = time.monotonic() + 10
            while len(gatherer.began) < update + 1 + staleness and time.monotonic() < deadline:
                time.sleep(1e-3)
            assert len(gatherer.began) == update + 1 + staleness  # as far ahead as is allowed, and no further
            gatherer.updates = update + 1
            ahead.updated(update + 1)
    assert all(step - began <= staleness for step, began in enumerate(gatherer.began))


def test_an_error_while_sampling_ahead_is_raised_in_the_trainer() -> None:
    class Failing(Slow):
        def gather(self) -> Gathered:
            raise ValueError("no such task")

    with Ahead(Failing(), first=0, staleness=1) as ahead, pytest.raises(ValueError, match="no such task"):
        ahead.take()


def test_weights_that_are_not_handed_over_are_noticed_within_one_step() -> None:
    with Trainer(replace(APART, updates=9)) as trainer:
        assert isinstance(trainer.remote, RemoteSamplers)
        weights = trainer.remote.weights
        assert isinstance(weights, SharedWeights)

        def lie(version: int) -> dict[str, float]:
            """The version of what is there, without its weights."""
            weights._versions[:] = version
            return {}

        trainer.step()
        trainer.remote.push = lie
        assert trainer.step()["ratio_off"] < 1e-4  # it samples by weights that were handed over before
        assert trainer.step()["ratio_off"] > 1e-2
        trainer.remote.push = lambda version: {}
        trainer.step()
        with pytest.raises(ConnectionError, match=r"step 4 got samples from weights of versions 3 to 3, wanted version 4"):
            trainer.step()


def test_weights_cross_as_they_are_and_half_written_ones_are_not_read() -> None:
    theirs, ours = small_model(TINY).requires_grad_(False), small_model(replace(TINY, seed=5)).requires_grad_(False)
    giver = SharedWeights(theirs)
    taker = SharedWeights(ours, giver.path)
    assert taker.version == -1
    numbers = giver.push(7)
    assert numbers["push_gb_per_s"] == pytest.approx(giver.nbytes / numbers["push_s"] / 1e9)
    assert taker.pull() == 7
    for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters()):
        assert torch.equal(a, b), name
    giver._versions[0] = 8  # writing has begun
    thread = threading.Thread(target=lambda: (time.sleep(0.05), giver.push(8)))
    thread.start()
    assert taker.pull() == 8
    thread.join()
    with pytest.raises(ValueError, match="bytes, but the weights"):
        SharedWeights(small_model(replace(TINY, layers=2)), giver.path)
    with pytest.raises(ValueError, match="other shapes or dtypes"):
        SharedWeights(_turned(), giver.path)
    giver.close()
    assert not giver.path.exists()


def test_weights_that_do_not_fit_into_memory_are_in_an_ordinary_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("tilewright.rl.shared_weights.shutil.disk_usage", lambda folder: usage._replace(free=100))
    monkeypatch.setattr("tilewright.rl.shared_weights.tempfile.tempdir", str(tmp_path))
    weights = SharedWeights(small_model(TINY))
    assert weights.path.parent == tmp_path
    assert weights.push(1).keys() == {"push_s", "push_gb_per_s"}
    weights.close()


class FakeCard:
    """Memory that a handle finds, as a card's would be."""

    made: ClassVar[dict[bytes, torch.Tensor]] = {}

    def __init__(self, nbytes: int, device: torch.device, handle: bytes | None = None) -> None:
        self.handle = handle or bytes([len(self.made) + 1] * 64)
        self.memory = self.made.setdefault(self.handle, torch.zeros(nbytes, dtype=torch.uint8))
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_file_has_the_handle_where_weights_are_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.rl.shared_weights.CardMemory", FakeCard)
    theirs, ours = small_model(TINY).requires_grad_(False), small_model(replace(TINY, seed=5)).requires_grad_(False)
    other = SharedWeights(theirs, on_card=True)  # of another run on the card
    giver = SharedWeights(theirs, on_card=True)
    assert giver.path.stat().st_size == 128
    taker = SharedWeights(ours, giver.path, on_card=True)
    giver.push(3)
    assert (other.version, taker.version, taker.pull()) == (-1, 3, 3)
    for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters()):
        assert torch.equal(a, b), name
    with pytest.raises(ValueError, match="bytes, but the weights"):
        SharedWeights(ours, giver.path)
    for side in (taker, giver, other):
        side.close()
        assert isinstance(side._card, FakeCard)
        assert side._card.closed
    assert not giver.path.exists()


def _turned() -> Model:
    """A model of as many bytes and another shape."""
    model = small_model(TINY)
    model.head.weight = torch.nn.Parameter(model.head.weight.T.contiguous())
    return model


def test_bad_configs_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="staleness is 2, but sampler is empty"):
        replace(TINY, staleness=2)
    with pytest.raises(ValueError, match="handover is 'card', but sampler is empty"):
        replace(TINY, handover="card")
    with pytest.raises(ValueError, match="handover is 'carrier', wanted one of memory, card, broadcast"):
        replace(APART, handover="carrier")
    for name in ("gpu", "cpu,", "cuda:x"):
        with pytest.raises(ValueError, match="wanted cpu, cuda, cuda:N, several of these"):
            replace(TINY, sampler=name)
    path = tmp_path / "several.toml"
    path.write_text('environment = "reversal"\nsampler = ["cuda:1", "cuda:2"]\n')
    assert read_config(path).sampler_devices == ["cuda:1", "cuda:2"]
    with pytest.raises(ConnectionError, match="before it was ready"):
        Trainer(replace(TINY, sampler="cuda:99"))
