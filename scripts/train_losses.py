"""Compare the losses of training in several compute formats, at equal tokens and at equal seconds.

    python -m scripts.train_losses llama-3b --data books.jsonl.xz --steps 200 --compute dtype fp8 fp8-all --graphs --out FILE

Each run has the same random weights, and the same texts in the same order, cut into pieces of a row. The runs follow each
other, so nothing else uses the device. Seconds are those of the updates after the first ten, which compile and capture. Losses
are means over --window updates, because those of single updates vary more than the formats differ. Prints a table after each
run, and writes all losses to --out as JSON.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.train_speed import Updates
from tilewright.bench.provenance import environment
from tilewright.models import SHAPES, load_config, resolve
from tilewright.train.batch import pack
from tilewright.train.config import TrainConfig
from tilewright.train.data import Mixture, Texts, text_shards
from tilewright.train.main import Encoder

UNTIMED = 10


@contextmanager
def texts(files: list[str], tokenizer: str, vocabulary: int, piece_tokens: int) -> Iterator[Mixture]:
    """The texts in pieces, shuffled."""
    encoder = Encoder(resolve(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        paths, home = [Path(name) for name in files], Path(folder)
        shards = text_shards(paths, encoder, vocabulary, home, identity=encoder.identity, text_field="text", progress=print)
        yield Mixture([Texts(shards, 0, "texts", piece_tokens)], None)


def losses(update: Updates, data: Mixture, steps: int) -> dict[str, Any]:
    """Train. Returns the loss of each update, and the seconds per update."""
    config, found, start = update.config, [], 0.0
    for number in range(steps):
        if number == UNTIMED:
            _wait(update.device)
            start = time.perf_counter()
        rows = [data.row(config.row_tokens) for _ in range(config.micro_rows)]
        found.append(update(pack([piece for row in rows for piece in row])).loss)
    _wait(update.device)
    seconds = (time.perf_counter() - start) / (steps - UNTIMED)
    tokens = config.row_tokens * config.micro_rows
    return {"layers": update.chosen, "losses": [loss.item() for loss in found], "update_tokens": tokens, "update_s": seconds}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(runs: dict[str, dict[str, Any]], window: int) -> str:
    """Losses of each run at the tokens, and at the seconds, of the first one."""
    first = next(iter(runs.values()))
    smooth = {name: np.convolve(run["losses"], np.ones(window) / window, "valid") for name, run in runs.items()}
    lines = [" | ".join(("tokens", "seconds", *(f"{name}, same {what}" for name in runs for what in ("tokens", "seconds"))))]
    for part in range(1, 6):
        last = part * len(first["losses"]) // 5
        seconds, cells = last * first["update_s"], list[str]()
        for name, run in runs.items():
            there = round(seconds / run["update_s"])
            cells.append(f"{smooth[name][last - window]:.4f}")
            cells.append(f"{smooth[name][there - window]:.4f}" if window <= there <= len(run["losses"]) else "-")
        lines.append(" | ".join((f"{last * first['update_tokens']:,}", f"{seconds:.1f}", *cells)))
    return "\n".join(lines)


def main() -> None:
    """Train in each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"the folder of a model, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--data", nargs="+", required=True, help="files of texts, as for `tilewright train`")
    parser.add_argument("--tokenizer", default="bookworm", help="the model whose tokenizer reads them (default: bookworm)")
    parser.add_argument("--compute", nargs="+", default=["dtype", "fp8", "fp8-all"], help="formats; the first is the reference")
    parser.add_argument("--steps", type=int, default=200, help="updates of each run (default: 200)")
    parser.add_argument("--rows", type=int, default=2, help="rows in an update (default: 2)")
    parser.add_argument("--row-tokens", type=int, default=4096, help="tokens in a row (default: 4096)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate after 20 updates (default: 3e-4)")
    parser.add_argument("--window", type=int, default=20, help="updates in a mean of losses (default: 20)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and products (default: bfloat16)")
    parser.add_argument("--device", default="cuda", help="cpu or cuda (default: cuda)")
    parser.add_argument("--graphs", action="store_true", help="capture passes as CUDA graphs")
    parser.add_argument("--out", type=Path, help="JSON file for the results, written after each run")
    asked = parser.parse_args()
    if not UNTIMED < asked.window <= asked.steps // 5:
        parser.error(f"--window is {asked.window}, wanted more than {UNTIMED} and at most a fifth of --steps")
    size = (SHAPES.get(asked.model) or load_config(resolve(asked.model))).limited(asked.row_tokens)
    said: dict[str, Any] = {"what": "losses by compute format", **environment(), "model": asked.model, "runs": {}}
    for compute in asked.compute:
        gc.collect()  # the model and the graphs of the run before
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        config = TrainConfig(
            model=asked.model, init="random", dtype=asked.dtype, compute=compute, graphs=asked.graphs, lr=asked.lr, warmup=20,
            row_tokens=asked.row_tokens, micro_rows=asked.rows, steps=asked.steps, schedule="constant",
        )  # fmt: skip
        with texts(asked.data, asked.tokenizer, size.vocab_size, asked.row_tokens) as data:
            said["runs"][compute] = losses(Updates(config, size, torch.device(asked.device)), data, asked.steps)
        print(table(said["runs"], asked.window), flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
