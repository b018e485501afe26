"""Folders of random encoders with a tokenizer of words, as sentence-transformers writes them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["a", "man", "is", "playing", "guitar", "on", "the", "street", "rates", "were", "raised", "by", "half", "percent", "cats"],
]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24, "pad_token_id": 0,
}  # fmt: skip


def word_tokenizer() -> tokenizers.Tokenizer:
    """A word a token; [CLS] before, [SEP] behind each of one or two texts."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(WORDS[:4])
    special = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    return backend


def write_encoder(
    folder: Path, *, labels: int = 0, modules: tuple[str, ...] | None = None, types: bool = True, **config: Any
) -> Path:
    """Write the folder of a BERT; returns it.

    labels: of its head; 0 for none. modules: the way of pooling for modules.json, and "Normalize" perhaps; None: no such file.
    types: whether the tokenizer says which of two texts a token is of.
    """
    import transformers

    torch.manual_seed(len(modules or ()) + labels)
    settings: dict[str, Any] = {**SIZES, **config, **({"num_labels": labels} if labels else {})}
    sizes = transformers.BertConfig(**settings)
    model = transformers.BertForSequenceClassification(sizes) if labels else transformers.BertModel(sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if modules is not None:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][: 1 + len(modules)]
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        ways = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        pooling = {"word_embedding_dimension": 32, **{f"pooling_mode_{way}": way == modules[0] for way in ways}}
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
        (folder / "2_Normalize").mkdir()
    return folder
