"""Models against transformers: the same folder, the same logits, however the prompt is cut into steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.folders import rewrite_config
from tests.models.running import make_batch, make_cache, run_logits
from tests.paths import SHARED
from tilewright.models import Model, load_model

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

TOKENS = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(0)).tolist()
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-multi-query-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-multi-head-biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24, "rms_norm_eps": 1e-3}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 1e4}}),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "use_sliding_window": True,
            "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 8, "rope_theta": 1e6}}),
}  # fmt: skip


def make_oracle(family: str, changes: dict[str, Any]) -> Any:
    """A model of transformers where no weight is trivial: matrices keep variance, norms and biases are not 1 and 0."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in oracle.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3, generator=generator)
    return oracle


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, torch.Tensor]:
    """A model loaded from the oracle's folder, and the oracle's logits."""
    oracle = make_oracle(*request.param)
    folder = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(folder)
    return load_model(folder, device="cpu"), oracle(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("chunk", [len(TOKENS), 7, 1], ids=["whole", "chunks", "token by token"])
def test_logits_equal_transformers(pair: tuple[Model, torch.Tensor], chunk: int) -> None:
    model, want = pair
    got = run_logits(model, TOKENS, chunk)
    assert want.std() > 0.5  # else the limit below would say nothing
    assert (got - want).abs().max().item() < 1e-4


def test_transformers_4_folder_gives_the_same_model(tmp_path: Path) -> None:
    """rope_theta, rope_scaling and torch_dtype at the top level."""
    oracle = make_oracle("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 2e4}})
    oracle.save_pretrained(tmp_path)
    rewrite_config(
        tmp_path, rope_parameters=None, dtype=None, torch_dtype="float32", rope_theta=2e4,
        rope_scaling={**LLAMA3, "original_max_position_embeddings": 32},
    )  # fmt: skip
    want = oracle(torch.tensor([TOKENS])).logits[0]
    assert (run_logits(load_model(tmp_path, device="cpu"), TOKENS, 23) - want).abs().max().item() < 1e-4


def test_sequences_in_one_batch_do_not_touch_each_other(pair: tuple[Model, torch.Tensor]) -> None:
    """A decode row, two prompt chunks, and padding, over shared pages, against each sequence alone."""
    model, want = pair
    cache = make_cache(model, 16, 4)
    a, b = [3, 9, 1, 12, 0, 7], [2, 15, 5, 4]
    model(torch.tensor(TOKENS[:20]), make_batch([(a, 0, 20)], 4), cache)
    shared = [*a[:2], 8, 6, 10, 11]  # a second sequence with the same first eight tokens: their pages are not written again
    batch = make_batch([(a, 20, 1), (b, 0, 9), (shared, 8, 15)], 4, padding=2)
    ids = [TOKENS[20], *TOKENS[:9], *TOKENS[8:23], 0, 0]
    hidden = model(torch.tensor(ids), batch, cache)
    got = model.logits(hidden[batch.logits_rows])
    assert got.shape == (25, 97)
    assert (got - torch.cat((want[20:21], want[:9], want[8:23]))).abs().max().item() < 1e-4
    assert torch.isfinite(hidden).all()


STORIES = SHARED / "models/stories260K"


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no trained model at {STORIES}")
def test_trained_model_continues_as_recorded() -> None:
    """Greedy continuation of a published checkpoint: each recorded token is the likeliest after those before it."""
    recorded = json.loads((STORIES / "expected.json").read_text())
    prompt, greedy = recorded["prompt_token_ids"], recorded["greedy_token_ids"]
    logits = run_logits(load_model(STORIES, device="cpu"), [*prompt, *greedy[:-1]], 64, page_size=16)
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == greedy
