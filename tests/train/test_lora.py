"""Adapters against the `peft` library: losses, gradients, folders in both directions, merged weights; and whole runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.test_cli import tilewright
from tests.models.test_models import CASES, make_oracle
from tests.train.test_packed import documents, packed
from safetensors.torch import load_file
from tilewright.models import Model, load_model, save_model
from tilewright.models.adapter_config import AdapterConfig
from tilewright.models.adapters import adapter_of, attach, merge, read_adapter, save_adapter, targets_of
from tilewright.nn import without_adapters
from tilewright.ops.weights import QuantizedWeight
from tilewright.train.config import TrainConfig
from tilewright.train.lora import adapted, save_trained
from tilewright.train.step import NextToken, trainable

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


def peft_names(model: Model, grads: dict[str, Tensor]) -> dict[str, Tensor]:
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
    oracle, base, folder = oracle_folder(tmp_path, CASES["llama"], CONFIGS["all"])
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
