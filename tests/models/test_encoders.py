"""Encoders against transformers: the same folder, ragged batches without padding against padded ones with masks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.folders import rewrite_config
from tilewright.models import ModelError
from tilewright.models.encoders import Encoder, load_encoder
from tilewright.nn import Lengths

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

SIZES = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0,
    "sep_token_id": 2,
}  # fmt: skip
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "Model", {"type_vocab_size": 3}),
    "bert for masked words": ("Bert", "ForMaskedLM", {"hidden_act": "gelu_new"}),
    "bert with a head": ("Bert", "ForSequenceClassification", {"num_labels": 3, "hidden_act": "relu"}),
    "roberta": ("Roberta", "Model", ROBERTA),
    "roberta with a head": ("Roberta", "ForSequenceClassification", {**ROBERTA, "num_labels": 1}),
    "xlm-roberta": ("XLMRoberta", "ForMaskedLM", {**ROBERTA, "num_attention_heads": 3}),
    "xlm-roberta with a head": ("XLMRoberta", "ForSequenceClassification", {**ROBERTA, "num_labels": 1}),
    "modernbert": ("ModernBert", "Model", {"local_attention": 6}),
    "modernbert with biases": (
        "ModernBert", "ForMaskedLM", {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 4},
    ),
    "modernbert with a head": ("ModernBert", "ForSequenceClassification", {"num_labels": 2, "local_attention": 8}),
    "modernbert, mean": (
        "ModernBert", "ForSequenceClassification", {"num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
}  # fmt: skip
LENGTHS = (7, 1, 19, 12)


def make_oracle(family: str, what: str, changes: dict[str, Any]) -> Any:
    """A model of transformers where no weight is trivial."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    oracle = getattr(transformers, f"{family}{what}")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in oracle.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3, generator=generator)
    return oracle


def packed(sequences: list[list[int]]) -> tuple[torch.Tensor, Lengths, torch.Tensor]:
    """(ids, lengths, positions)."""
    ends = torch.tensor([0, *map(len, sequences)]).cumsum(0).int()
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return torch.tensor([i for s in sequences for i in s]), Lengths(cu=ends, longest=max(map(len, sequences))), positions


def padded(sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, sequences))
    ids = [sequence + [SIZES["pad_token_id"]] * (longest - len(sequence)) for sequence in sequences]
    mask = [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def both(oracle: Any, model: Encoder, types: int) -> None:
    rng = random.Random(1)
    sequences = [[rng.randrange(3, 61) for _ in range(length)] for length in LENGTHS]
    batch = padded(sequences)
    kinds = None
    if types > 1:
        kinds = [[rng.randrange(types) for _ in sequence] for sequence in sequences]
        longest = batch["input_ids"].shape[1]
        batch["token_type_ids"] = torch.tensor([kind + [0] * (longest - len(kind)) for kind in kinds])
    body = getattr(oracle, model.prefix, oracle)
    want = body(**batch).last_hidden_state
    ids, lengths, positions = packed(sequences)
    flat = None if kinds is None else torch.tensor([kind for of_one in kinds for kind in of_one])
    hidden = model(ids, lengths, positions, flat)
    assert want.std() > 0.5
    assert (hidden - want[batch["attention_mask"].bool()]).abs().max() < 1e-4
    if model.config.labels:
        assert (model.logits(hidden, lengths) - oracle(**batch).logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    family, what, changes = CASES[name]
    oracle = make_oracle(family, what, changes)
    oracle.save_pretrained(tmp_path)
    model = load_encoder(tmp_path, device="cpu")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    both(oracle, model, changes.get("type_vocab_size", 2) if family == "Bert" else 1)
    assert model.config.labels == (changes["num_labels"] if what == "ForSequenceClassification" else 0)


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_old_names(prefix: str, tmp_path: Path) -> None:
    """gamma and beta, position_ids, and what a model was trained with beside the encoder."""
    oracle = make_oracle("Bert", "Model", {})
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + n.replace("LayerNorm.weight", "LayerNorm.gamma"): t for n, t in tensors.items()}
    extra = {f"{prefix}embeddings.position_ids": torch.arange(40), "cls.predictions.bias": torch.zeros(61)}
    save_file({**renamed, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    both(oracle, load_encoder(tmp_path, device="cpu"), 2)


REFUSED = {
    "relative positions": ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', wanted"),
    "decoder": ({"is_decoder": True}, "is_decoder is True, wanted False"),
    "activation": ({"hidden_act": "mish2"}, "the activation 'mish2' is not supported; supported: gelu"),
    "heads": ({"num_attention_heads": 5}, "hidden_size 48 is not a multiple of the number of heads, 5"),
    "layers": ({"num_hidden_layers": 4}, "contradict each other in 16 tensors:\n  bert.encoder.layer.3.attention.self"),
    "fewer layers": ({"num_hidden_layers": 1}, "encoder.layer.1.attention.output.LayerNorm.bias: unexpected"),
    "sizes": ({"vocab_size": 60}, r"embeddings.word_embeddings.weight: shape is \[61, 48\], config.json requires \[60, 48\]"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised encoders are not supported"),
    "architecture": ({"architectures": ["BertForTokenClassification"]}, "the nearest that are: Bert"),
    "a type": ({"type_vocab_size": "2"}, "type_vocab_size is '2', wanted integer"),
    "dtype": ({"dtype": "int8"}, "dtype 'int8' is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    make_oracle("Bert", "Model", {}).save_pretrained(tmp_path)
    rewrite_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_encoder(tmp_path, device="cpu")
