"""Configs: what a Hugging Face config.json resolves to, what is refused and with which words."""

from pathlib import Path

import pytest
import torch

from tests.models.folders import LLAMA, write_folder
from tests.models.running import make_cache
from tilewright.models import (
    ARCHITECTURES,
    SHAPES,
    ModelConfig,
    ModelError,
    kv_bytes_per_token,
    load_config,
    random_model,
    weight_bytes,
)
from tilewright.nn import Rope

MISTRAL, QWEN2, QWEN3 = ({**LLAMA, "architectures": [f"{name}ForCausalLM"]} for name in ("Mistral", "Qwen2", "Qwen3"))
GEMMA2, GEMMA3, GLM4, PHI3 = (
    {**LLAMA, "architectures": [f"{name}ForCausalLM"]} for name in ("Gemma2", "Gemma3", "Glm4", "Phi3")
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}

RESOLVED = {
    "head_dim from the heads": (LLAMA, {}, {"head_dim": 4}),
    "head_dim null": (LLAMA, {"head_dim": None}, {"head_dim": 4}),
    "head_dim given": (LLAMA, {"head_dim": 6}, {"head_dim": 6}),
    "head_dim of Qwen3": (QWEN3, {}, {"head_dim": 128}),
    "kv heads from the heads": (LLAMA, {"num_key_value_heads": None}, {"num_key_value_heads": 4}),
    "one eos": (LLAMA, {}, {"eos_token_ids": (2,)}),
    "several eos": (LLAMA, {"eos_token_id": [3, 4]}, {"eos_token_ids": (3, 4)}),
    "no eos": (LLAMA, {"eos_token_id": None}, {"eos_token_ids": ()}),
    "no dtype": (LLAMA, {"torch_dtype": None}, {"dtype": torch.float32}),
    "torch_dtype": (LLAMA, {"torch_dtype": "float16"}, {"dtype": torch.float16}),
    "dtype": (LLAMA, {"dtype": "bfloat16"}, {"dtype": torch.bfloat16}),
    "no rope keys": (LLAMA, {}, {"rope_theta": 10000.0, "rope_scaling": None}),
    "rope of transformers 4": (LLAMA, {"rope_theta": 7.0, "rope_scaling": YARN}, {"rope_theta": 7.0, "rope_scaling": YARN}),
    "rope of transformers 5": (
        LLAMA, {"rope_parameters": {"rope_theta": 7.0, **YARN}}, {"rope_theta": 7.0, "rope_scaling": YARN},
    ),
    "default rope of transformers 5": (
        LLAMA, {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, {"rope_theta": 7.0, "rope_scaling": None},
    ),
    "old name of the rope type": (
        LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "yarn without its numbers": (
        LLAMA,
        {"rope_scaling": {"rope_type": "yarn", "factor": None}, "original_max_position_embeddings": 8},
        {"rope_scaling": YARN},
    ),
    "Llama has no window": (LLAMA, {"sliding_window": 5}, {"windows": (None, None)}),
    "Mistral, no key": (MISTRAL, {}, {"windows": (4096, 4096)}),
    "Mistral, null": (MISTRAL, {"sliding_window": None}, {"windows": (None, None)}),
    "Mistral": (MISTRAL, {"sliding_window": 5}, {"windows": (5, 5)}),
    "Qwen2, not used": (QWEN2, {"sliding_window": 5}, {"windows": (None, None)}),
    "Qwen2, first full": (QWEN2, {**SLIDING, "max_window_layers": 1}, {"windows": (None, 5)}),
    "Qwen2, 28 layers full": (QWEN2, SLIDING, {"windows": (None, None)}),
    "Qwen3, by layer": (
        QWEN3, {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, {"windows": (5, None)},
    ),
    "Qwen3, by layer but not used": (
        QWEN3, {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}, {"windows": (None, None)},
    ),
    "Gemma 2, in turns": (GEMMA2, {"sliding_window": 5}, {"windows": (5, None), "activation": "gelu_tanh_mul"}),
    "Gemma 3, in transformers 4": (
        GEMMA3,
        {"rope_theta": 7.0, "rope_local_base_freq": 9.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "local_rope": (9.0, None)},
    ),
    "Gemma 3, in transformers 5": (
        GEMMA3,
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 9.0}}},
        {"rope_theta": 7.0, "local_rope": (9.0, None)},
    ),
    "GLM turns half": (GLM4, {"head_dim": 8}, {"partial_rotary_factor": 0.5, "rotated_dim": 4}),
    "Phi-3's names of longrope": (
        PHI3,
        {"original_max_position_embeddings": 8, "rope_scaling": {"type": "su", "short_factor": [1, 1], "long_factor": [2, 2]}},
        {
            "rope_scaling": {
                "rope_type": "longrope", "short_factor": [1, 1], "long_factor": [2, 2], "original_max_position_embeddings": 8,
                "factor": 4.0,
            }
        },
    ),
    "swish": (LLAMA, {"hidden_act": "swish"}, {"activation": "silu_mul"}),
    "gelu": (LLAMA, {"hidden_act": "gelu"}, {"activation": "gelu_mul"}),
}  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "want"), RESOLVED.values(), ids=list(RESOLVED))
def test_resolves(base: dict, changes: dict, want: dict) -> None:
    config = ModelConfig.from_hf({**base, **changes})
    assert {name: getattr(config, name) for name in want} == want


