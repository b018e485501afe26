"""Models of transformers with random weights, of every decoder family, as definitions."""

from typing import Any

import torch

__all__ = ["FAMILIES", "SIZES", "make_oracle"]

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str]] = {
    "arcee": ("ArceeConfig", "ArceeForCausalLM"),
    "cohere": ("CohereConfig", "CohereForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "ernie4.5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "glm": ("GlmConfig", "GlmForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "glm4-moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "granite-moe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "phi": ("PhiConfig", "PhiForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "seed-oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM"),
}
"""Family -> the names of transformers' classes."""


def make_oracle(family: str, changes: dict[str, Any], seed: int = 3) -> Any:
    """A model of transformers where no weight is trivial: matrices keep variance, norms and biases are not 1 and 0."""
    import transformers

    config_class, model_class = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**SIZES, **changes})
    config._attn_implementation = config._experts_implementation = "eager"
    oracle = getattr(transformers, model_class)(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in oracle.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.normal_(0.0, 0.3, generator=generator)
        elif family == "gpt-oss" and ".experts." in name:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)  # the input comes before the output
        elif parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0 if family.startswith("gemma") else 1.0, 0.3, generator=generator)
    for name, buffer in oracle.named_buffers():
        if name.endswith("bias"):
            buffer.normal_(0.0, 0.3, generator=generator)
    return oracle
