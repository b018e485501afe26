"""Model folders for tests, good and broken."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def llama_tensors(tied: bool = False) -> dict[str, torch.Tensor]:
    """Random weights for the config LLAMA, under their Hugging Face names."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (31, 16), "model.norm.weight": (16,)}
    if not tied:
        shapes["lm_head.weight"] = (31, 16)
    for layer in range(2):
        inner = {
            "input_layernorm": (16,),
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "post_attention_layernorm": (16,),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
        }
        shapes.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in inner.items()})
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A model folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    save_file(llama_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> Path:
    """Turn the one file into two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[i::2]}, folder / file)
        weight_map.update(dict.fromkeys(names[i::2], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None drops one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
