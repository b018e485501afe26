"""What a run begins with and leaves: random weights, and a folder that others read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.running import run_logits
from tilewright.models import SHAPES, ModelConfig, initialise, load_config, random_model, save_model
from tilewright.models.saving import hf_config


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-1b", "llama-8b"])
def test_a_config_is_written_as_it_is_read(name: str) -> None:
    shape = SHAPES[name]
    assert ModelConfig.from_hf(hf_config(shape)) == shape


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def test_transformers_reads_a_saved_model(architecture: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    window = None if architecture.startswith("Llama") else 5  # transformers gives Llama none
    shape = ModelConfig(
        architecture=architecture, vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, windows=(window, window),
        rope_theta=777.0, tie_word_embeddings=architecture.startswith("Qwen3"),
    )  # fmt: skip
    made = random_model(shape, device="cpu", dtype=torch.float32)
    save_model(made, tmp_path)
    assert load_config(tmp_path).windows == shape.windows
    ids = torch.randint(0, 50, (20,), generator=torch.Generator().manual_seed(0))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(run_logits(made, ids.tolist(), 20), oracle(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_random_weights_are_as_the_papers_say() -> None:
    shape = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=200, hidden_size=128, intermediate_size=256, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64, windows=(None,) * 8,
    )  # fmt: skip
    made = random_model(shape, device="cpu", dtype=torch.float32)
    initialise(made, std=0.02, depth_scaled=True, seed=3)
    block: Any = made.blocks[5]
    for weight, std in ((block.attn.qkv.weight, 0.02), (block.ffn.gate_up.weight, 0.02), (made.head.weight, 0.02)):
        assert float(weight.std()) == pytest.approx(std, rel=0.03)  # pyright: ignore
    for layer in (block.attn.out, block.ffn.down):
        assert float(layer.weight.std()) == pytest.approx(0.02 / 4, rel=0.03)
    assert torch.equal(block.attn.q_norm, torch.ones(32))
    flat = random_model(shape, device="cpu", dtype=torch.float32)
    initialise(flat, depth_scaled=False)
    assert float(flat.blocks[5].attn.out.weight.std()) == pytest.approx(0.02, rel=0.03)  # pyright: ignore