def test_generation_config_decides_what_ends_a_sequence() -> None:
    assert ModelConfig.from_hf(LLAMA, {"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)
    assert ModelConfig.from_hf(LLAMA, {"eos_token_id": 0}).eos_token_ids == (0,)
    assert ModelConfig.from_hf(LLAMA, {"temperature": 0.6}).eos_token_ids == (2,)


REFUSED = {
    "hidden_act": (
        {"hidden_act": "relu2"},
        "hidden_act 'relu2' is not supported; supported: gelu, gelu_pytorch_tanh, silu, swish",
    ),
    "rope type": (
        {"rope_scaling": {"rope_type": "ntk"}},
        "'ntk' is not one of default, linear, dynamic, llama3, yarn, longrope",
    ),
    "rope factors": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
        "short_factor must have 2 numbers, one for each pair; got",
    ),
    "rope factor of a wrong type": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": ["1"]}},
        "rope_scaling.short_factor.0 is '1', wanted number",
    ),
    "rope numbers": ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer type"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 .* got 0.5"),
    "layer type": ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types linear_attention are not supported"),
    "layer types": ({"layer_types": ["full_attention"]}, "one entry for each of the 2 layers; got 1"),
    "window": ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    "quantised": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes', wanted"),
    "dtype": (
        {"torch_dtype": "float8_e4m3fn"},
        "dtype 'float8_e4m3fn' is not supported; supported: bfloat16, float16, float32",
    ),
    "key missing": ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
    "key of a wrong type": ({"vocab_size": "31"}, "vocab_size is '31', wanted integer"),
    "heads": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads; got 4 and 3"),
    "head_dim": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "16 does not divide into 3 heads"),
    "odd head_dim": ({"head_dim": 5}, "must be even and positive, got 5"),
    "no architecture": ({"architectures": None}, "must name one architecture"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen3NextForCausalLM", "Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2MoeForCausalLM"),
        ("Gemma4ForConditionalGeneration", "Gemma2ForCausalLM, Gemma3ForCausalLM"),
        ("Phi4MultimodalForCausalLM", "PhiForCausalLM, Phi3ForCausalLM"),
        ("Llama4ForCausalLM", "LlamaForCausalLM"),
        ("x" * 100_000, "Olmo2ForCausalLM|Phi3ForCausalLM|[A-Z]"),
    ],
)
def test_unknown_architectures_are_told_the_nearest(name: str, near: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {**LLAMA, "architectures": [name]}, {})
    with pytest.raises(
        ModelError, match=f"^architecture {name[:100]} is not supported; the nearest that are: {near}"
    ) as caught:
        load_config(tmp_path)
    assert len(str(caught.value)) < 1000


def test_what_stretches_with_the_length() -> None:
    """longrope takes its short factors for a model that never sees more than it was first trained with, dynamic nothing."""
    raw = {**PHI3, "original_max_position_embeddings": 8}
    raw["rope_scaling"] = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
    config = ModelConfig.from_hf(raw)
    models = [random_model(each, device="cpu", dtype=torch.float32) for each in (config, config.limited(8))]
    tables = [next(module for module in model.modules() if isinstance(module, Rope)) for model in models]
    scaled = [table.cos_sin[1].norm(dim=0) for table in tables]
    assert torch.allclose(scaled[0], scaled[1])  # the factor on cos and sin is that of the whole context
    turned = [torch.atan2(table.cos_sin[1, 1], table.cos_sin[1, 0]) for table in tables]
    torch.testing.assert_close(turned[1], turned[0] * torch.tensor([2.0, 4.0]))
    assert config.limited(64) is config
    assert ModelConfig.from_hf(LLAMA).limited(4).max_position_embeddings == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_bytes_are_those_of_the_tensors(architecture: str, tied: bool, dtype: torch.dtype) -> None:
    raw = {**LLAMA, "architectures": [architecture], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": tied}
    raw["hidden_size"] = 32  # a quarter of a head is rotated in some
    config = ModelConfig.from_hf(raw)
    model = random_model(config, device="cpu", dtype=dtype)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert weight_bytes(config, dtype) == sum(storages.values())
    cache = make_cache(model, 3, 4)
    assert kv_bytes_per_token(config, dtype) * 3 * 4 == sum(t.nbytes for layer in cache.layers for t in layer)


# Parameter counts as their publishers give them.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_have_the_published_size(name: str) -> None:
    assert weight_bytes(SHAPES[name], torch.bfloat16) == 2 * PUBLISHED[name]
