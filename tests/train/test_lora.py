"""Adapters against the `peft` library: losses, gradients, folders in both directions, merged weights; and whole runs."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.models.test_models import CASES, make_oracle
from tests.server.tiny_model import write_tiny_model
from tests.test_cli import tilewright
from tests.train.test_packed import documents, packed
from tilewright.models import Model, load_config, load_model, random_model, save_model, weight_bytes_of
from tilewright.models.adapters import adapter_of, attach, merge, read_adapter, save_adapter, targets_of
from tilewright.nn import Linear, without_adapters
from tilewright.ops.weights import QuantizedWeight
from tilewright.train import loop
from tilewright.train.config import TrainConfig, merged, read_toml
from tilewright.train.lora import adapted, adapter_config, save_trained
from tilewright.train.main import train
from tilewright.train.setup import build_model, plan_memory, planned_model
from tilewright.train.step import NextToken, train_step, trainable

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
peft = pytest.importorskip("peft", reason="peft, the oracle, is not installed")

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "some parts": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True},
    "one block, ranks by name": {
        "r": 4, "lora_alpha": 8, "target_modules": r".*layers\.1\..*(k_proj|o_proj|down_proj)",
        "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"self_attn.o_proj": 3},
    },
}  # fmt: skip


def oracle_folder(tmp_path: Path, case: tuple[str, dict], settings: dict[str, Any]) -> tuple[Any, Path, Path]:
    """(peft's model with adapters that are not zero, the folder of its base, the folder of its adapter)."""
    base = make_oracle(*case)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1, generator=generator)
    model.save_pretrained(tmp_path / "adapter")
    return model, tmp_path / "base", tmp_path / "adapter"


