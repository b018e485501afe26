"""Checkpoints in a file a rank: what any plan writes any other plan reads, and what is damaged is one sentence."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.parallel.test_plan import MIXTURE, SMALL, Unmet
from tilewright.models import ModelConfig, empty_model, initialise
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.part import make_part
from tilewright.parallel.pieces import Piece
from tilewright.parallel.plan import Plan
from tilewright.parallel.shards import MANIFEST, dealt_out, described, file_of, read_shards
from tilewright.parallel.spread import Spread

TINY = replace(SMALL, vocab_size=61, hidden_size=24, intermediate_size=40, num_attention_heads=4, head_dim=6)
TINY_MIXTURE = replace(
    MIXTURE, vocab_size=61, hidden_size=24, intermediate_size=40, num_attention_heads=4, head_dim=6, tie_word_embeddings=False
)


def whole_of(shape: ModelConfig) -> Any:
    """The whole model, of which ranks have pieces."""
    model = empty_model(shape, device="cpu", dtype=torch.float32)
    initialise(model, std=0.3)
    return model.requires_grad_(True)


def share(shape: ModelConfig, plan: Plan, rank: int) -> tuple[dict[str, Tensor], dict[str, Piece]]:
    """What a rank's optimizer has, and of what it is."""
    place, model = plan.place(rank), whole_of(shape)
    same = plan.expert_replicas
    mesh = Mesh(
        rank=rank, dp=Unmet(None, place["dp"], plan.dp), tp=Unmet(None, place["tp"], plan.tp),
        pp=Unmet(None, place["pp"], plan.pp), ep=Unmet(None, place["dp"] // same, plan.ep),
        same=Unmet(None, place["dp"] % same, same),
    )  # fmt: skip
    order = [name for name, _ in model.named_parameters()]
    spread = Spread(plan, mesh, make_part(model, plan, mesh, invariant=True), order, invariant=True)
    own = {f"master.{name}": tensor.detach() for name, tensor in spread.weights().items()}
    return {**own, "control": torch.tensor([float(rank), 7.0])}, spread.pieces


def write(folder: Path, shape: ModelConfig, plan: Plan) -> None:
    """The files of all ranks of a plan."""
    folder.mkdir()
    shares = [share(shape, plan, rank) for rank in range(plan.ranks)]
    manifest, writes = dealt_out([json.loads(json.dumps(described(*one))) for one in shares])
    for rank, ((tensors, _), places) in enumerate(zip(shares, writes)):
        values = list(tensors.values())
        save_file({str(place): values[place].contiguous() for place in places}, folder / file_of(rank))
    (folder / MANIFEST).write_text(json.dumps(manifest))


PLANS = ("dp=4,zero=3", "tp=4", "tp=2,slices=4,pp=2", "pp=2,dp=2,zero=1", "slices=2")
EXPERTS = ("dp=4,ep=2,zero=1", "pp=2,dp=2,ep=2", "dp=2,zero=3")


@pytest.mark.parametrize(("shape", "plans"), [(TINY, PLANS), (TINY_MIXTURE, EXPERTS)], ids=["dense", "mixture"])
def test_what_a_plan_writes_every_plan_reads(shape: ModelConfig, plans: tuple[str, ...], tmp_path: Path) -> None:
    whole = {f"master.{name}": tensor.detach() for name, tensor in whole_of(shape).named_parameters()}
    for at, given in enumerate(plans):
        folder = tmp_path / str(at)
        write(folder, shape, Plan.read(given))
        found = read_shards(folder, {**whole, "control": torch.zeros(2)}, {})
        assert found.pop("control").tolist() == [0.0, 7.0]
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        for other in plans:
            plan = Plan.read(other)
            for rank in range(plan.ranks):
                wanted, pieces = share(shape, plan, rank)
                read = read_shards(folder, wanted, pieces)
                assert all(torch.equal(read[name], wanted[name]) for name in wanted if name != "control")


def test_what_is_missing_or_damaged_is_one_sentence(tmp_path: Path) -> None:
    good = tmp_path / "good"
    write(good, TINY, Plan.read("dp=2,zero=3"))
    wanted, pieces = share(TINY, Plan.read("tp=2"), 0)

    def bad(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    (bad("lost") / file_of(1)).unlink()
    (cut := bad("cut") / file_of(1)).write_bytes(cut.read_bytes()[:-100])
    manifest = json.loads((good / MANIFEST).read_text())
    (bad("text") / MANIFEST).write_text("{")
    fewer = {**manifest, "master.norm.weight": {**manifest["master.norm.weight"], "shards": []}}
    (bad("fewer") / MANIFEST).write_text(json.dumps(fewer))
    name = "master.embed.weight"
    half = {**manifest, name: {**manifest[name], "shards": manifest[name]["shards"][:1]}}
    (bad("half") / MANIFEST).write_text(json.dumps(half))
    other = {**manifest, name: {**manifest[name], "shape": [62, 24]}}
    (bad("other") / MANIFEST).write_text(json.dumps(other))
    away = {**manifest, name: {**manifest[name], "shards": [{**manifest[name]["shards"][0], "file": "/etc/passwd"}]}}
    (bad("away") / MANIFEST).write_text(json.dumps(away))
    for damaged in ("lost", "cut", "text", "fewer", "half", "other", "away"):
        with pytest.raises(ValueError, match=r"cannot be read .*; remove it to continue from the checkpoint before it"):
            read_shards(tmp_path / damaged, wanted, pieces)
