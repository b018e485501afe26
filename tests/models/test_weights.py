"""Loading: where a model is found, what lands where, and what every kind of broken folder is told."""

from pathlib import Path
from typing import Any, cast

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import save_file

from tests.models.folders import LLAMA, llama_tensors, rewrite_config, shard, write_folder
from tests.models.running import run_logits
from tilewright.models import ModelConfig, ModelError, load_model, random_model, resolve


def test_merged_rows_are_the_separate_projections(tmp_path: Path) -> None:
    model, source = load_model(write_folder(tmp_path), device="cpu"), llama_tensors()
    parameters = dict(model.named_parameters())
    prefix = "model.layers.1."
    want = torch.cat([source[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(parameters["blocks.1.attn.qkv.weight"], want)
    want = torch.cat([source[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(parameters["blocks.1.ffn.gate_up.weight"], want)
    assert torch.equal(parameters["head.weight"], source["lm_head.weight"])
    assert sum(p.numel() for p in parameters.values()) == sum(t.numel() for t in source.values())
    assert not any(p.requires_grad for p in parameters.values())


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    one = load_model(write_folder(tmp_path), device="cpu").state_dict()
    two = load_model(shard(tmp_path), device="cpu").state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16], ids=str)
def test_converts_to_the_wanted_dtype(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype | None) -> None:
    source = {name: tensor.to(stored) for name, tensor in llama_tensors().items()}
    write_folder(tmp_path, {**LLAMA, "torch_dtype": str(stored).removeprefix("torch.")}, source)
    model = load_model(tmp_path, device="cpu", dtype=wanted)
    assert {p.dtype for p in model.parameters()} == {wanted or stored}
    assert torch.equal(model.embed.weight, source["model.embed_tokens.weight"].to(wanted or stored))
    assert cast(Any, model.blocks[0]).attn.rope.cos_sin.dtype == torch.float32


@pytest.mark.parametrize("saved_as", ["embedding", "head", "both"])
def test_tied_head_shares_the_embedding_however_it_was_saved(tmp_path: Path, saved_as: str) -> None:
    tensors = llama_tensors(tied=True)
    table = tensors["model.embed_tokens.weight"]
    if saved_as != "embedding":
        tensors["lm_head.weight"] = table.clone()
    if saved_as == "head":
        del tensors["model.embed_tokens.weight"]
    model = load_model(write_folder(tmp_path, {**LLAMA, "tie_word_embeddings": True}, tensors), device="cpu")
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, table)


def test_old_checkpoints_may_carry_the_rotation(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    load_model(write_folder(tmp_path, tensors={**llama_tensors(), **extra}), device="cpu")


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load_model(write_folder(tmp_path), device="cpu", progress=lambda done, total: calls.append((done, total)))
    total = sum(p.nbytes for p in model.parameters())
    assert len(calls) == len(llama_tensors())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize(
    ("tied", "changes", "message"),
    [
        (False, {"vocab_size": 32}, r"model.embed_tokens.weight: shape is \[31, 16\], config.json requires \[32, 16\]"),
        (False, {"num_key_value_heads": 1}, r"0.self_attn.k_proj.weight: shape is \[8, 16\], config.json requires \[4, 16\]"),
        (False, {"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight: unexpected"),
        (False, {"num_hidden_layers": 3}, "model.layers.2.mlp.down_proj.weight: missing"),
        (False, {"attention_bias": True}, "model.layers.1.self_attn.o_proj.bias: missing"),
        (True, {}, "lm_head.weight: missing"),
        (False, {"tie_word_embeddings": True}, r"tie_word_embeddings\), but lm_head.weight differs"),
        (False, {"num_hidden_layers": 30}, "and 240 more"),
    ],
)  # fmt: skip
def test_config_that_contradicts_the_weights(tmp_path: Path, tied: bool, changes: dict, message: str) -> None:
    write_folder(tmp_path, {**LLAMA, **changes}, llama_tensors(tied))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, device="cpu")


def _truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "half a config": (lambda f: _truncate(f / "config.json", 20), "config.json is not JSON"),
    "a list for a config": (lambda f: (f / "config.json").write_text("[]"), "must contain a JSON object, got list"),
    "bad generation config": (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json is not JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "half the weights": (lambda f: _truncate(f / "model.safetensors", 6000), "model.safetensors is not a complete"),
    "empty weights": (lambda f: _truncate(f / "model.safetensors", 0), "model.safetensors is not a complete"),
    "noise for weights": (
        lambda f: (f / "model.safetensors").write_bytes(bytes(range(256)) * 40), "model.safetensors is not a complete",
    ),
    "shard missing": (
        lambda f: (shard(f) / "model-00002-of-00002.safetensors").unlink(),
        "does not have model-00002-of-00002.safetensors, which model.safetensors.index.json lists",
    ),
    "half a shard": (lambda f: _truncate(shard(f) / "model-00001-of-00002.safetensors", 900), "00001-of-00002.safetensors is"),
    "half an index": (lambda f: _truncate(shard(f) / "model.safetensors.index.json", 30), "index.json is not JSON"),
    "index without a map": (
        lambda f: (shard(f) / "model.safetensors.index.json").write_text("{}"), "index.json must have a weight_map",
    ),
    "pickled": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"pickled weights \(pytorch_model.bin\).*not read",
    ),
    "integers": (
        lambda f: save_file({"model.norm.weight": torch.ones(16, dtype=torch.int8)}, f / "model.safetensors"),
        "model.norm.weight is I8, but a tensor that is not quantised must be one of BF16, F16, F32, F64",
    ),
    "architecture": (
        lambda f: rewrite_config(f, architectures=["GPTJForCausalLM"], hidden_size=None),
        "GPTJForCausalLM is not supported; the nearest that are: GptOssForCausalLM, [A-Za-z0-9_, ]*; "
        "supported with the ending ForCausalLM: Arcee, Cohere, Cohere2, DeepseekV2, [A-Za-z0-9_, ]*; and GPT2LMHeadModel, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=list(BROKEN))
def test_broken_folder_is_told_what_is_wrong(tmp_path: Path, damage, message: str) -> None:
    damage(write_folder(tmp_path))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, device="cpu")


def test_nothing_is_allocated_for_a_folder_that_does_not_fit(tmp_path: Path) -> None:
    """A hundred gigabytes of embedding are refused by comparing headers."""
    write_folder(tmp_path, {**LLAMA, "vocab_size": 2**30})
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: shape is"):
        load_model(tmp_path, device="cpu")


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    write_folder(tmp_path, {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    (tmp_path / "modeling.py").write_text("raise SystemExit('ran')")
    load_model(tmp_path, device="cpu")


def test_resolve_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("went to the hub"))
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve(file)


def test_resolve_asks_the_hub_for_nothing_but_weights_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    repository = [*wanted, "pytorch_model.bin", "modeling.py", "original/params.json", "consolidated.safetensors", "README.md"]
    kept: list[str] = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        kept.extend(
            huggingface_hub.utils.filter_repo_objects(
                repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("someone/something") == tmp_path
    assert kept == wanted


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("no network"), "hub cannot be reached; connect to the network, or give the path"),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "cannot be downloaded from the hub"),
    ],
    ids=["offline", "unknown"],
)
def test_hub_trouble_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=message):
        resolve("someone/something")


def test_a_name_that_no_hub_could_have() -> None:
    with pytest.raises(ModelError, match=r"no folder \./models/a/b, and it is not the name of a model on the hub"):
        resolve("./models/a/b")


def test_embedded_name_never_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("went to the hub"))
    monkeypatch.setattr("tilewright.models.weights._EMBEDDED", tmp_path)
    with pytest.raises(ModelError, match="the model 'bookworm' is in tilewright's repository but not in its wheel"):
        resolve("bookworm")
    (tmp_path / "bookworm").mkdir()
    assert resolve("bookworm") == tmp_path / "bookworm"


def test_random_model_is_reproducible_and_finite() -> None:
    raw = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 12, "hidden_size": 64}
    config = ModelConfig.from_hf(raw)
    model, again, other = (random_model(config, device="cpu", dtype=torch.bfloat16, seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.embed.weight, other.embed.weight)
    logits = run_logits(model, list(range(20)), 20)
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.float().std() < 10


def test_smallest_config_that_is_enough(tmp_path: Path) -> None:
    needed = {"architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    needed |= {"num_key_value_heads", "max_position_embeddings"}
    write_folder(tmp_path, {key: value for key, value in LLAMA.items() if key in needed})
    assert load_model(tmp_path, device="cpu").config.rms_norm_eps == 1e-6
