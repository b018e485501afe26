"""Whole training runs against transformers' Llama and torch's AdamW: the same weights, batches and rates, the same losses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.models import load_model
from tilewright.train.batch import pack
from tilewright.train.config import TrainConfig
from tilewright.train.setup import build_optimizer
from tilewright.train.step import NextToken, running_sum, train_step

transformers = pytest.importorskip("transformers", reason="transformers, the other side of this test, is not installed")

VOCABULARY, ROWS, TOKENS, STEPS, LR, WARMUP = 97, 4, 32, 40, 5e-3, 10
CASES = [("cpu", 96), *((("cuda", 64), ("cuda", 96), ("cuda", 160)) if torch.cuda.is_available() else ())]
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative difference of a loss; transformers computes in the same dtype, by autocast."""


def llama(width: int) -> Any:
    """A model of heads of 32, whose number need not be a power of two."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=width // 32, num_key_value_heads=width // 32, head_dim=32, max_position_embeddings=TOKENS,
            tie_word_embeddings=False, rms_norm_eps=1e-5,
        )
    )  # fmt: skip


def texts(step: int) -> np.ndarray:
    """[ROWS, TOKENS + 1]: walks through the vocabulary, so that there is something to learn."""
    random = np.random.default_rng(step)
    strides = random.integers(1, 4, (ROWS, 1))
    return (random.integers(0, VOCABULARY, (ROWS, 1)) + strides * np.arange(TOKENS + 1)) % VOCABULARY


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("device", "width"), CASES)
def test_forty_updates_have_the_losses_of_transformers_and_torch(
    device: str, width: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = llama(width).to(device)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, device=device, dtype=dtype).requires_grad_(True)
    optimizer = build_optimizer(TrainConfig(lr=LR, dtype=str(dtype).removeprefix("torch.")), ours)
    matrices = [parameter for parameter in theirs.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in theirs.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        rate = LR * min(1.0, (step + 1) / WARMUP)
        ids = texts(step)
        batch = pack([(row[:-1], row[1:]) for row in ids]).to(torch.device(device))
        found = train_step(ours, optimizer, [batch], rate, NextToken(deterministic=True), running_sum)
        tokens = torch.from_numpy(ids).to(device)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = theirs(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        losses.append((found.loss.detach().cpu(), loss.detach().cpu()))
    own, right = (torch.stack(side) for side in zip(*losses))
    assert right[-1] < right[0] / 2, "nothing was learnt, so this compares little"
    assert ((own - right).abs() / right).max() < LIMITS[dtype]
