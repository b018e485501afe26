"""Tokens a second, MFU and peak memory of training at packed rows of 4,096 tokens, on one GPU: `python scripts/train_speed.py`.

Random weights, and rows of four documents of random tokens each. Data are packed while the clock runs; gradients are clipped
and AdamW steps inside. The first three updates are not timed. Prints one JSON object a line.
"""

import json
import time

import numpy as np
import torch

from tilewright.bench.provenance import environment
from tilewright.models import SHAPES, empty_model, initialise, random_model
from tilewright.train.batch import TrainBatch, pack
from tilewright.train.config import TrainConfig
from tilewright.train.lora import adapted
from tilewright.train.setup import build_optimizer, costs_of, learning_rate
from tilewright.train.step import NextToken, running_sum, train_step

ROW = 4096
UNTIMED = 3
CASES = (("qwen3-0.6b", 4, 0), ("llama-1b", 2, 0), ("llama-8b", 1, 16))
"""(shape, rows in an update, rank of LoRA adapters; 0: all weights are trained)."""


def packed(rows: int, vocabulary: int, draw: np.random.Generator) -> TrainBatch:
    """Rows of four documents of unlike lengths."""
    pieces = []
    for _ in range(rows):
        ends = sorted(draw.choice(np.arange(64, ROW), 3, replace=False))
        documents = np.split(draw.integers(1, vocabulary, ROW + 1), ends)
        pieces.extend((document[:-1], document[1:]) for document in documents)
    return pack(pieces, True)


def measured(shape: str, rows: int, rank: int, updates: int = 10) -> dict[str, float | str]:
    """One case, on the first GPU."""
    device, draw = torch.device("cuda", 0), np.random.default_rng(0)
    config = TrainConfig(
        model=shape, row_tokens=ROW, micro_rows=rows, micro_batches=1, steps=updates, warmup=1, lr=1e-4,
        init="load" if rank else "random", lora_rank=rank,
    )  # fmt: skip
    size = SHAPES[shape].limited(ROW)
    if rank:
        model = adapted(config, random_model(size, device=device, dtype=torch.bfloat16))
    else:
        model = empty_model(size, device=device, dtype=torch.bfloat16).requires_grad_(True)
        initialise(model, std=0.02)
    costs, optimizer = costs_of(config, model, device), build_optimizer(config, model)
    objective, start, tokens = NextToken(deterministic=config.deterministic), 0.0, 0
    for update in range(updates):
        if update == UNTIMED:
            torch.cuda.synchronize()
            start, tokens = time.perf_counter(), 0
        batch = packed(rows, size.vocab_size, draw).to(device)
        tokens += batch.token_ids.numel()
        train_step(model, optimizer, [batch], learning_rate(config, update), objective, running_sum)
    torch.cuda.synchronize()
    speed = tokens / (time.perf_counter() - start)
    return {
        "model": shape, "rows": rows, "lora_rank": rank, "tokens_per_s": speed, **costs.mfu(speed),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(environment()))
    for case in CASES:
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps(measured(*case)), flush=True)
        torch.cuda.empty_cache()
