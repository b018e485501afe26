"""The text part of checkpoints that also take images: its config and its weights, as those of a decoder.

Parts that read images are not loaded. Prompts are text alone, so the rotary positions of Qwen2.5-VL, which have three
components that are the same for text, are ordinary ones.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tilewright.models.errors import ModelError

__all__ = ["MULTIMODAL", "text_aliases", "text_part"]

MULTIMODAL: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl": "Qwen2ForCausalLM", "qwen2_5_vl_text": "Qwen2ForCausalLM"},
}
"""Architecture -> `model_type` of its text part -> the architecture of that part alone."""

# What the config class of transformers fills in, and published configs leave out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma3ForCausalLM": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 131072,
    },
}  # fmt: skip
_SHARED = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
_IMAGES = ("visual.", "vision_tower.", "multi_modal_projector.")
"""Prefixes of what reads images, with or without "model." before them."""
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    "model.": "model.",
}
"""Of the text part -> in a decoder's checkpoint."""


def text_part(architecture: str, raw: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The contents of config.json of the text part alone.

    Args:
        architecture: one of `MULTIMODAL`.
        raw: the contents of config.json. Older files of Qwen2.5-VL have no `text_config`, and its fields beside the others.
        names: of the tensors in the checkpoint, which decide whether the head shares the embedding's weight.

    Raises:
        ModelError: the text part is missing, or of a kind that is not supported.
    """
    kinds = MULTIMODAL[architecture]
    text = raw.get("text_config")
    if text is None and raw.get("model_type") in kinds:
        text = {key: value for key, value in raw.items() if key != "vision_config"}
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json of {architecture} must have an object text_config; got {text!r:.60}")
    kind: Any = text.get("model_type")
    if kind not in kinds:
        raise ModelError(f"text_config.model_type of {architecture} must be {' or '.join(kinds)}, got {kind!r:.60}")
    found = {**_DEFAULTS.get(kinds[kind], {}), **text}
    found |= {key: raw[key] for key in _SHARED if raw.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(key), Mapping) and "mrope_section" in rope:
            plain = {name: value for name, value in rope.items() if name != "mrope_section"}
            found[key] = {name: "default" if value == "mrope" else value for name, value in plain.items()}
    found["tie_word_embeddings"] = not any(name.endswith("lm_head.weight") for name in names)
    return found | {"architectures": [kinds[kind]]}


def text_aliases(names: Iterable[str]) -> dict[str, str]:
    """The names of the text part's tensors in a decoder's checkpoint -> those in this one, without what reads images."""
    found: dict[str, str] = {}
    for name in names:
        if name.removeprefix("model.").startswith(_IMAGES):
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        found[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = name
    return found
