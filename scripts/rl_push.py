"""Measure the transfer of a model's weights from a trainer to a sampler in another process, and compare it with a plain copy.

    python scripts/rl_push.py --handover card
    python scripts/rl_push.py --handover memory
    python scripts/rl_push.py --handover broadcast --to cuda:1

The weights are random and have the tensors of a given shape; they are transferred as in `tilewright rl` with the same
`handover`. The trainer's weights change each time, and at the end the sampler's weights must be bit-identical. The plain copy
moves as many bytes over the same link, in turns with the transfer and in the same process. For `card` and `memory` it copies
one tensor of the GPU into the memory that both processes see, and from there; for `broadcast` it is a broadcast of one tensor
by NCCL or gloo, and between two GPUs also torch's direct copy. `own_copy` is a copy within a process's own memory. Before each
of these, a process pauses and then computes something, so that no time contains the GPU's switch from one process to the other.
The share is the median time of the plain copy divided by that of the transfer: 1 means that the link is fully used.

On a CPU, in small: `python scripts/rl_push.py --device cpu --to cpu --shape tiny --dtype float32 --handover broadcast`.
"""

import argparse
import hashlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
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
PAUSE_S = 5e-3
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


def begin(device: torch.device) -> None:
    """Before a transfer or a plain copy: both come after a pause, and when the GPU has switched to this process."""
    time.sleep(PAUSE_S)
    torch.ones(1, device=device)
    now(device)


def plain_copy(target: Tensor, source: Tensor) -> Callable[[], float]:
    """Copies one tensor; returns its seconds."""
    device = target.device if target.is_cuda else source.device
    return lambda: seconds_of(lambda: target.copy_(source, non_blocking=True), device)


def own_memory(nbytes: int, device: torch.device) -> Tensor:
    """[nbytes] uint8 on a device, which no other process sees."""
    return torch.ones(nbytes, dtype=torch.uint8, device=device)


def take(options: argparse.Namespace, handover: str, trainer: Connection) -> None:
    """The sampler's side: an order in, an answer out."""
    model = model_of(options, options.to, seed=1)
    device, broadcast = parameters_of(model)[0].device, handover == "broadcast"
    weights: Any = None
    flat, link = torch.empty(0), None
    with suppress(EOFError):  # the trainer has ended
        while True:
            order, _, place = trainer.recv_bytes().decode().partition(" ")
            answer = "done"
            if order == "open" and broadcast:
                weights = BroadcastWeights(model, Path(place), rank=1, size=2)
            elif order == "open":
                weights = SharedWeights(model, Path(place), on_card=handover == "card")
            elif order == "join":
                weights.join()
            elif order == "digest":
                answer = digest(model)
            elif order == "flat":
                flat = flat if len(flat) else own_memory(weights.nbytes, device)
                dist.broadcast(flat, 0)
                now(device)
            elif broadcast:
                weights.pull()
            else:
                link = link or plain_copy(own_memory(weights.nbytes, device), weights.memory)
                begin(device)
                plain_s = link()
                begin(device)
                answer = f"{seconds_of(weights.pull, device)} {plain_s}"
            trainer.send_bytes(answer.encode())
    if weights is not None:
        weights.close()


class Taker:
    """The other process: a copy of this one, made before either has opened a card, so that packages are imported once."""

    def __init__(self, options: argparse.Namespace, handover: str) -> None:
        forking = multiprocessing.get_context("fork")
        self._here, there = forking.Pipe()
        self.process = forking.Process(target=take, args=(options, handover, there), daemon=True)
        self.process.start()
        there.close()

    def tell(self, order: str) -> None:
        """An order."""
        self._here.send_bytes(order.encode())

    def hear(self) -> str:
        """The answer to one."""
        try:
            return self._here.recv_bytes().decode()
        except EOFError:
            self.process.join()
            raise ChildProcessError(f"the sampler's process ended with code {self.process.exitcode}") from None

    def check_alive(self) -> None:
        """Raises ChildProcessError where it has ended."""
        if not self.process.is_alive():
            raise ChildProcessError(f"the sampler's process ended with code {self.process.exitcode}")

    def close(self) -> None:
        """End it."""
        self._here.close()
        self.process.kill()
        self.process.join()


def links(options: argparse.Namespace, weights: Any, taker: Taker) -> dict[str, Callable[[], float]]:
    """Name -> a plain copy of as many bytes, which returns its seconds. It may overwrite what was pushed."""
    device = torch.device(options.device)
    flat = own_memory(weights.nbytes, device)
    if isinstance(weights, SharedWeights):
        return {"link_push": plain_copy(weights.memory, flat), "own_copy": plain_copy(torch.empty_like(flat), flat)}

    def by_broadcast() -> float:
        taker.tell("flat")
        took = seconds_of(lambda: dist.broadcast(flat, 0), device)
        taker.hear()
        return took

    found = {"link_push": by_broadcast}
    if device.type == "cuda":
        found["link_peer_copy"] = plain_copy(torch.empty_like(flat, device=options.to), flat)
    return found


def measure(options: argparse.Namespace, handover: str, taker: Taker, folder: Path) -> dict[str, Any]:
    """What handing over takes, and what the link takes."""
    model = model_of(options, options.device, seed=0)
    device, broadcast = parameters_of(model)[0].device, handover == "broadcast"
    check_devices(handover, device, [options.to])
    weights: Any
    if broadcast:
        weights = BroadcastWeights(model, folder, rank=0, size=2)
    else:
        weights = SharedWeights(model, on_card=handover == "card")
    try:
        taker.tell(f"open {folder if broadcast else weights.path}")
        taker.hear()
        if broadcast:
            taker.tell("join")
            weights.join()
            taker.hear()
        took: dict[str, list[float]] = {}
        told: dict[str, float] = {}
        plain = links(options, weights, taker)
        for version in range(options.times + 1):
            row = dict[str, float]()
            for name, link in plain.items():
                begin(device)
                row[name] = link()
            parameters_of(model)[0].add_(1.0)
            begin(device)
            if broadcast:
                taker.tell("take")
                row["push"] = weights.push(version, taker.check_alive)["push_s"]
                taker.hear()
            else:
                told = weights.push(version)
                row["push"] = told["push_s"]
                taker.tell("take")
                row["pull"], row["link_pull"] = map(float, taker.hear().split())
            for name, seconds in row.items() if version else ():  # the first time makes buffers and connections
                took.setdefault(name, []).append(seconds)
        taker.tell("digest")
        same = digest(model) == taker.hear()
    finally:
        taker.close()
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
    """Each handover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handover", nargs="+", choices=("memory", "card", "broadcast"), default=["card"])
    parser.add_argument("--shape", choices=tuple(MODELS), default="1.7b")
    parser.add_argument("--device", default="cuda:0", help="device of the trainer")
    parser.add_argument("--to", default="cuda:0", help="device of the sampler")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    takers = {handover: Taker(options, handover) for handover in options.handover}
    print(json.dumps({**provenance(), "options": vars(options)}), flush=True)
    for handover, taker in takers.items():
        with tempfile.TemporaryDirectory() as folder:
            row = measure(options, handover, taker, Path(folder))
        print(json.dumps({"handover": handover, "shape": options.shape, **row}), flush=True)
        if not row["bits_equal"]:
            sys.exit("the sampler's weights are not the trainer's")


if __name__ == "__main__":
    main()
