"""Passes over a step's samples: how they are cut, that the host runs ahead of the device, and the gradient of served bits."""

import math
import traceback
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.models import Model
from tilewright.op import invariant
from tilewright.rl.batch import Batch, Sample, pack, select, split
from tilewright.rl.config import RLConfig
from tilewright.rl.learner import Learner
from tilewright.rl.policies import small_model
from tilewright.rl.policy import logprobs_of
from tilewright.rl.stats import measure

CONFIG = RLConfig(environment="reversal:digits=4", alphabet="0123456789=", minibatches=1, tokens_per_pass=20, moved_every=0)
LENGTHS = (3, 9, 12, 1, 25, 4, 8)


def batch_of(temperature: float = 1.0) -> Batch:
    drawn = torch.Generator().manual_seed(0)
    samples = [
        Sample(
            tokens=torch.randint(0, 12, (n,), generator=drawn).tolist(), chosen=[i > 0 for i in range(n)],
            logprobs=(-torch.rand(n, generator=drawn)).tolist(), reward=float(place % 3), group=place // 2,
        )
        for place, n in enumerate(LENGTHS)
    ]  # fmt: skip
    return pack(samples, temperature=temperature)


def tensors(batch: Batch) -> dict[str, Tensor]:
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("most", [1, 12, 20, 1000])
def test_parts_are_the_whole_in_its_order(most: int) -> None:
    batch = batch_of()
    parts = split(batch, most)
    assert [size for part in parts for size in part.sizes] == list(LENGTHS)
    assert all(sum(part.sizes) <= most or len(part.sizes) == 1 for part in parts)
    assert all(sum(a.sizes) + b.sizes[0] > most for a, b in pairwise(parts)), "a sequence had room in the part before"
    for name, whole in tensors(batch).items():
        assert torch.equal(torch.cat([tensors(part)[name] for part in parts]), whole)


def test_chosen_sequences_come_in_the_order_asked_for() -> None:
    batch, order = batch_of(), torch.tensor([4, 0, 3])
    found, ends = select(batch, order), batch.lengths.cumsum(0)
    assert found.sizes == tuple(LENGTHS[i] for i in order)
    assert torch.equal(found.tokens, torch.cat([batch.tokens[ends[i] - batch.lengths[i] : ends[i]] for i in order]))
    assert torch.equal(found.groups, batch.groups[order])


WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


class Waits(TorchDispatchMode):
    """Operators whose result's shape or value the host needs: where in tilewright/rl they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        by_mask = func._schema.name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        unsized = func._schema.name == "aten::repeat_interleave" and not (kwargs or {}).get("output_size")
        if func._schema.name in WAITS or by_mask or unsized:
            own = [frame for frame in traceback.extract_stack() if "/tilewright/" in frame.filename]
            if own and "/tilewright/rl/" in own[-1].filename:  # what stands below checks operands on a CPU, and there alone
                self.found.append(f"{own[-1].filename}:{own[-1].lineno}")
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing_between_two_passes() -> None:
    learner = Learner(CONFIG, small_model(CONFIG))
    batch = learner._prepared(batch_of(), 0)
    learner._loss_of = lambda logprobs, part: part.sums(logprobs).sum()  # pyright: ignore[reportAttributeAccessIssue]
    with Waits() as waits:
        assert len(list(learner._policy_parts(batch, 0.1, [], True))) == len(split(batch, 20))
    assert not waits.found
    with Waits() as waits:  # which the numbers of a step do
        measure(batch.old, batch)
    assert waits.found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_served_bits_have_the_gradient_of_the_log_probability(temperature: float) -> None:
    model, batch = small_model(CONFIG), batch_of(temperature)
    weights = [*model.parameters()]
    found = []
    for scope in (torch.enable_grad, invariant):
        with scope():
            logprobs = logprobs_of(model, batch)
            found.append((logprobs, *torch.autograd.grad((logprobs * batch.sampled).sum(), weights)))
    for plain, served in zip(*found):
        torch.testing.assert_close(served, plain, rtol=1e-4, atol=1e-5)


def test_promised_bits_need_no_pass_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's log-probabilities are then the old ones, and the first update's own pass shows whether they are right."""
    config = replace(CONFIG, algorithm="grpo", minibatches=2, entropy_bonus=0.0, tokens_per_pass=1000)
    passes: list[Batch] = []

    def counted(model: Model, batch: Batch) -> Tensor:
        passes.append(batch)
        return logprobs_of(model, batch)

    monkeypatch.setattr("tilewright.rl.learner.logprobs_of", counted)
    found = []
    for served, wrong in ((False, 0.0), (True, 0.0), (True, 0.1)):
        learner = Learner(replace(config, invariant=served), small_model(config))
        with torch.no_grad(), learner._kernels():
            sampled = logprobs_of(learner.model, batch_of()) - wrong
        passes.clear()
        row = learner.learn(replace(batch_of(), sampled=sampled, old=sampled), 5)
        assert len(passes) == (2 if served else 3)
        assert row["ratio_off"] == pytest.approx(math.exp(wrong) - 1, abs=1e-5)
        assert row["length"] == pytest.approx(sum(LENGTHS) / len(LENGTHS) - 1)  # of all samples
        found.append([*learner.model.parameters()])
    for plain, promised in zip(*found[:2]):
        torch.testing.assert_close(promised, plain, rtol=1e-4, atol=1e-5)
