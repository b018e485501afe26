"""Creates the policy of a config, and its tokenizer: from a model folder, or as a small random model of characters."""

import torch
from torch import Tensor

from tilewright.hw.device import default_device
from tilewright.models import Model, ModelError, load_config, load_model, random_model, resolve
from tilewright.models.config import ModelConfig
from tilewright.rl.characters import Characters
from tilewright.rl.config import RLConfig
from tilewright.rl.quantised import add_quantised_weights
from tilewright.rl.text import Text, Tokens
from tilewright.train.setup import chosen_device

__all__ = ["policy_of", "small_config", "small_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEAD_DIM = 16
_HEAD_SCALE = 0.1
"""Factor on the random head's weights, so that the first answers are nearly uniform over the characters."""


def policy_of(config: RLConfig, model: Model | None = None) -> tuple[Text, Model]:
    """(the tokenizer, the trainable model). The model is also quantised if the config requests it. A `model` that is passed in
    keeps its weights.

    Raises:
        ModelError: the model cannot be found or trained.
        ValueError: the device does not exist, the tokenizer is for another model, or the model cannot be quantised.
    """
    text, found = _policy_of(config, model)
    return text, add_quantised_weights(found, config.quantize) if config.quantize else found


def _policy_of(config: RLConfig, model: Model | None) -> tuple[Text, Model]:
    text: Text = Tokens(resolve(config.model), chat=config.chat) if config.model else Characters(config.alphabet)
    if model is not None:
        return text, model
    if not config.model:
        return text, small_model(config)
    folder = resolve(config.model)
    shape = load_config(folder)
    if shape.quantization is not None:
        raise ModelError(f"{config.model} has quantised weights, which have no gradients; use the unquantised model")
    if text.vocab > shape.vocab_size:
        raise ValueError(
            f"the tokenizer of {config.model} has {text.vocab} tokens, but the model only {shape.vocab_size}; use the "
            "model's own tokenizer"
        )
    device = chosen_device(config.device) if config.device else default_device()
    return text, load_model(folder, device=device, dtype=_DTYPES[config.dtype]).requires_grad_(True)


def small_config(config: RLConfig) -> ModelConfig:
    """The config of the small model."""
    heads = config.hidden // _HEAD_DIM
    text = Characters(config.alphabet)
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=text.vocab,
        hidden_size=config.hidden,
        intermediate_size=2 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=2048,
        windows=(None,) * config.layers,
        eos_token_ids=text.end_ids,
    )


def small_model(config: RLConfig) -> Model:
    """A decoder of characters with random weights."""
    device = chosen_device(config.device) if config.device else torch.device("cpu")
    model = random_model(small_config(config), device=device, dtype=_DTYPES[config.dtype], seed=config.seed)
    assert isinstance(model.head.weight, Tensor)
    model.head.weight.data.mul_(_HEAD_SCALE)
    return model.requires_grad_(True)
