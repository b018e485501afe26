"""Bytes and seconds of handing a model's weights from a trainer to a sampler in another process, beside one plain copy of as
many bytes over the same link: `python scripts/rl_push.py --handover card`, `memory`, or `broadcast --to cuda:1`.

The weights are random ones of a shape, in as many tensors as the model has; the way is that of `tilewright rl` with the same
`handover`. The trainer's weights change each time, and at the end the sampler's have to be equal bit for bit. The link is
measured in turns with it: for `card` a copy of one tensor on the card, for `memory` one into locked host memory and one out of
it (on a CPU: one in memory), for `broadcast` a broadcast of one tensor by NCCL or gloo, and between two cards also torch's copy
from one to the other. A share is the median of the link's seconds over that of the weights': 1 is a link used in full.

On a CPU, in small: `python scripts/rl_push.py --device cpu --to cpu --shape tiny --dtype float32 --handover broadcast`.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.bench.provenance import environment as provenance
from tilewright.models import SHAPES, Model, random_model
from tilewright.rl.broadcast_weights import BroadcastWeights
from tilewright.rl.samplers import check_devices
from tilewright.rl.shared_weights import SharedWeights, parameters_of

TINY = replace(
    SHAPES["qwen3-0.6b"], hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=4096, windows=(None,) * 4,
)  # fmt: skip
LARGE = replace(SHAPES["qwen3-0.6b"], hidden_size=2048, intermediate_size=6144)
MODELS = {"tiny": TINY, "0.6b": SHAPES["qwen3-0.6b"], "1.7b": LARGE}


def model_of(options: argparse.Namespace, device: str, seed: int) -> Model:
    """Random weights on a device."""
    dtype = getattr(torch, options.dtype)
    return random_model(MODELS[options.shape], device=torch.device(device), dtype=dtype, seed=seed).requires_grad_(False)


def digest(model: Model) -> str:
    """Of all bits of the parameters."""
    found = hashlib.sha256()
    for parameter in parameters_of(model):
        found.update(parameter.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def now(device: torch.device) -> float:
    """Seconds, when the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call."""
    began = now(device)
    call()
    return now(device) - began


def take(options: argparse.Namespace) -> None:
    """The sampler's side: a line in, a line out."""
    model = model_of(options, options.to, seed=1)
    place, device = Path(options.taker), parameters_of(model)[0].device
    broadcast = options.handover == "broadcast"
    weights: Any
    if broadcast:
        weights = BroadcastWeights(model, place, rank=1, size=2)
    else:
        weights = SharedWeights(model, place, on_card=options.handover == "card")
    print("ready", flush=True)
    if broadcast:
        weights.join()
    flat = torch.empty(weights.nbytes, dtype=torch.uint8, device=device)
    for line in sys.stdin:
        order = line.strip()
        if order == "digest":
            print(digest(model), flush=True)
        elif order == "flat":
            dist.broadcast(flat, 0)
            print(now(device), flush=True)
        else:
            print(seconds_of(weights.pull, device), flush=True)
    weights.close()


class Taker:
    """The other process."""

    def __init__(self, place: Path) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--taker", str(place)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, order: str) -> None:
        """One line."""
        assert self.process.stdin is not None
        print(order, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        """One line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise ChildProcessError(f"the sampler's process ended with code {self.process.wait()}")
        return line

    def check_alive(self) -> None:
        """Raises ChildProcessError where it has ended."""
        if self.process.poll() is not None:
            raise ChildProcessError(f"the sampler's process ended with code {self.process.returncode}")


def links(options: argparse.Namespace, nbytes: int, taker: Taker) -> dict[str, Callable[[], float]]:
    """Name -> seconds of one plain copy of so many bytes."""
    device = torch.device(options.device)
    flat = torch.ones(nbytes, dtype=torch.uint8, device=device)
    if options.handover == "broadcast":

        def by_broadcast() -> float:
            taker.tell("flat")
            took = seconds_of(lambda: dist.broadcast(flat, 0), device)
            taker.hear()
            return took

        found = {"push": by_broadcast}
        if device.type == "cuda":
            there = torch.empty_like(flat, device=options.to)
            found["peer_copy"] = lambda: seconds_of(lambda: there.copy_(flat), device)
        return found
    here = torch.empty_like(flat)
    if options.handover == "card" or device.type == "cpu":
        return dict.fromkeys(("push", "pull"), lambda: seconds_of(lambda: here.copy_(flat), device))
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copied(target: Tensor, source: Tensor) -> Callable[[], float]:
        return lambda: seconds_of(lambda: target.copy_(source, non_blocking=True), device)

    return {"push": copied(host, flat), "pull": copied(here, host)}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What handing over takes, and what the link takes."""
    model = model_of(options, options.device, seed=0)
    device, broadcast = parameters_of(model)[0].device, options.handover == "broadcast"
    check_devices(options.handover, device, [options.to])
    weights: Any
    if broadcast:
        weights = BroadcastWeights(model, folder, rank=0, size=2)
    else:
        weights = SharedWeights(model, on_card=options.handover == "card")
    taker = Taker(folder if broadcast else weights.path)
    try:
        taker.hear()
        if broadcast:
            weights.join()
        took: dict[str, list[float]] = {}
        told: dict[str, float] = {}
        plain = links(options, weights.nbytes, taker)
        for version in range(options.times + 1):
            parameters_of(model)[0].add_(1.0)
            now(device)
            if broadcast:
                taker.tell("take")
                row = {"push": weights.push(version, taker.check_alive)["push_s"]}
                taker.hear()
            else:
                told = weights.push(version)
                row = {"push": told["push_s"]}
                taker.tell("take")
                row["pull"] = float(taker.hear())
            row |= {f"link_{name}": link() for name, link in plain.items()}
            for name, seconds in row.items() if version else ():  # the first time makes buffers and connections
                took.setdefault(name, []).append(seconds)
        taker.tell("digest")
        same = taker.hear() == digest(model)
    finally:
        taker.process.kill()
        taker.process.wait()
        weights.close()
    median = {name: statistics.median(seconds) for name, seconds in took.items()}
    return {
        "bytes": weights.nbytes, "tensors": len(parameters_of(model)), "bits_equal": same,
        **{name: value for name, value in told.items() if name == "push_locked"},
        **{f"{name}_s": seconds for name, seconds in median.items()},
        **{f"{name}_gb_per_s": weights.nbytes / seconds / 1e9 for name, seconds in median.items()},
        **{f"{name}_share_of_link": median[f"link_{name}"] / median[name] for name in ("push", "pull") if name in median},
    }  # fmt: skip


def main() -> None:
    """One handover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handover", choices=("memory", "card", "broadcast"), default="card")
    parser.add_argument("--shape", choices=tuple(MODELS), default="1.7b")
    parser.add_argument("--device", default="cuda:0", help="of the trainer")
    parser.add_argument("--to", default="cuda:0", help="of the sampler")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--taker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.taker:
        take(options)
        return
    print(json.dumps({**provenance(), "options": vars(options)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options, Path(folder))
    print(json.dumps({"handover": options.handover, "shape": options.shape, **row}), flush=True)
    if not row["bits_equal"]:
        sys.exit("the sampler's weights are not the trainer's")


if __name__ == "__main__":
    main()
