"""Loads language models: from a folder or a name to a model on a device.

`ARCHITECTURES` lists what is supported: the architecture that config.json names -> the function that builds it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewright.models.config import SHAPES, ModelConfig, ModelError, architecture_of
from tilewright.models.decoder import Decoder
from tilewright.models.deepseek import deepseek
from tilewright.models.dense import (
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    glm,
    glm4,
    granite,
    hunyuan,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
)
from tilewright.models.errors import unknown
from tilewright.models.files import read_json
from tilewright.models.fill import Convert, Progress, check, fill, fill_random, replace_by_empty_quantized
from tilewright.models.initial import initialise
from tilewright.models.layer_norms import cohere, gpt2, gpt_neox, nemotron, opt, phi, stablelm, starcoder2
from tilewright.models.mixtures import (
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granite_moe,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from tilewright.models.multimodal import MULTIMODAL, text_aliases, text_part
from tilewright.models.names import aliases
from tilewright.models.prompt import prompt_inputs
from tilewright.models.saving import save_model, save_quantized
from tilewright.models.weights import Checkpoint, Renamed, resolve
from tilewright.ops.weights import QuantizedWeight

__all__ = [
    "ARCHITECTURES",
    "SHAPES",
    "Convert",
    "Model",
    "ModelConfig",
    "ModelError",
    "Progress",
    "empty_model",
    "initialise",
    "kv_bytes_per_token",
    "load_config",
    "load_model",
    "prompt_inputs",
    "random_model",
    "resolve",
    "save_model",
    "save_quantized",
    "weight_bytes",
    "weight_bytes_of",
]

Model = Decoder
"""The result of `load_model`: called with (token_ids, batch, cache); has `.logits` and `.config`."""

ARCHITECTURES: dict[str, Callable[[ModelConfig, torch.device, torch.dtype], Model]] = {
    "ArceeForCausalLM": llama,
    "Cohere2ForCausalLM": cohere,
    "CohereForCausalLM": cohere,
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "Ernie4_5ForCausalLM": ernie4_5,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe,
    "Exaone4ForCausalLM": exaone4,
    "GPT2LMHeadModel": gpt2,
    "GPTNeoXForCausalLM": gpt_neox,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite_moe,
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "NemotronForCausalLM": nemotron,
    "OPTForCausalLM": opt,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo2,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "PhiForCausalLM": phi,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": llama,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
}


def _builder(architecture: str) -> Callable[[ModelConfig, torch.device, torch.dtype], Model]:
    if architecture not in ARCHITECTURES:
        raise ModelError(unknown(architecture, (*ARCHITECTURES, *MULTIMODAL)))
    return ARCHITECTURES[architecture]


def _build(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Model:
    """The model with uninitialised weights."""
    return _builder(config.architecture)(config, torch.device(device), dtype)


def load_config(folder: Path) -> ModelConfig:
    """Read the config of a model folder.

    Raises:
        ModelError: config.json is missing or broken, or needs something that is not supported.
    """
    raw, whole = _decoder_config(folder)
    _builder(architecture_of(raw))  # report an unknown architecture first, before any of its keys
    generation = folder / "generation_config.json"
    config = ModelConfig.from_hf(raw, read_json(generation) if generation.exists() else None)
    return config if whole is None else replace(config, text_part_of=whole)


def _decoder_config(folder: Path) -> tuple[dict[str, Any], str | None]:
    """(the contents of config.json of a decoder, the architecture whose text part it is or None)."""
    raw = read_json(folder / "config.json")
    architecture = architecture_of(raw)
    if architecture not in MULTIMODAL:
        return raw, None
    return text_part(architecture, raw, Checkpoint(folder).shapes), architecture


def load_model(
    name_or_path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    convert: Convert | None = None,
    max_positions: int | None = None,
) -> Model:
    """Load a model.

    Args:
        name_or_path: "bookworm" (embedded), a folder, or a name on the Hugging Face hub.
        device: where the weights go.
        dtype: of the weights (for quantised ones, of the floats that they stand for); None: as in config.json.
        progress: called with (bytes loaded, bytes in all).
        convert: called with each linear layer as soon as it is filled; may quantise it.
        max_positions: the longest sequence to expect (`ModelConfig.limited`); None: the longest that the model supports.

    Raises:
        ModelError: the folder cannot be found or used; nothing has been allocated on the device then.
    """
    folder = resolve(name_or_path)
    config = load_config(folder)
    config = config if max_positions is None else config.limited(max_positions)
    checkpoint = Checkpoint(folder)
    renamed = (
        aliases(config.architecture, checkpoint.shapes) if config.text_part_of is None else text_aliases(checkpoint.shapes)
    )
    if renamed:
        checkpoint = Renamed(checkpoint, renamed)
    model = _build(config, "meta", dtype or config.dtype)
    check(model, checkpoint, config.quantization)
    fill(model, checkpoint, torch.device(device), quantization=config.quantization, progress=progress, convert=convert)
    return model


def empty_model(config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype) -> Model:
    """A model with uninitialised weights, quantised as in its checkpoint; on "meta" it takes no memory."""
    model = _build(config, device, dtype)
    if config.quantization is not None:
        replace_by_empty_quantized(model, config.quantization, torch.device(device))
    return model


def random_model(
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    convert: Convert | None = None,
) -> Model:
    """A model with random weights that keep activations finite, drawn on the device: for benchmarks and tests.

    `convert` is called with each linear layer as soon as it is filled, and may quantise it.
    """
    model = _build(config, "meta", dtype)
    fill_random(model, torch.device(device), seed, convert)
    return model


def weight_bytes_of(model: Model) -> int:
    """Bytes of parameters and quantised weights; a tied head counts once, and the rope table does not count."""
    codes = sum(module.nbytes for module in model.modules() if isinstance(module, QuantizedWeight))
    return codes + sum(parameter.nbytes for parameter in model.parameters())


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """`weight_bytes_of` for a model that does not exist yet."""
    return weight_bytes_of(empty_model(config, device="meta", dtype=dtype))


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes per token in a cache of `dtype`, for all layers; quantised 8-bit caches also have float32 scales."""
    numbers = 2 * config.num_key_value_heads * config.head_dim if config.latent is None else config.latent.cached
    scales = 2 * config.num_key_value_heads * 4 if dtype.itemsize == 1 else 0
    return config.num_hidden_layers * (numbers * dtype.itemsize + scales)
