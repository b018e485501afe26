"""Time the products of LoRA adapters in the layers of an 8B model on one GPU: what they add, and which configs are best.

    python scripts/adapter_products.py --rows 256 --adapters 64 --out adapters.json

For each of the four linear layers of a Qwen3-8B block (q, k and v; o; gate and up; down) a CUDA graph runs `--layers` such
layers with weights of their own, so that none of them is in L2. All figures are microseconds per layer, medians of turns:

    base      the layer's own product, with its activation
    shrink    `lora_shrink` alone
    expand    `lora_expand_add` alone
    serial    the layer with adapters, one launch after the other
    none      the same, but `lora_expand_add` starts while `lora_shrink` still runs
    first     `lora_shrink` beside the layer's own product, in another branch of the graph, as in the engine's captured steps

`bits` says whether the last three gave the same bits. With `--configs` some configs of both operators are timed as well, each
alone. `step_ms` is what the adapters add to a step of 36 blocks, and `best` the way that adds least. The result is printed as
JSON.
"""

import argparse
import json
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import ops
from tilewright.asm.compile import compile_only
from tilewright.bench.harness import interleaved_us
from tilewright.bench.provenance import environment
from tilewright.hw.device import device_of
from tilewright.kernels.gemm.lora.expand import lora_expand_add_op
from tilewright.kernels.gemm.lora.shrink import lora_shrink_op
from tilewright.nn import Linear, LoraStack
from tilewright.op import Op, on_card
from tilewright.ops.linear_gradient import activated

BLOCKS = 36
LAYERS: dict[str, tuple[int, tuple[int, ...], str]] = {
    "qkv": (4096, (4096, 1024, 1024), "none"),
    "o": (4096, (4096,), "none"),
    "gate_up": (4096, (12288, 12288), "silu_mul"),
    "down": (12288, (4096,), "none"),
}
"""The linear layers of a block: K, the rows of each part, the activation."""
SHRINK = [
    {"BLOCK_M": block_m, "SLICES": slices, "BLOCK_K": block_k, "num_stages": stages, "num_warps": slices}
    for block_m, slices, block_k, stages in (
        *((16, 4, 64, 3), (16, 4, 128, 2), (16, 4, 32, 5), (16, 2, 128, 3), (16, 8, 64, 2)),
        *((32, 4, 64, 3), (32, 4, 32, 5)),
    )
]
EXPAND = [
    {"BLOCK_N": block_n, "STEPS": steps, "num_warps": warps}
    for block_n, steps, warps in (
        *((128, 2, 4), (128, 4, 4), (128, 8, 4), (128, 16, 4)),
        *((256, 2, 4), (256, 4, 4), (256, 8, 4), (256, 4, 8)),
    )
]
CONFIGS: dict[Op, list[dict[str, int]]] = {lora_shrink_op: SHRINK, lora_expand_add_op: EXPAND}


