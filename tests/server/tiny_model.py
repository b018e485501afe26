"""A model folder that loads in a moment: a random Llama of 20 thousand parameters, the byte tokenizer, a chat template."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.server.fake_engine import CHAT_TEMPLATE, EOS, VOCAB, byte_backend

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": EOS,
}


def write_tiny_model(folder: Path, *, chat: bool = True) -> Path:
    """Write the folder; returns it."""
    generator = torch.Generator().manual_seed(0)
    hidden, wide, kv = 32, 48, 16
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        inner = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", **({"chat_template": CHAT_TEMPLATE} if chat else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    byte_backend().save(str(folder / "tokenizer.json"))
    return folder
