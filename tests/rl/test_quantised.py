"""Policies that are sampled by codes: both sides are one quantised model, which learns, crosses to samplers and is served."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.rl.test_loop import CLOCKED, TINY, random_samples
from tests.rl.test_split import PUSHED
from tilewright.models import Model, load_model, random_model
from tilewright.models.config import Experts
from tilewright.nn import Linear, Routing
from tilewright.ops.weights import quantize_weight
from tilewright.rl.config import RLConfig
from tilewright.rl.critic import Critic
from tilewright.rl.loop import Trainer
from tilewright.rl.policies import policy_of, small_config, small_model
from tilewright.rl.policy import logprobs_of
from tilewright.rl.quantised import FORMATS, add_quantised_weights, requantise
from tilewright.rl.rollout import Sampler
from tilewright.rl.run import rows

QUANTIZED = replace(TINY, quantize="int8", hidden=64, learning_rate=0.02, updates=3)


def quantized_layers(model: Model) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear) and module.quantized_weight is not None]


def places_of(model: Model) -> list[int]:
    """Where the codes lie."""
    return [
        buffer.data_ptr()
        for layer in quantized_layers(model)
        if layer.quantized_weight
        for buffer in layer.quantized_weight.buffers()
    ]


def assert_codes_are_of_the_weights(model: Model, format: str) -> None:
    layers = quantized_layers(model)
    assert len(layers) == 4 * TINY.layers
    for layer in layers:
        assert isinstance(layer.weight, Tensor)
        assert layer.quantized_weight is not None
        fresh = quantize_weight(layer.weight.detach(), format)
        assert torch.equal(layer.quantized_weight.dequantize(), fresh.dequantize())


@pytest.mark.parametrize("format", FORMATS)
def test_both_sides_are_the_quantised_model_at_every_step(format: str) -> None:
    with Trainer(replace(QUANTIZED, quantize=format)) as trainer:
        places = places_of(trainer.model)
        for row in trainer:
            assert row["ratio_off"] < 1e-4
        assert_codes_are_of_the_weights(trainer.model, format)
        assert places == places_of(trainer.model)


def test_a_policy_of_codes_is_another_and_a_sampler_of_old_codes_is_noticed() -> None:
    batch = random_samples()
    floats, quantized = (policy_of(replace(QUANTIZED, quantize=format))[1].requires_grad_(False) for format in ("", "int8"))
    for model in (floats, quantized):
        model.head.weight.data.mul_(100.0)
    apart = (logprobs_of(floats, batch) - logprobs_of(quantized, batch)).abs().max()
    assert float(apart) > 1e-3
    with Trainer(QUANTIZED) as trainer:
        trainer.step()
        other = policy_of(QUANTIZED)[1].requires_grad_(False)
        sampler = Sampler(other, max_len=16, seqs=64, end_ids=(20,))
        trainer.gatherer.sampler = sampler
        for fresh in (False, True):
            for (_, theirs), (_, ours) in zip(other.named_parameters(), trainer.model.named_parameters(), strict=True):
                theirs.copy_(ours)
            if fresh:
                requantise(other)
            sampler.version = trainer.update
            off = trainer.step()["ratio_off"]
            assert off < 1e-4 if fresh else off > 1e-3


def test_few_rows_are_multiplied_in_another_way_without_the_invariant_scope() -> None:
    """Which is why such a run promises nothing: up to 16 rows meet activations that are not quantised."""
    with Trainer(QUANTIZED) as trainer:
        few = Sampler(trainer.model, max_len=16, seqs=8, end_ids=(20,))
        trainer.gatherer.sampler = few
        assert trainer.step()["ratio_off"] > 1e-4


def test_a_sampler_of_its_own_makes_the_same_codes() -> None:
    found = []
    for sampler in ("", "cpu"):
        with Trainer(replace(QUANTIZED, sampler=sampler)) as trainer:
            found.append([{k: v for k, v in row.items() if k not in (*CLOCKED, *PUSHED)} for row in trainer])
    assert found[0] == found[1]


def test_the_reference_has_codes_and_the_critic_has_none() -> None:
    with Trainer(replace(QUANTIZED, kl=0.1, minibatches=1)) as trainer:
        row = trainer.step()
        assert trainer.learner._reference is not None
        assert quantized_layers(trainer.learner._reference)
        assert row["ratio_off"] < 1e-4
    assert not quantized_layers(Critic(add_quantised_weights(small_model(QUANTIZED), "int8")).body)


def test_a_run_goes_on_and_is_served_as_the_model_that_it_trained(tmp_path: Path) -> None:
    config = replace(QUANTIZED, updates=2, save_every=1, out=str(tmp_path / "run"))
    with Trainer(config) as trainer:
        list(rows(trainer, say=lambda line: None))
        batch = random_samples()
        with torch.no_grad():
            wanted = logprobs_of(trainer.model, batch)
    served = load_model(tmp_path / "run" / "model", device="cpu", dtype=torch.float32)
    tw.quantize(served, "int8")
    with torch.no_grad():
        torch.testing.assert_close(logprobs_of(served, batch), wanted, rtol=0, atol=2e-5)
    with Trainer(replace(config, updates=3)) as trainer:
        list(rows(trainer, say=lambda line: None))
        assert_codes_are_of_the_weights(trainer.model, "int8")
    with pytest.raises(ValueError, match="quantize was 'int8'"), Trainer(replace(config, quantize="fp8")) as trainer:
        list(rows(trainer, say=lambda line: None))


def test_what_cannot_be_quantised_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="quantize is 'mxfp8', wanted one of int8, fp8, fp8-block, int4, int8-weight"):
        RLConfig(environment="reversal", quantize="mxfp8")
    with pytest.raises(
        ValueError, match="int4 has groups of 128 or 64 inputs, so the number of inputs must be a multiple of that; got K = 32"
    ):
        Trainer(replace(TINY, quantize="int4"))
    shape = replace(
        small_config(QUANTIZED), architecture="MixtralForCausalLM",
        experts=Experts(first_layer=0, inner=64, shared=0, routing=Routing(method="greedy", experts=4, chosen=2)),
    )  # fmt: skip
    experts = random_model(shape, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match="models with experts are not supported"):
        add_quantised_weights(experts, "int8")