class Case:
    """Layers of one kind, with random weights and adapters, and one batch for each."""

    def __init__(self, name: str, args: argparse.Namespace, device: str = "cuda"):
        features, self.parts, self.activation = LAYERS[name]
        place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        meta, rows, ends = device == "meta", args.rows, list(accumulate(self.parts))
        ids = torch.arange(rows) % args.adapters + 1
        self.order = ops.adapter_order(ids).to(device)
        self.ends = ends[0], ends[1] if len(ends) > 1 else ends[-1]
        self.layers, self.x, self.h, self.y = [], [], [], []
        for _ in range(1 if meta else args.layers):
            layer = Linear(features, self.parts, bias=False, **place).requires_grad_(False)
            stack = LoraStack(self.parts, features, adapters=args.adapters, rank=args.rank, **place)
            if not meta:
                layer.weight.normal_().mul_(features**-0.5)  # pyright: ignore
                stack.a.normal_().mul_(features**-0.5)
                stack.b.normal_().mul_(args.rank**-0.5)
                stack.scales.fill_(0.5)
            layer.adapter = stack
            self.layers.append(layer)
            self.x.append(torch.randn(rows, features, **place))
            self.h.append(torch.randn(-(-features // 512), rows, stack.a.shape[1], device=device))
            self.y.append(torch.randn(rows, ends[-1], **place))

    def arguments(self, op: Op, i: int) -> tuple[Any, ...]:
        stack = self.layers[i].adapter
        if op is lora_shrink_op:
            return self.x[i], stack.a, self.order
        return self.y[i], self.h[i], stack.b, stack.scales, self.order, *self.ends, False

    def with_config(self, op: Op, config: dict[str, int] | None) -> Callable[[int], Any]:
        if config is None:
            return lambda i: op.run(*self.arguments(op, i))
        return lambda i: op.impls[0].launch(config, *self.arguments(op, i))

    def base(self, i: int) -> Tensor:
        return self.layers[i](self.x[i], self.activation)

    def serial(self, i: int) -> Tensor:
        layer, x = self.layers[i], self.x[i]
        h = ops.lora_shrink(x, layer.adapter.a, self.order)
        y = ops.linear(x, layer.weight)
        y = ops.lora_expand_add(y, h, layer.adapter.b, layer.adapter.scales, self.order, self.parts)
        return activated(y, self.activation)

    def none(self, i: int) -> Tensor:
        layer, x = self.layers[i], self.x[i]
        return activated(layer.adapter.add(ops.linear(x, layer.weight), x, self.order), self.activation)

    def first(self, i: int) -> Tensor:
        return self.layers[i](self.x[i], self.activation, self.order)

    def same_bits(self) -> bool:
        """Whether replays of all ways give the last layer the same bits."""
        found = []
        for way in (self.serial, self.none, self.first):
            way(0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [way(i) for i in range(len(self.layers))]
            for _ in range(3):
                graph.replay()
                found.append(results[-1].clone())
        return all(torch.equal(found[0], other) for other in found)

    def moved(self) -> dict[str, int]:
        """The bytes of A and of B."""
        stack = self.layers[0].adapter
        return {"shrink": stack.a.nbytes, "expand": stack.b.nbytes}


def accepted(name: str, op: Op, args: argparse.Namespace) -> list[dict[str, int]]:
    """The configs that this kind of layer can have."""
    found = Case(name, args, "meta")
    device, problem = device_of(0), op.problem(*found.arguments(op, 0))
    return [config for config in CONFIGS[op] if op.impls[0].space.refusal(device, problem, config) is None]


def compile_all(args: argparse.Namespace) -> None:
    """Compile all configs in several threads; the calls that follow find them in Triton's cache."""
    device = device_of(0)
    cases = {name: Case(name, args, "meta") for name in LAYERS}
    with on_card(device), compile_only(device.arch, os.cpu_count() or 1):
        for name, case in cases.items():
            for op in CONFIGS:
                for config in accepted(name, op, args) if args.configs else ():
                    case.with_config(op, config)(0)


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    case = Case(name, args)
    ways: dict[str, Callable[[int], Any]] = {
        "base": case.base,
        "shrink": case.with_config(lora_shrink_op, None),
        "expand": case.with_config(lora_expand_add_op, None),
        "serial": case.serial,
        "none": case.none,
        "first": case.first,
    }
    times = interleaved_us(list(ways.values()), sets=args.layers, rounds=args.rounds)
    row: dict[str, Any] = {"layer": name, **{way: round(us, 2) for way, (us, _) in zip(ways, times, strict=True)}}
    row["tb_per_s"] = {way: round(size / row[way] * 1e-6, 2) for way, size in case.moved().items()}
    row["bits"] = case.same_bits()
    for op, key in ((lora_shrink_op, "shrink_configs"), (lora_expand_add_op, "expand_configs")) if args.configs else ():
        configs = accepted(name, op, args)
        timed = interleaved_us([case.with_config(op, c) for c in configs], sets=args.layers, rounds=args.rounds)
        ranked = sorted(zip(timed, configs, strict=True), key=lambda pair: pair[0][0])
        row[key] = [{"us": round(us, 2), **config} for (us, _), config in ranked]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="number of tokens")
    parser.add_argument("--adapters", type=int, default=64, help="number of adapters; token i has adapter i modulo this number")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12, help="number of layers of each kind")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--configs", action="store_true", help="also time some configs of both operators")
    parser.add_argument("--out", type=Path, help="JSON file for the result, with the card, versions, commit and date")
    args = parser.parse_args()
    with torch.inference_mode():
        compile_all(args)
        rows = [measured(name, args) for name in LAYERS]
    step = {way: round(BLOCKS * sum(row[way] - row["base"] for row in rows) / 1e3, 3) for way in ("serial", "none", "first")}
    found = {"environment": environment(), "rows": rows, "step_ms": step, "best": min(step, key=lambda way: step[way])}
    text = json.dumps(found, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
