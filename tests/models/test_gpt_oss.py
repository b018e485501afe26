"""gpt-oss as it is published: experts in mxfp4, read as the floats that transformers reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.oracles import make_oracle
from tests.models.running import run_logits
from tilewright.models import ModelError, load_model

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers, the oracle, is not installed")

TOKENS = [5, 9, 31, 7, 80, 2, 44]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(with floats, with codes and scales): what the codes mean, transformers says."""
    sizes = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
    floats, codes = tmp_path / "floats", tmp_path / "codes"
    make_oracle("gpt-oss", sizes).save_pretrained(floats)
    tensors = load_file(floats / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]:
        experts, cols, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(123, 127, (experts, rows, cols // 32), generator=generator, dtype=torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    codes.mkdir()
    raw = json.loads((floats / "config.json").read_text())
    (codes / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    save_file(packed, codes / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    return floats, codes


def test_codes_are_read_as_what_they_mean(folders: tuple[Path, Path]) -> None:
    models = [load_model(folder, device="cpu") for folder in folders]
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(*(run_logits(model, TOKENS, 3) for model in models))


def test_scales_of_another_shape_are_refused(folders: tuple[Path, Path]) -> None:
    path = folders[1] / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:2].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj_scales: shape is \[2, 64, 1\], config.json requires \[3, 64, 1\]"):
        load_model(folders[1], device="cpu")
