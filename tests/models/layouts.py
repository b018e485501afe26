"""Quantised checkpoints as others write them, made here from random codes, and the float checkpoint that each of them means.

Every packer is written from the layout's description, with plain loops, and shares nothing with what reads it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.folders import write_folder

SIZES = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 48, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128),
    "mlp.up_proj": (192, 128),
    "mlp.down_proj": (128, 192),
}
Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by suffix of the layer's name, and the weight [N, K] that they mean."""
Packer = Callable[[torch.Generator, int, int], Packed]


def _int8(rng: torch.Generator, n: int, k: int) -> Packed:
    codes = torch.randint(-127, 128, (n, k), generator=rng, dtype=torch.int8)
    scale = (torch.rand(n, 1, generator=rng) * 0.001 + 0.0005).bfloat16()
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def _static(pack: Packer) -> Packer:
    """With one scale for the layer's input, as calibration would find it: of its own in each part of a merged layer."""

    def static(rng: torch.Generator, n: int, k: int) -> Packed:
        tensors, weight = pack(rng, n, k)
        largest = 448 if tensors["weight"].dtype == torch.float8_e4m3fn else 127
        return {**tensors, "input_scale": (torch.rand(1, generator=rng) + 3) / largest}, weight

    return static


def _fp8(scale_shape: Callable[[int], tuple[int, ...]]) -> Packer:
    def pack(rng: torch.Generator, n: int, k: int) -> Packed:
        codes = (torch.randn(n, k, generator=rng) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.rand(scale_shape(n), generator=rng) * 0.0005 + 0.0003
        return {"weight": codes, "weight_scale": scale}, codes.float() * (scale if scale.dim() == 2 else scale.reshape(1, 1))

    return pack


def _blocks(name: str) -> Packer:
    def pack(rng: torch.Generator, n: int, k: int) -> Packed:
        codes = (torch.randn(n, k, generator=rng) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-n // 128), -(-k // 128), generator=rng) * 0.0008 + 0.0003
        weight = codes.float()
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
        return {"weight": codes, name: scale}, weight

    return pack


def _four_bits(rng: torch.Generator, n: int, k: int, group: int, zero: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [N, K], zeros [N, K / group], scales float16 [N, K / group], weight)."""
    codes = torch.randint(0, 16, (n, k), generator=rng)
    zeros = torch.full((n, k // group), zero) if zero is not None else torch.randint(1, 16, (n, k // group), generator=rng)
    scales = (torch.rand(n, k // group, generator=rng) * 0.02 + 0.01).half()
    weight = torch.empty(n, k)
    for j in range(k):
        weight[:, j] = (codes[:, j] - zeros[:, j // group]).float() * scales[:, j // group].float()
    return codes, zeros, scales, weight


def _words(columns: Tensor, order: list[int]) -> Tensor:
    """[R, 8 W] numbers below 16 -> int32 [R, W]; number order[i] of eight stands at bit 4 i."""
    rows, width = columns.shape
    packed = torch.zeros(rows, width // 8, dtype=torch.int64)
    for word in range(width // 8):
        for i, source in enumerate(order):
            packed[:, word] |= columns[:, 8 * word + source].long() << (4 * i)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


STRAIGHT, AWQ_ORDER = list(range(8)), [0, 2, 4, 6, 1, 3, 5, 7]


def _gptq(group: int, *, symmetric: bool, less: int, order: bool) -> Packer:
    def pack(rng: torch.Generator, n: int, k: int) -> Packed:
        codes, zeros, scales, weight = _four_bits(rng, n, k, group, 8 if symmetric else None)
        tensors = {
            "qweight": _words(codes, STRAIGHT).t().contiguous(),
            "qzeros": _words(zeros.t() - less, STRAIGHT),
            "scales": scales.t().contiguous(),
        }
        if order:
            tensors["g_idx"] = (torch.arange(k) // group).int()
        return tensors, weight

    return pack


def _awq(group: int) -> Packer:
    def pack(rng: torch.Generator, n: int, k: int) -> Packed:
        codes, zeros, scales, weight = _four_bits(rng, n, k, group, None)
        tensors = {"qweight": _words(codes.t(), AWQ_ORDER), "qzeros": _words(zeros.t(), AWQ_ORDER)}
        return {**tensors, "scales": scales.t().contiguous()}, weight

    return pack


def _pack_quantized(rng: torch.Generator, n: int, k: int) -> Packed:
    codes, _, scales, weight = _four_bits(rng, n, k, 64, 8)
    return {"weight_packed": _words(codes, STRAIGHT), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}, weight


def _compressed(kind: str, bits: int, strategy: str, *, dynamic: bool | None = True, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it; `dynamic` None: activations are not quantised; False: with one scale for all tokens."""
    by = "tensor" if dynamic is False else "token"
    inputs = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": by, "dynamic": dynamic}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **weights},
        "input_activations": None if dynamic is None else inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, "lm_head": False}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
_DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

LAYOUTS: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "compressed-tensors int8": (_compressed("int", 8, "channel"), _int8, "int8"),
    "compressed-tensors int8 weights": (_compressed("int", 8, "channel", dynamic=None), _int8, "int8-weight"),
    "compressed-tensors fp8": (_compressed("float", 8, "channel"), _fp8(lambda n: (n, 1)), "fp8"),
    "compressed-tensors fp8 by tensor": (_compressed("float", 8, "tensor"), _fp8(lambda n: (1,)), "fp8"),
    "compressed-tensors int8 static": (_compressed("int", 8, "channel", dynamic=False), _static(_int8), "int8-static"),
    "compressed-tensors fp8 static": (
        _compressed("float", 8, "tensor", dynamic=False), _static(_fp8(lambda n: (1,))), "fp8-static",
    ),
    "compressed-tensors fp8 by block": (
        _compressed("float", 8, "block", block_structure=[128, 128]), _blocks("weight_scale"), "fp8-block",
    ),
    "compressed-tensors int4": (_compressed("int", 4, "group", dynamic=None, group_size=64), _pack_quantized, "int4"),
    "deepseek fp8": (_DEEPSEEK, _blocks("weight_scale_inv"), "fp8-block"),
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8(lambda n: ()), "fp8"),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, _static(_fp8(lambda n: ())), "fp8-static"),
    "gptq": (_GPTQ, _gptq(64, symmetric=True, less=1, order=True), "int4"),
    "gptq with zeros": ({**_GPTQ, "sym": False}, _gptq(64, symmetric=False, less=1, order=False), "int4"),
    "gptq v2": (
        {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, _gptq(64, symmetric=False, less=0, order=True), "int4",
    ),
    "awq": (_AWQ, _awq(64), "int4"),
}  # fmt: skip
"""Name -> quantization_config, its packer, the format that the weights then have."""


def tensors_of(pack: Packer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the quantised checkpoint, the float one that it means)."""
    rng = torch.Generator().manual_seed(0)
    common = {
        "model.embed_tokens.weight": torch.randn(48, 128, generator=rng),
        "lm_head.weight": torch.randn(48, 128, generator=rng) * 0.1,
        "model.norm.weight": torch.ones(128),
    }
    for i in range(2):
        common |= {
            f"model.layers.{i}.{name}.weight": torch.ones(128) for name in ("input_layernorm", "post_attention_layernorm")
        }
    codes, floats = dict(common), dict(common)
    for i in range(2):
        for name, (n, k) in LINEAR.items():
            tensors, weight = pack(rng, n, k)
            codes |= {f"model.layers.{i}.{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
            floats[f"model.layers.{i}.{name}.weight"] = weight
    return codes, floats


def write_layout(folder: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """(a folder of the layout, a folder of the float model that it means). `changes` are of quantization_config."""
    config, pack, _ = LAYOUTS[name]
    codes, floats = tensors_of(pack)
    quantised = write_folder(folder / "codes", {**SIZES, "quantization_config": {**config, **changes}}, codes)
    return quantised, write_folder(folder / "floats", SIZES, floats)
