"""Draft heads in the layouts in which they are published, and what they say, computed by transformers' own layers.

Every weight is random and none is trivial. The definitions here know no cache, no pages and no steps: a head is run over the
whole text for each token that it guesses.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.server.fake_engine import EOS, VOCAB
from tests.server.tiny_model import write_tiny_model

HIDDEN = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": EOS,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
AUX = (0, 1, 2)
Guess = Callable[[list[int], int], list[int]]
"""(tokens, how many) -> the likeliest tokens behind them, as a head sees it."""


def random_weights(module: torch.nn.Module, seed: int) -> None:
    """No weight is trivial."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3, generator=generator)
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3, generator=generator)


def oracle(family: str, seed: int, **changes: Any) -> Any:
    """A model of transformers."""
    config = getattr(transformers, f"{family}Config")(**{**(DEEPSEEK if family == "DeepseekV3" else SIZES), **changes})
    config._attn_implementation = "eager"
    made = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    random_weights(made, seed)
    return made


def write_model(folder: Path, model: Any, more: dict[str, Tensor] | None = None) -> Path:
    """A model's folder, with a tokenizer of bytes; `more`: tensors beside its own."""
    write_tiny_model(folder)
    model.save_pretrained(folder)
    save_file({**load_file(folder / "model.safetensors"), **(more or {})}, folder / "model.safetensors")
    return folder


def write_head(folder: Path, architecture: str, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {**SIZES, "architectures": [architecture], "num_hidden_layers": 1, "hidden_act": "silu", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _run(layer: Any, rotary: Any, x: Tensor) -> Tensor:
    """A layer of transformers over a whole text [T, E]."""
    count = x.shape[0]
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    angles = rotary(x[None], torch.arange(count)[None])
    made = layer(x[None], attention_mask=mask, position_embeddings=angles)
    return (made[0] if isinstance(made, tuple) else made).view(count, -1)


def _guesser(model: Any, states: Callable[[list[Tensor]], Tensor], run: Callable[[Tensor, Tensor], Tensor], say: Any) -> Guess:
    """states: of the model's hidden states; run: (embeddings, states) -> streams; say: a stream -> the likeliest token."""

    def guess(tokens: list[int], count: int) -> list[int]:
        seen = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        kept, text = states([state[0, :-1] for state in seen]), list(tokens)
        for _ in range(count):
            streams = run(model.model.embed_tokens(torch.tensor(text[1:])), kept)
            text.append(say(streams[-1]))
            kept = torch.cat((kept, streams[-1:]))
        return text[len(tokens) :]

    return guess


def eagle(folder: Path, model: Any, seed: int = 5, *, fc: Tensor | None = None, still: bool = False) -> tuple[Path, Guess]:
    """An EAGLE head. still: its block adds nothing."""
    inner = oracle("Llama", seed, num_hidden_layers=1).model
    layer = inner.layers[0]
    layer.input_layernorm = torch.nn.Identity()
    if still:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    fc = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed)) / 8 if fc is None else fc
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors |= {"fc.weight": fc, "embed_tokens.weight": model.model.embed_tokens.weight}
    run = lambda e, h: _run(layer, inner.rotary_emb, torch.cat((e, h), -1) @ fc.T)  # noqa: E731
    guess = _guesser(model, lambda seen: seen[-1], run, lambda stream: int(model.lm_head(stream).argmax()))
    return write_head(folder, "LlamaForCausalLM", tensors), guess


