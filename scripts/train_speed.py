"""Tokens a second, MFU and peak memory of training at packed rows of 4,096 tokens, on one GPU: `python scripts/train_speed.py`.

    python scripts/train_speed.py --cases llama-3b:2 --compute dtype fp8 fp8-tensor

Random weights, and rows of four documents of random tokens each. Data are packed while the clock runs; gradients are clipped
and AdamW steps inside. The first three updates are not timed. Several ways to compute follow one another for each case, in one
process, each with new weights. MFU is of the card's peak in bf16, whatever is computed. Prints one JSON object a line.
"""

import argparse
import json
import time

import numpy as np
import torch

from tilewright.bench.provenance import environment
from tilewright.models import SHAPES, empty_model, initialise, random_model
from tilewright.train.batch import TrainBatch, pack
from tilewright.train.compute import set_compute
from tilewright.train.config import TrainConfig
from tilewright.train.lora import adapted
from tilewright.train.setup import build_optimizer, costs_of, learning_rate
from tilewright.train.step import NextToken, running_sum, train_step

ROW = 4096
UNTIMED = 3
CASES = ("qwen3-0.6b:4", "llama-1b:2", "llama-8b:1:16")
"""shape:rows in an update[:rank of LoRA adapters]; without a rank all weights are trained."""


def packed(rows: int, vocabulary: int, draw: np.random.Generator) -> TrainBatch:
    """Rows of four documents of unlike lengths."""
    pieces = []
    for _ in range(rows):
        ends = sorted(draw.choice(np.arange(64, ROW), 3, replace=False))
        documents = np.split(draw.integers(1, vocabulary, ROW + 1), ends)
        pieces.extend((document[:-1], document[1:]) for document in documents)
    return pack(pieces, True)


def measured(shape: str, rows: int, rank: int, compute: str, updates: int) -> dict[str, float | str | list[str]]:
    """One case, on the first GPU."""
    device, draw = torch.device("cuda", 0), np.random.default_rng(0)
    config = TrainConfig(
        model=shape, row_tokens=ROW, micro_rows=rows, micro_batches=1, steps=updates, warmup=1, lr=1e-4,
        init="load" if rank else "random", lora_rank=rank, compute=compute,
    )  # fmt: skip
    size = SHAPES[shape].limited(ROW)
    if rank:
        model = adapted(config, random_model(size, device=device, dtype=torch.bfloat16))
    else:
        model = empty_model(size, device=device, dtype=torch.bfloat16).requires_grad_(True)
        initialise(model, std=0.02)
    chosen = set_compute(config, model, device)
    costs, optimizer = costs_of(config, model, device), build_optimizer(config, model)
    objective, start, tokens, loss = NextToken(deterministic=config.deterministic), 0.0, 0, torch.zeros(())
    for update in range(updates):
        if update == UNTIMED:
            torch.cuda.synchronize()
            start, tokens = time.perf_counter(), 0
        batch = packed(rows, size.vocab_size, draw).to(device)
        tokens += batch.token_ids.numel()
        loss = train_step(model, optimizer, [batch], learning_rate(config, update), objective, running_sum).loss
    torch.cuda.synchronize()
    speed = tokens / (time.perf_counter() - start)
    return {
        "model": shape, "rows": rows, "lora_rank": rank, "compute": compute, "layers": chosen, "tokens_per_s": speed,
        **costs.mfu(speed), "peak_bytes": torch.cuda.max_memory_allocated(device), "last_loss": loss.item(),
    }  # fmt: skip


def main() -> None:
    """Each case, in each way to compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="SHAPE:ROWS[:RANK]")
    parser.add_argument("--compute", nargs="*", default=["dtype"], help="dtype fp8 fp8-tensor")
    parser.add_argument("--updates", type=int, default=10, help="of which the first three are not timed")
    asked = parser.parse_args()
    print(json.dumps(environment()))
    for case in asked.cases:
        shape, rows, *rank = case.split(":")
        for compute in asked.compute:
            torch.cuda.reset_peak_memory_stats()
            try:
                found = measured(shape, int(rows), int(rank[0]) if rank else 0, compute, asked.updates)
            except (torch.cuda.OutOfMemoryError, ValueError) as error:
                found = {"model": shape, "rows": int(rows), "compute": compute, "error": str(error)[:300]}
            print(json.dumps(found), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