def ours(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Model:
    model = load_model(base, device="cpu", dtype=dtype).requires_grad_(False)
    attach(model, read_adapter(adapter, targets_of(model)))
    return model


def peft_names(model: Model, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {(target.path, target.part): name for name, target in targets_of(model).items()}
    found = {}
    for path, grad in grads.items():
        layer, _, rest = path.partition(".adapter.")
        letter, part = rest.split(".")
        found[f"base_model.model.{names[layer, int(part)]}.lora_{letter.upper()}.default.weight"] = grad
    return found


def peft_gradients(oracle: Any, given: list[np.ndarray]) -> tuple[float, dict[str, Tensor]]:
    """One document after the other; in the oracle's dtype."""
    oracle.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for ids in map(torch.from_numpy, given):
        if len(ids) > 1:
            total = total + F.cross_entropy(oracle(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
    total.backward()
    return total.item(), {name: p.grad.double() for name, p in oracle.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("case", ["qwen3", "llama-multi-head-biases"])
def test_losses_and_gradients_are_pefts(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    oracle, base, folder = oracle_folder(tmp_path, CASES[case], settings)
    model, given = ours(base, folder), documents((9, 1, 23, 14))
    loss = NextToken()(model, packed(given))
    weights = trainable(model)
    got = peft_names(model, dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
    _, single = peft_gradients(oracle, given)
    want_loss, want = peft_gradients(oracle.double(), given)
    assert loss.item() == pytest.approx(want_loss, rel=1e-6)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        error, own = ((one[name] - grad).norm() / grad.norm() for one in (got, single))
        # In float32 peft itself is some 1e-6 from float64, where norms over heads make small numbers large.
        assert error < max(1e-6, 1.5 * own), f"{name}: {error:.1e}, peft {own:.1e}"


def test_without_adapters_it_is_the_base(tmp_path: Path) -> None:
    _, base, folder = oracle_folder(tmp_path, CASES["llama"], CONFIGS["all"])
    plain, model, batch = load_model(base, device="cpu"), ours(base, folder), packed(documents((9, 14)))
    with torch.no_grad():
        want = NextToken()(plain, batch).item()
        assert NextToken()(model, batch).item() != pytest.approx(want, rel=1e-3)
        with without_adapters(model):
            assert NextToken()(model, batch).item() == want
        assert NextToken()(model, batch).item() != pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=list(CONFIGS))
def test_peft_loads_what_we_save(settings: dict[str, Any], tmp_path: Path) -> None:
    oracle, base, folder = oracle_folder(tmp_path, CASES["llama"], settings)
    read = read_adapter(folder, targets_of(load_model(base, device="cpu")))
    save_adapter(adapter_of(ours(base, folder), read.config), tmp_path / "ours")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours")
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, oracle(ids).logits)
    want, got = (json.loads((at / "adapter_config.json").read_text()) for at in (folder, tmp_path / "ours"))
    same = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias")
    assert {name: got[name] for name in same} == {name: want[name] for name in same}


def test_shell_patterns_become_names(tmp_path: Path) -> None:
    _, base, _ = oracle_folder(tmp_path, CASES["llama"], CONFIGS["all"])
    config = TrainConfig(model=str(base), lora_rank=2, lora_targets=("*.layers.1.mlp.*", "o_proj"))
    model = adapted(config, load_model(base, device="cpu"))
    save_trained(config, model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
    mine = {name.replace(".lora_A", "") for name in peft_names(model, trainable(model)) if "lora_A" in name}
    theirs = {name.replace(".lora_A", "") for name, _ in again.named_parameters() if "lora_A" in name}
    assert mine == theirs
    assert len(mine) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_pefts(dtype: torch.dtype, tmp_path: Path) -> None:
    _, base, folder = oracle_folder(tmp_path, CASES["llama"], CONFIGS["all"])
    fresh = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    merged = peft.PeftModel.from_pretrained(fresh, folder).merge_and_unload()
    want = dict(merged.named_parameters())
    model = load_model(base, device="cpu", dtype=dtype)
    merge(model, read_adapter(folder, targets_of(model)))
    save_model(model, tmp_path / "merged")
    got = load_file(tmp_path / "merged/model.safetensors")
    assert got.keys() == want.keys()
    for name, weight in want.items():
        if dtype == torch.bfloat16:
            assert torch.equal(got[name], weight), name
        else:
            torch.testing.assert_close(got[name], weight.data, rtol=1e-6, atol=1e-6)


def test_the_merged_model_answers_as_the_adapter_does(tmp_path: Path) -> None:
    _, base, folder = oracle_folder(tmp_path, CASES["qwen3"], CONFIGS["some parts"])
    done = tilewright("merge", base, folder, "--out", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    batch = packed(documents((9, 14)))
    with torch.no_grad():
        a = NextToken()(ours(base, folder), batch).item()
        b = NextToken()(load_model(tmp_path / "merged", device="cpu"), batch).item()
        c = NextToken()(load_model(base, device="cpu"), batch).item()
    assert a == pytest.approx(b, rel=1e-6)
    assert a != pytest.approx(c, rel=1e-4)


# ---- whole runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    (tmp_path / "books.jsonl").write_text("".join(json.dumps({"text": f"to be or not to be {i}"}) + "\n" for i in range(30)))

    def make(**changes: Any) -> TrainConfig:
        small: dict[str, Any] = {"row_tokens": 48, "micro_rows": 2, "steps": 12, "warmup": 0, "lr": 1e-2, "lora_rank": 4}
        given = {"model": str(tiny), "data": [str(tmp_path / "books.jsonl")], "out": str(tmp_path / "run"), "device": "cpu"}
        return TrainConfig(**{**small, **given, "save_every": 5, "log_every": 4, **changes})

    return make


def losses(folder: Path) -> list[tuple[float, float]]:
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(entry["loss"], entry["norm"]) for entry in entries if "loss" in entry]


def quiet(words: str) -> None:
    pass


def test_a_run_ends_with_an_adapter_that_peft_loads(config: Callable[..., TrainConfig], tiny: Path, tmp_path: Path) -> None:
    summary = train(config(dtype="float32", steps=40), say=quiet)
    found = losses(tmp_path / "run")
    assert found[-1][0] < 0.8 * found[0][0]
    assert summary.loss == found[-1][0]
    save_model(load_model(tiny, device="cpu"), tmp_path / "base")  # with a model_type, which transformers asks for
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    oracle = peft.PeftModel.from_pretrained(fresh, tmp_path / "run/adapter")
    batch = packed(documents((20,), 256))
    want = F.cross_entropy(oracle(batch.token_ids[None]).logits[0, :-1], batch.token_ids[1:], reduction="sum")
    got = NextToken()(ours(tiny, tmp_path / "run/adapter"), batch)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    states = {name for one in (tmp_path / "run").glob("step-*/*.safetensors") for name in load_file(one)}
    # Of the base nothing is saved, and nothing has moments.
    assert all(".adapter." in name for name in states if name.startswith(("master", "moment")))
    assert not any(name.endswith(("qkv.weight", "embed.weight")) for name in states)


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16", "lora_dropout": 0.2}, {"dtype": "float32", "lora_base": "int4"}])
def test_a_stopped_run_goes_on_with_the_same_bits(
    config: Callable[..., TrainConfig], wide: Path, tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model": str(wide), **changes}
    train(config(out=str(tmp_path / "whole"), **changes), say=quiet)
    calls = iter(range(100))

    def stops(*given: Any) -> Any:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return train_step(*given)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", stops)
        with pytest.raises(KeyboardInterrupt):
            train(config(**changes), say=quiet)
    said: list[str] = []
    train(config(**changes), say=said.append)
    assert "continuing after step 5" in said
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    a, b = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a | b)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows have whole groups of int4."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "wide")
    raw = json.loads((folder / "config.json").read_text()) | {"hidden_size": 64, "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(raw))
    model = random_model(load_config(folder), device="cpu", dtype=torch.float32)
    save_model(model, folder)
    return folder


def test_an_int4_base_has_the_gradients_of_its_dequantised_weights(config: Callable[..., TrainConfig], wide: Path) -> None:
    settings = config(model=str(wide), lora_base="int4", dtype="float32")
    model = build_model(settings, torch.device("cpu"))
    codes = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
    assert len(codes) == 8
    assert all(weight.format == "int4" for weight in codes)
    plan = plan_memory(settings, planned_model(settings), torch.device("cpu"))
    count = sum(p.numel() for p in trainable(model).values())
    assert plan.weights == weight_bytes_of(model)
    assert (plan.gradients, plan.optimizer) == (4 * count, 8 * count)
    dense = load_model(wide, device="cpu", dtype=torch.float32).requires_grad_(False)
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and isinstance(layer.weight, QuantizedWeight):
            dense.get_submodule(name).weight.copy_(layer.weight.dequantize())  # pyright: ignore
    generator, batch = torch.Generator().manual_seed(2), packed(documents((11, 6), 256))
    for name, parameter in trainable(model).items():
        if ".b." in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    attach(dense, adapter_of(model, adapter_config(settings)))
    found = []
    for one in (model, dense):
        weights = trainable(one)
        loss = NextToken()(one, batch)
        found.append((loss.item(), torch.autograd.grad(loss, list(weights.values()))))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_dropout_is_for_training_alone(config: Callable[..., TrainConfig]) -> None:
    model = build_model(config(lora_dropout=0.5, dtype="float32"), torch.device("cpu"))
    for name, parameter in trainable(model).items():
        if ".b." in name:
            parameter.data.fill_(0.1)
    batch = packed(documents((11,), 256))
    assert NextToken()(model, batch).item() != NextToken()(model, batch).item()
    with torch.no_grad():
        assert NextToken()(model, batch).item() == NextToken()(model, batch).item()


def test_it_goes_on_from_an_adapter(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    train(config(dtype="float32", steps=20), say=quiet)
    train(config(dtype="float32", out=str(tmp_path / "more"), lora_adapter=str(tmp_path / "run/adapter"), steps=1), say=quiet)
    assert losses(tmp_path / "more")[0][0] < 0.95 * losses(tmp_path / "run")[0][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_targets": ("q_proj", "qproj")}, "lora_targets has 'qproj', which matches no layer; the layers are down_proj"),
        ({"lora_rank": 4096}, "the rank of an adapter is 4096, wanted 1 to 1024"),
        ({"lora_adapter": "/no/such/folder"}, "has no adapter_config.json"),
        ({"lora_base": "int4"}, "is a multiple of its group size"),
        ({"init": "random"}, "set init to load, or lora_rank to 0"),
        ({"lora_rank": 0, "lora_base": "int4"}, "set lora_rank"),
        ({"lora_rank": -1}, "lora_rank is -1, wanted 0 or more"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0, wanted at least 0 and below 1"),
        ({"lora_base": "int3"}, "wanted one of float, int4"),
        ({"loss": "dpo", "eval_data": "x"}, "loss is dpo, which does not support chat"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(
    config: Callable[..., TrainConfig], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        train(config(**changes), say=quiet)
    assert "\n" not in str(caught.value)


def test_tables_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('model = "x"\n[lora]\nrank = 8\ntargets = ["q_proj"]\n[dpo]\nbeta = 0.2\n')
    found = merged(read_toml(tmp_path / "c.toml"), {})
    assert (found.lora_rank, found.lora_targets, found.dpo_beta) == (8, ("q_proj",), 0.2)
    (tmp_path / "c.toml").write_text("[lora]\nrang = 8\n")
    with pytest.raises(ValueError, match="'lora_rang', which is not a field; did you mean 'lora_rank'"):
        merged(read_toml(tmp_path / "c.toml"), {})
