"""Measure tokens per second, MFU and peak memory of training with packed rows of 4,096 tokens, on one GPU.

    python scripts/train_speed.py --cases llama-3b:2 --compute dtype fp8 --graphs off on --deterministic on off --out FILE

Weights are random, and each row has four documents of random tokens. The time includes packing the data, gradient clipping and
AdamW. The first updates, which compile and capture, are not timed. All combinations of --compute, --graphs and --deterministic
of a case run one after the other in one process, each with new weights, and all of this is repeated --rounds times. MFU is
relative to the GPU's bf16 peak, whatever the compute format. `host_s` is how long the host takes to launch an update on an idle
device, the mean of two. Prints one JSON object per line.
"""

import argparse
import gc
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewright.bench.provenance import environment
from tilewright.models import SHAPES, ModelConfig, empty_model, initialise, random_model
from tilewright.train.batch import TrainBatch, pack
from tilewright.train.captured import Captured, check_graphs
from tilewright.train.compute import set_compute
from tilewright.train.config import TrainConfig
from tilewright.train.lora import adapted
from tilewright.train.setup import build_optimizer, costs_of, learning_rate
from tilewright.train.step import NextToken, StepResult, loss_and_grads, running_sum, train_step

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


class Updates:
    """Makes updates of a model with random weights, one for each call."""

    def __init__(self, config: TrainConfig, size: ModelConfig, device: torch.device):
        self.config, self.device, self.number, dtype = config, device, 0, getattr(torch, config.dtype)
        check_graphs(config, size, device)
        if config.lora_rank:
            self.model = adapted(config, random_model(size, device=device, dtype=dtype))
        else:
            self.model = empty_model(size, device=device, dtype=dtype).requires_grad_(True)
            initialise(self.model, std=0.02)
        self.chosen = set_compute(config, self.model, device)
        self.optimizer = build_optimizer(config, self.model)
        self.objective = NextToken(deterministic=config.deterministic)
        self.passes = Captured(config.row_tokens) if config.graphs else loss_and_grads

    def __call__(self, batch: TrainBatch) -> StepResult:
        """Make one update from a batch, which is on the host."""
        rate, there = learning_rate(self.config, self.number), batch.to(self.device)
        self.number += 1
        return train_step(self.model, self.optimizer, [there], rate, self.objective, running_sum, self.passes)


def measured(shape: str, rows: int, rank: int, updates: int, way: dict[str, Any]) -> dict[str, Any]:
    """One case in one way, fields of the config, on the first GPU."""
    device, draw = torch.device("cuda", 0), np.random.default_rng(0)
    config = TrainConfig(
        model=shape, row_tokens=ROW, micro_rows=rows, micro_batches=1, steps=updates + 2, warmup=1, lr=1e-4,
        init="load" if rank else "random", lora_rank=rank, **way,
    )  # fmt: skip
    size = SHAPES[shape].limited(ROW)
    made = Updates(config, size, device)

    def update() -> StepResult:
        return made(packed(rows, size.vocab_size, draw))

    start, loss = 0.0, torch.zeros(())
    for number in range(updates):
        if number == UNTIMED:
            torch.cuda.synchronize()
            start = time.perf_counter()
        loss = update().loss
    torch.cuda.synchronize()
    speed = rows * ROW * (updates - UNTIMED) / (time.perf_counter() - start)
    peak, host = torch.cuda.max_memory_allocated(device), []
    for _ in range(2):
        begun = time.perf_counter()
        update()
        host.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
    return {
        "model": shape, "rows": rows, "lora_rank": rank, **way, "layers": made.chosen, "tokens_per_s": speed,
        **costs_of(config, made.model, device).mfu(speed), "update_s": rows * ROW / speed, "host_s": sum(host) / 2,
        "peak_bytes": peak, "last_loss": loss.item(),
    }  # fmt: skip


def main() -> None:
    """Each case, in each way to compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="SHAPE:ROWS[:RANK]")
    parser.add_argument(
        "--compute", nargs="*", default=["dtype"], help="formats of the products to measure: dtype, fp8, fp8-all, fp8-tensor"
    )
    parser.add_argument(
        "--graphs",
        nargs="*",
        default=["off"],
        choices=("off", "on"),
        help="measure without CUDA graphs (off), with them (on), or both",
    )
    parser.add_argument(
        "--deterministic",
        nargs="*",
        default=["on"],
        choices=("off", "on"),
        help="measure the deterministic mode (on), the other one (off), or both",
    )
    parser.add_argument("--rounds", type=int, default=1, help="number of times that all combinations of a case are measured")
    parser.add_argument("--updates", type=int, default=10, help="number of updates; the first three are not timed")
    parser.add_argument("--out", type=Path, help="JSON file for the results, written after each one")
    asked = parser.parse_args()
    said: dict[str, Any] = {"what": "python scripts/train_speed.py", **environment(), "row_tokens": ROW, "rows": []}
    print(json.dumps({name: value for name, value in said.items() if name != "rows"}))
    for case in asked.cases:
        shape, rows, *rank = case.split(":")
        ways = list(product(asked.compute, asked.graphs, asked.deterministic))
        for turn, (compute, graphs, deterministic) in product(range(asked.rounds), ways):
            gc.collect()  # the graph and the model of the way before
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            way = {"compute": compute, "graphs": graphs == "on", "deterministic": deterministic == "on"}
            try:
                found = measured(shape, int(rows), int(rank[0]) if rank else 0, asked.updates, way)
            except (torch.cuda.OutOfMemoryError, ValueError) as error:
                found = {"model": shape, "rows": int(rows), **way, "error": str(error)[:300]}
            said["rows"].append({**found, "round": turn})
            print(json.dumps(said["rows"][-1]), flush=True)
            if asked.out is not None:
                asked.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
