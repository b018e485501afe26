"""A run of a tiny model under a plan: what one process and what ranks of many are held against each other by."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.models import ModelConfig, empty_model, initialise
from tilewright.parallel.mesh import join, leave
from tilewright.parallel.plan import Plan
from tilewright.parallel.saved import gathered
from tilewright.train.batch import TrainBatch, pack
from tilewright.train.compute import set_compute
from tilewright.train.config import TrainConfig
from tilewright.train.ranks import check_plan, make_spread
from tilewright.train.setup import build_optimizer, learning_rate
from tilewright.train.step import NextToken, spread_step

__all__ = ["Cell", "run"]

VOCABULARY, ROWS, TOKENS = 61, 2, 16


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run: how it is spread, what is trained, and what is done wrong on purpose.

    shape: of the model; what slices make of it differs: they divide the vocabulary of "cut", "wide" and "qwen2", "cut" is tied,
        and the layers of "wide" can multiply float8 codes.
    fault: "lost" leaves one micro-batch out, "divisor" divides by this rank's targets, "tied" forgets a part of a tied weight,
        "expert" the gradients of experts for the tokens of other ranks.
    """

    plan: str
    micro_batches: int = 4
    steps: int = 20
    tree: bool = True
    shape: str = "llama"
    optimizer: str = "adamw"
    fault: str = ""
    dtype: str = "float32"
    compute: str = "dtype"

    @property
    def name(self) -> str:
        """Of its file."""
        parts = (self.plan or "alone", self.micro_batches, self.steps, self.tree, self.shape, self.optimizer, self.fault)
        return "-".join(map(str, (*parts, self.dtype, self.compute))).replace("=", "")

    def alone(self) -> "Cell":
        """The same by one process."""
        return replace(self, plan=str(Plan.read(self.plan).alone()), fault="", tree=True)


def _shape(kind: str) -> ModelConfig:
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    names |= {"cut": "LlamaForCausalLM", "wide": "Qwen3ForCausalLM"}
    names |= {"mixture": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True}
    experts |= {"decoder_sparse_step": 2, "mlp_only_layers": []}
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return ModelConfig.from_hf(
        {
            "architectures": [names[kind]], "vocab_size": VOCABULARY if kind in ("llama", "qwen3", "mixtral") else 64,
            "hidden_size": 64 if kind == "wide" else 24, "intermediate_size": 64 if kind == "wide" else 40,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8 if kind == "wide" else 6,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
            "tie_word_embeddings": kind in ("llama", "cut"), "attention_bias": kind == "qwen3", "eos_token_id": 0,
            **(experts if kind in ("mixture", "mixtral") else {}),
        },
        None,
    )  # fmt: skip


def _batches(count: int, step: int) -> list[TrainBatch]:
    random = np.random.default_rng([step, 7])
    found = []
    for _ in range(count):
        cuts = sorted(random.choice(np.arange(1, ROWS * TOKENS), 3, replace=False))
        ids = random.integers(1, VOCABULARY, ROWS * TOKENS)
        pieces = []
        for part in np.split(ids, cuts):
            targets = np.append(part[1:], -100)
            targets[random.random(len(targets)) < 0.2] = -100
            pieces.append((part, targets))
        found.append(pack(pieces))
    return found


def run(cell: Cell, rank: int = 0, store: Any = None) -> dict[str, Tensor]:
    """The losses, norms and all state behind the last step: on the first rank."""
    config = TrainConfig(
        model="-", dtype=cell.dtype, optimizer=cell.optimizer, lr=3e-3, steps=cell.steps, warmup=2,
        micro_batches=cell.micro_batches, accumulate="tree" if cell.tree else "running",
        parallel=Plan.read(cell.plan), row_tokens=TOKENS, micro_rows=ROWS, compute=cell.compute,
    )  # fmt: skip
    check_plan(config, _shape(cell.shape))
    mesh = join(config.parallel, rank=rank, device=torch.device("cpu"), store=store, invariant=cell.tree)
    model = empty_model(_shape(cell.shape), device="cpu", dtype=getattr(torch, cell.dtype))
    initialise(model, std=0.3)
    set_compute(config, model, torch.device("cpu"))
    spread = make_spread(config, model.requires_grad_(True), mesh)
    assert spread is not None
    optimizer = build_optimizer(config, model, spread.weights())
    spread.share()
    if cell.fault == "tied":
        spread.part.tied, spread.part.uses["embed.weight"] = frozenset(), []
    if cell.fault == "expert":
        spread.part.uses = {}
    said = []
    for step in range(cell.steps):
        batches = _batches(cell.micro_batches, step)
        own = [batch for i, batch in enumerate(batches) if spread.owns(i, len(batches))]
        counted = own if cell.fault == "divisor" else batches
        if cell.fault == "lost" and rank == 1 and step == 0:
            own[-1] = replace(own[-1], targets=torch.full_like(own[-1].targets, -100))
        targets = sum(batch.n_targets for batch in counted)
        result = spread_step(spread, optimizer, own, targets, learning_rate(config, step), NextToken(deterministic=True))
        said.append(torch.stack([result.loss.double(), result.norm, result.applied]))
    found = gathered(optimizer.state_dict(), spread.pieces, mesh.world)
    if dist.is_initialized():
        dist.barrier()
    leave()
    return {**found, "said": torch.stack(said)} if rank == 0 else {}