def eagle3(folder: Path, model: Any, seed: int = 6, *, draft_vocab: int = 100, normed: bool = False) -> tuple[Path, Guess]:
    """An EAGLE-3 head that knows some of the tokens."""
    inner, generator = oracle("Llama", seed, num_hidden_layers=1).model, torch.Generator().manual_seed(seed)
    layer, attention = inner.layers[0], inner.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        wide = torch.randn(getattr(attention, name).weight.shape[0], 2 * HIDDEN, generator=generator) / 8
        setattr(attention, name, torch.nn.Linear(2 * HIDDEN, wide.shape[0], bias=False))
        getattr(attention, name).weight = torch.nn.Parameter(wide, requires_grad=False)
    hidden_norm = torch.rand(HIDDEN, generator=generator) + 0.5
    fc = torch.randn(HIDDEN, len(AUX) * HIDDEN, generator=generator) / 10
    head = torch.randn(draft_vocab, HIDDEN, generator=generator) / 5
    known = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors |= {"midlayer.hidden_norm.weight": hidden_norm, "fc.weight": fc, "lm_head.weight": head}
    tensors |= {"norm.weight": inner.norm.weight, "d2t": known - torch.arange(draft_vocab)}
    tensors |= {"t2d": torch.isin(torch.arange(VOCAB), known)}

    def run(embedded: Tensor, states: Tensor) -> Tensor:
        scaled = states * (states.square().mean(-1, keepdim=True) + SIZES["rms_norm_eps"]).rsqrt() * hidden_norm
        joined = torch.cat((layer.input_layernorm(embedded), scaled), -1)
        call = lambda x, **more: attention(x, **more)[0]  # noqa: E731
        stream = (scaled if normed else states) + _run(call, inner.rotary_emb, joined)
        return stream + layer.mlp(layer.post_attention_layernorm(stream))

    states = lambda seen: torch.cat([seen[i] for i in AUX], -1) @ fc.T  # noqa: E731
    guess = _guesser(model, states, run, lambda stream: int(known[(inner.norm(stream) @ head.T).argmax()]))
    told = {"eagle_aux_hidden_state_layer_ids": list(AUX), "draft_vocab_size": draft_vocab, "norm_before_residual": normed}
    return write_head(folder, "LlamaForCausalLMEagle3", tensors, **told), guess


def mtp(folder: Path, model: Any, seed: int = 7, *, proj: Tensor | None = None, still: bool = False) -> tuple[Path, Guess]:
    """A model with a layer for a second token. still: its block adds nothing."""
    other = oracle("DeepseekV3", seed, num_hidden_layers=1, first_k_dense_replace=0)
    layer, generator = other.model.layers[0], torch.Generator().manual_seed(seed)
    enorm, hnorm = torch.rand(HIDDEN, generator=generator) + 0.5, torch.rand(HIDDEN, generator=generator) + 0.5
    norm, head = other.model.norm.weight, other.lm_head.weight
    if still:
        enorm, norm, head = torch.ones(HIDDEN), torch.ones(HIDDEN), model.lm_head.weight
        for name, parameter in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")) or "down_proj" in name:
                parameter.zero_()
    proj = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / 8 if proj is None else proj
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    inner = write_state(layer)
    inner |= {"enorm.weight": enorm, "hnorm.weight": hnorm, "eh_proj.weight": proj, "shared_head.norm.weight": norm}
    inner |= {"shared_head.head.weight": head, "embed_tokens.weight": model.model.embed_tokens.weight}
    rms = lambda x, w: x * (x.square().mean(-1, keepdim=True) + SIZES["rms_norm_eps"]).rsqrt() * w  # noqa: E731
    run = lambda e, h: _run(layer, other.model.rotary_emb, torch.cat((rms(e, enorm), rms(h, hnorm)), -1) @ proj.T)  # noqa: E731
    guess = _guesser(model, lambda seen: seen[-1], run, lambda stream: int((rms(stream, norm) @ head.T).argmax()))
    return write_model(folder, model, {prefix + name: tensor.detach().clone() for name, tensor in inner.items()}), guess


def write_state(layer: Any) -> dict[str, Tensor]:
    """A DeepSeek layer under the names of published checkpoints: each expert by itself."""
    found: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"mlp.experts.{i}.gate_proj.weight"], found[f"mlp.experts.{i}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            found |= {f"mlp.experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found
