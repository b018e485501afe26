"""Captured passes: they give the losses and gradients of plain ones; their room; what is refused; and on a GPU a real graph.

Without a GPU a graph is stood in for by a pass that is computed again into the same tensors.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import bits
from tests.rl.test_passes import CONFIG, Waits
from tests.train.test_captured import again_in_place
from tilewright.models import SHAPES, random_model
from tilewright.op import invariant
from tilewright.rl.batch import Batch, Sample, pack, parts_of
from tilewright.rl.captured import CapturedPasses, Room, check_graphs, even_limit
from tilewright.rl.config import RLConfig
from tilewright.rl.learner import Learner
from tilewright.rl.losses import ALGORITHMS
from tilewright.rl.policies import small_model
from tilewright.rl.policy import logprobs_of
from tilewright.train.captured import as_graph
from tilewright.train.step import running_sum

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
STEPS = ((3, 9, 12, 1, 25, 4, 8), (5, 5, 6, 4), (13, 2, 7, 11, 9, 9, 3, 1), (30, 2, 41, 1))
MOST = 30


def batch_of(lengths: tuple[int, ...], seed: int, kept: int = 0) -> Batch:
    """Two answers in a group; the first token of each sequence, and all of every fourth sequence, were not chosen."""
    drawn = torch.Generator().manual_seed(seed)
    samples = [
        Sample(
            tokens=torch.randint(0, 12, (n,), generator=drawn).tolist(), chosen=[i > 0 and place % 4 < 3 for i in range(n)],
            logprobs=(-torch.rand(n, generator=drawn)).tolist(), reward=float(torch.rand(1, generator=drawn)),
            group=place // 2, kept=[kept] * n if kept else None,
        )
        for place, n in enumerate(lengths)
    ]  # fmt: skip
    return pack(samples)


def learner_of(config: RLConfig, capture: Callable[..., Any] | None) -> Learner:
    learner = Learner(config, small_model(config))
    if capture is not None:
        learner.captured = CapturedPasses(learner.model, learner._policy_pass, MOST, capture=capture)
    return learner


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS])
def test_steps_are_those_of_plain_passes(algorithm: str, minibatches: int) -> None:
    config = replace(
        CONFIG, algorithm=algorithm, minibatches=minibatches, entropy_bonus=0.05, kl=0.01, tokens_per_pass=MOST, updates=20,
        learning_rate=1e-3, max_tokens=64, moved_every=2,
    )  # fmt: skip
    plain, captured = (learner_of(config, capture) for capture in (None, again_in_place))
    for step, lengths in enumerate(STEPS):
        wanted, found = (learner.learn(batch_of(lengths, step), step) for learner in (plain, captured))
        assert found == pytest.approx(wanted, rel=2e-3, abs=2e-4)
    assert captured.captured is not None
    assert 1 <= captured.captured.captures <= len(STEPS) * (minibatches + 1)
    for (name, a), b in zip(plain.model.named_parameters(), captured.model.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=name)


def sums(learner: Learner, batch: Batch, bonus: float, seen: list[Tensor], on_policy: bool = True) -> list[Tensor]:
    if learner.captured is not None:
        return [total.clone() for total in learner.captured.gradients(batch, bonus, seen, on_policy)]
    return running_sum(learner._policy_parts(batch, bonus, seen, on_policy))


@pytest.mark.parametrize("kept", [0, 3])
def test_gradients_are_the_sums_of_all_parts(kept: int) -> None:
    """Also where a sequence is longer than a part, and with filters, which give every token a set of its own."""
    config = replace(CONFIG, tokens_per_pass=MOST, top_k=kept, algorithm="grpo")
    plain, captured = (learner_of(config, capture) for capture in (None, again_in_place))
    for step, lengths in enumerate(STEPS):
        batch = plain._prepared(batch_of(lengths, step, kept), step)
        for bonus in (0.0, 0.1, 0.2):
            olds: tuple[list[Tensor], ...] = ([], [])
            wanted, found = (sums(one, batch, bonus, old) for one, old in zip((plain, captured), olds))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(torch.cat(olds[1]), torch.cat(olds[0]), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(captured._logprobs(batch), torch.cat(olds[0]), rtol=1e-5, atol=1e-5)
    assert captured.captured is not None
    assert captured.captured.captures <= 6 * len(STEPS)


def test_the_host_waits_for_nothing_between_replays() -> None:
    learner = learner_of(CONFIG, again_in_place)
    batch = learner._prepared(batch_of(STEPS[0], 0), 0)
    with Waits() as waits:
        sums(learner, batch, 0.1, [])
    assert not waits.found


def test_parts_are_even_and_no_more() -> None:
    drawn = torch.Generator().manual_seed(0)
    for most in (10, 64, 100):
        for count in (1, 2, 7, 40):
            sizes = torch.randint(1, 80, (count,), generator=drawn).tolist()
            limit = even_limit(sizes, most)
            assert limit <= most
            assert len(parts_of(sizes, limit)) == len(parts_of(sizes, most))
            fits = [size for size in sizes if size <= most]
            assert limit == max(fits, default=most) or len(parts_of(sizes, limit - 1)) > len(parts_of(sizes, most))
    assert even_limit([576] * 256, 16384) == 26 * 576  # ten parts, of which the last would have had 4 sequences


def test_room_is_filled_and_serves_what_is_smaller() -> None:
    room = Room.of([(576,) * 26, (576,) * 22, (3, 500)])
    assert room == Room(tokens=15360, sequences=32, longest=768)
    for sizes in ((576,) * 26, (1,) * 10, (768,) * 20, ()):
        lengths = room.lengths(sizes)
        assert (len(lengths), sum(lengths), max(lengths) <= 768) == (32, 15360, True)
        assert tuple(lengths[: len(sizes)]) == sizes
    assert room.serves([(500,) * 25])
    assert not room.serves([(576,) * 28])  # too many tokens
    assert not room.serves([(100,) * 150])  # too many sequences
    assert not room.serves([(800,) * 15])  # too long
    assert not room.serves([(576,) * 10])  # too much would be filled up


def test_what_cannot_be_captured_is_refused() -> None:
    model = small_model(CONFIG)
    with pytest.raises(ValueError, match="graphs needs a CUDA device, but the device is cpu; leave graphs out"):
        Learner(replace(CONFIG, graphs=True), model)
    with pytest.raises(ValueError, match="graphs needs a CUDA device"):
        check_graphs(model)


@needs_gpu
@pytest.mark.parametrize("served", [False, True], ids=["plain", "invariant"])
def test_a_graph_on_a_gpu(served: bool) -> None:
    """The promise: in the invariant scope its log-probabilities have the bits of a pass without gradients."""
    shape = replace(
        SHAPES["qwen3-0.6b"], num_hidden_layers=2, windows=(None, None), vocab_size=512, hidden_size=256, intermediate_size=512,
    )  # fmt: skip
    config = replace(CONFIG, tokens_per_pass=1024, algorithm="grpo", invariant=served, device="cuda", dtype="bfloat16")
    model = random_model(shape, device=torch.device("cuda"), dtype=torch.bfloat16, seed=0).requires_grad_(True)
    learner = Learner(config, model)
    passes = CapturedPasses(model, learner._policy_pass, 1024, capture=as_graph)
    for step, lengths in enumerate(((300, 7, 129, 64, 500, 1, 90), (200,) * 9, (31, 600, 2))):
        batch = learner._prepared(batch_of(lengths, step).to("cuda"), step)
        before: list[Tensor] = []
        with learner._kernels():
            found = [total.clone() for total in passes.gradients(batch, 0.1, before, True)]
            wanted = running_sum(learner._policy_parts(batch, 0.1, [], True))
            scored = passes.logprobs(batch)
            alone = learner._logprobs(batch)
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm() + 1e-6
        assert (scored - alone).abs().max() < 0.1
        if served:
            assert torch.equal(bits(scored), bits(alone))
            assert torch.equal(bits(torch.cat(before)), bits(alone))


def test_the_invariant_scope_reaches_a_captured_pass() -> None:
    """Also where the pass is captured, the log-probabilities are those of the sampler's operator."""
    learner = learner_of(CONFIG, again_in_place)
    batch = learner._prepared(batch_of(STEPS[1], 0), 0)
    before: list[Tensor] = []
    with invariant():
        sums(learner, batch, 0.0, before)
        with torch.no_grad():
            alone = logprobs_of(learner.model, batch)
    torch.testing.assert_close(torch.cat(before), alone, rtol=1e-5, atol=1e-6)
