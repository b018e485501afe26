"""Checkpoints that also take images: their text part against transformers' whole model, on text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.folders import rewrite_config
from tests.models.running import run_logits
from tilewright.engine.config import EngineConfig
from tilewright.engine.loading import load
from tilewright.models import ModelError, load_config, load_model, save_model, save_quantized
from tilewright.quant import quantize

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

TOKENS = [5, 9, 31, 7, 80, 2, 44, 5, 60, 11]
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
IMAGES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {**TEXT, "head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        {**IMAGES, "patch_size": 14},
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {**IMAGES, "patch_size": 14, "model_type": "pixtral", "head_dim": 16},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {**TEXT, "rope_parameters": MROPE},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The folder of a model, and its logits on text."""
    kind, text, images = MODELS[request.param]
    config = getattr(transformers, kind)(text_config=text, vision_config=images)
    config._attn_implementation = "eager"
    model = getattr(transformers, request.param)(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "vis" not in name:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder, model(torch.tensor([TOKENS])).logits[0]


def test_text_has_the_logits_of_the_whole_model(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, want = saved
    model = load_model(folder, device="cpu")
    assert want.std() > 0.3
    assert (run_logits(model, TOKENS, 4) - want).abs().max() < 1e-4
    save_model(model, tmp_path / "text")
    assert (run_logits(load_model(tmp_path / "text", device="cpu"), TOKENS, 10) - want).abs().max() < 1e-4
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    with torch.no_grad():
        assert (theirs(torch.tensor([TOKENS])).logits[0] - want).abs().max() < 1e-4
    quantize(model, "int8")
    save_quantized(model, tmp_path / "codes", folder)
    again = load_model(tmp_path / "codes", device="cpu")
    assert torch.equal(run_logits(again, TOKENS, 4), run_logits(model, TOKENS, 4))


def test_names_of_newer_checkpoints(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """Text under model.language_model, images under model.vision_tower or model.visual, the head at the top."""
    folder, want = saved
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())

    def new(name: str) -> str:
        name = name.removeprefix("language_model.")
        if name.startswith("lm_head."):
            return name
        return f"model.language_model.{name[6:]}" if name.startswith("model.") else f"model.{name}"

    tensors = {new(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (run_logits(load_model(tmp_path, device="cpu"), TOKENS, 4) - want).abs().max() < 1e-4


def test_what_is_left_out_is_said(saved: tuple[Path, torch.Tensor]) -> None:
    said: list[str] = []
    load(saved[0], EngineConfig(device="cpu", kv_cache_bytes=1 << 20, max_seqs=2), said.append)
    assert "ForConditionalGeneration: only the text part is loaded; images in prompts are refused" in said[0]


def test_other_text_parts_are_refused(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for text, words in (
        ({"model_type": "mamba"}, "text_config.model_type of .* got 'mamba'"),
        ("none", "must have an object text_config"),
    ):
        rewrite_config(tmp_path, text_config=text)
        with pytest.raises(ModelError, match=words):
            load_config(tmp_path)
