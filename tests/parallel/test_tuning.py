"""Adapters and preferences on several ranks: the files of one process, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.runs import config_of, log_of
from tilewright.models import load_model
from tilewright.train.config import TrainConfig, merged, read_toml
from tilewright.train.main import train
from tilewright.train.ranks import check_plan
from tilewright.train.setup import model_config


def pairs(folder: Path) -> str:
    """A file of prompts with a chosen and a rejected answer."""
    path = folder / "pairs.jsonl"
    lines = [{"prompt": f"say {i}", "chosen": "yes " * (1 + i % 3), "rejected": "no " * (1 + i % 5)} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def of_both(folder: Path, plan: str, **changes: Any) -> None:
    """Hold a run of one process and one by ranks against each other: what they say, and what they leave."""
    changes = {"init": "load", **changes}
    if changes.get("loss"):
        changes["data"] = (pairs(folder),)
    train(merged(read_toml(config_of(folder, "one", **changes)), {}), say=lambda words: None)
    config = config_of(folder, "many", parallel=plan, **changes)
    command = [sys.executable, "-m", "tilewright.cli", "train", "run", str(config), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr
    assert log_of(folder / "many") == log_of(folder / "one")
    saved = "adapter/adapter_model.safetensors" if changes.get("lora_rank") else "model/model.safetensors"
    assert (folder / "many" / saved).read_bytes() == (folder / "one" / saved).read_bytes()
    if changes.get("loss"):
        measured = [json.loads((folder / name / "log.jsonl").read_text().splitlines()[-1]) for name in ("one", "many")]
        for number in ("margin", "preferred"):
            assert measured[0][number] == pytest.approx(measured[1][number], rel=1e-12)


def test_an_adapter_and_preferences_go_by_the_tree(tmp_path: Path) -> None:
    for name, accumulate in (("tree", "tree"), ("running", "running")):
        changes = {"init": "load", "data": (pairs(tmp_path),), "loss": "dpo", "lora_rank": 4, "steps": 2}
        changes |= {"accumulate": accumulate}
        train(merged(read_toml(config_of(tmp_path, name, **changes)), {}), say=lambda words: None)
    found, wanted = log_of(tmp_path / "tree"), log_of(tmp_path / "running")
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in wanted], rel=1e-6)
    files = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("tree", "running")]
    assert all(torch.allclose(files[0][name], files[1][name], atol=1e-6) for name in files[1])


def test_a_mixture_is_trained_and_loads(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run", parallel="slices=1", steps=2)
    file = tmp_path / "tiny" / "config.json"
    more = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more, "model_type": "mixtral"}))
    summary = train(merged(read_toml(config), {}), say=lambda words: None)
    assert summary.loss is not None
    model = load_model(tmp_path / "run" / "model", device="cpu", dtype=torch.float32)
    stack = model.get_parameter("blocks.0.ffn.experts_down.weight")
    saved = load_file(next((tmp_path / "run").glob("step-*2/*.safetensors")))
    assert torch.equal(saved["master.blocks.0.ffn.experts_down.weight"], stack)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ("dp=2,zero=1", {"loss": "dpo", "lora_rank": 4, "lr": 2e-2}), ("dp=2,zero=2", {"lora_rank": 4, "lr": 2e-2}),
        ("dp=2", {"lora_rank": 4, "lora_base": "int4", "model": "bookworm"}),
        ("dp=4,zero=3", {"loss": "ipo", "dpo_beta": 0.5}), ("dp=2", {"loss": "dpo", "dpo_smoothing": 0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_tuning_by_several_ranks(tmp_path: Path, plan: str, changes: dict[str, Any]) -> None:
    of_both(tmp_path, plan, **changes)


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        ("tp=2", {"lora_rank": 4}, "only on replicas"), ("slices=2", {"lora_rank": 4}, "use only dp"),
        ("dp=2,zero=3", {"lora_rank": 4}, "use only dp"), ("pp=2", {"lora_rank": 4}, "use only dp"),
        ("dp=2", {"lora_rank": 4, "lora_dropout": 0.1}, "lora_dropout would draw different masks on each rank"),
        ("tp=2", {"loss": "dpo"}, "conversations and pairs fill rows to different lengths"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_sentence(plan: str, changes: dict[str, Any], words: str) -> None:
    config = TrainConfig(model="bookworm", parallel=plan, micro_batches=4, accumulate="tree", **changes)  # pyright: ignore
    with pytest.raises(ValueError, match=words):
        check_plan(config, model_config(config))
