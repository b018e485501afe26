"""Time the products of LoRA adapters in the layers of an 8B model on one GPU: what they add, and which variants are best.

    python scripts/adapter_products.py --rows 256 --adapters 64 --variants --out adapters.json

For each of the four linear layers of a Qwen3-8B block (q, k and v; o; gate and up; down) a CUDA graph runs `--layers` such
layers with weights of their own, so that none of them is in L2. All figures are microseconds per layer, medians of turns:

    base        the layer's own product, with its activation
    activation  the activation alone, which follows the adapters; 0 if there is none
    shrink      `lora_shrink` alone
    expand      `lora_expand_add` alone
    serial      the layer with adapters, one launch after the other
    none        the same, but `lora_expand_add` starts while `lora_shrink` still runs
    chained     the same, and `lora_shrink` starts while the layer's own product still runs
    first       `lora_shrink` beside the layer's own product, in another branch of the graph
    fetched     the same, and in that branch the adapters' B is then prefetched into L2
    gated       `chained`, with `lora_expand_silu_mul` in place of `lora_expand_add` and the activation; only gate and up
    engine      the layer itself, as in the engine's captured steps: `gated` where there is one, else `chained`

`bits` says whether the ways above gave the same bits.

With `--variants` implementations and configs of both operators are timed as well, each alone (`shrink_variants` and
`expand_variants`, the fastest first). Each is compared with the operator's definition: `error` is the RMS error relative to the
RMS of the definition. A variant with too large an error is `wrong` and never chosen. Then the fastest two of both operators are
timed in the layer, in each combination, `chained`, `first` and `fetched` (`pairs`; `us` is what they add to `base`); `gated`
likewise.

`step_ms` is what the adapters add to a step of 36 blocks, for each way with the default configs. `best` names the way that adds
least to each layer, and with `--variants` its implementations and configs. `best_step_ms` is what these add to a step. The
result is printed as JSON.
"""

import argparse
import json
import os
from collections.abc import Callable
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright import ops
from tilewright.asm.compile import compile_only
from tilewright.bench.harness import interleaved_us
from tilewright.bench.provenance import environment
from tilewright.hw.device import device_of
from tilewright.kernels.gemm.lora.expand import lora_expand_add_op
from tilewright.kernels.gemm.lora.expand_silu_mul import lora_expand_silu_mul_op
from tilewright.kernels.gemm.lora.problem import fetch_block, tile_at, tiles_of
from tilewright.kernels.gemm.lora.shrink import lora_shrink_op
from tilewright.nn import Linear, LoraStack
from tilewright.op import Op, on_card
from tilewright.ops.linear_gradient import activated
from tilewright.tune.tolerance import errors

BLOCKS = 36
LAYERS: dict[str, tuple[int, tuple[int, ...], str]] = {
    "qkv": (4096, (4096, 1024, 1024), "none"),
    "o": (4096, (4096,), "none"),
    "gate_up": (4096, (12288, 12288), "silu_mul"),
    "down": (12288, (4096,), "none"),
}
"""The linear layers of a block: K, the rows of each part, the activation."""
SHRINK, EXPAND, GATED = lora_shrink_op, lora_expand_add_op, lora_expand_silu_mul_op


class Variant(NamedTuple):
    """An implementation of one of the operators, and its config."""

    impl: str
    config: dict[str, int]


def _tile(block_m: int, slices: int, block_k: int, stages: int, fetch: int) -> Variant:
    config = {"BLOCK_M": block_m, "SLICES": slices, "BLOCK_K": block_k, "num_stages": stages, "num_warps": slices}
    return Variant("triton", {**config, "FETCH": fetch})


def _direct(**config: int) -> Variant:
    return Variant("direct", config)


VARIANTS: dict[Op, list[Variant]] = {
    SHRINK: [
        *(_tile(16, 4, 64, 3, 1), _tile(16, 4, 64, 3, 0), _tile(16, 4, 64, 2, 1), _tile(16, 4, 32, 3, 1)),
        *(_tile(16, 2, 64, 3, 1), _tile(16, 2, 64, 3, 0), _tile(16, 2, 128, 3, 1), _tile(32, 4, 64, 3, 1)),
        *(
            _direct(FETCH=fetch, num_warps=warps, maxnreg=registers)
            for fetch, warps, registers in product((0, 1), (1, 4), (80, 128))
        ),
    ],
    EXPAND: [
        *(
            Variant("triton", {"BLOCK_N": block_n, "STEPS": steps, "num_warps": 4})
            for block_n, steps in ((128, 2), (128, 4), (128, 8), (128, 16), (256, 2), (256, 4))
        ),
        *(
            _direct(STEPS=steps, FETCH=fetch, num_warps=warps)
            for steps, fetch, warps in (
                *((1, 0, 1), (2, 0, 1), (4, 0, 1), (4, 2, 1), (8, 2, 1)),
                *((1, 0, 2), (2, 0, 2), (4, 2, 2), (8, 2, 2)),
            )
        ),
    ],
    GATED: [_direct(STEPS=steps, num_warps=warps) for steps, warps in product((1, 2, 4), (1, 2))],
}
LIMITS: dict[Op, float] = {SHRINK: 1e-4, EXPAND: 8e-3, GATED: 8e-3}
"""The largest RMS error of a variant: `lora_shrink` has float32 results, the others round to bf16 two or three times."""
FASTEST = 2
"""The number of variants of each operator that are timed in the layer."""


@triton.jit(do_not_specialize=["n_tokens"])
def _fetch_kernel(b_ptr, adapters_ptr, n_tokens, SIZE: tl.constexpr, RUN: tl.constexpr):
    """Prefetch RUN of the SIZE 16-bit numbers of a tile's B into L2."""
    first, end, adapter = tile_at(adapters_ptr, tl.program_id(1), n_tokens)  # pyright: ignore
    if tl.minimum(end - first, adapter) > 0:
        fetch_block(b_ptr + (adapter - 1).to(tl.int64) * SIZE + tl.program_id(0) * RUN, 2 * RUN)


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
        self.branch = None if meta else torch.cuda.Stream()
        self.gated = self.activation == "silu_mul"
        self.ways = (*WAYS, "gated") if self.gated else WAYS
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
        if op is SHRINK:
            return self.x[i], stack.a, self.order, False
        ends = () if op is GATED else self.ends
        return self.y[i], self.h[i], stack.b, stack.scales, self.order, *ends, False

    def alone(self, op: Op, variant: Variant | None) -> Callable[[int], Any]:
        return lambda i: run(op, variant, *self.arguments(op, i))

    def base(self, i: int) -> Tensor:
        return self.layers[i](self.x[i], self.activation)

    def after(self, i: int) -> Tensor:
        return activated(self.y[i], self.activation)

    def engine(self, i: int) -> Tensor:
        return self.layers[i](self.x[i], self.activation, self.order)

    def way(self, name: str, shrink: Variant | None = None, expand: Variant | None = None) -> Callable[[int], Tensor]:
        """The layer with adapters in one of the ways that this program's description lists, with these variants."""

        def call(i: int) -> Tensor:
            layer, x, started = self.layers[i], self.x[i], torch.cuda.Event()
            stack = layer.adapter
            started.record()
            y, current = ops.linear(x, layer.weight), torch.cuda.current_stream()
            if name in ("first", "fetched"):
                assert self.branch is not None
                self.branch.wait_event(started)
                with torch.cuda.stream(self.branch):
                    h = run(SHRINK, shrink, x, stack.a, self.order, False)
                    if name == "fetched":
                        size, tiles = stack.b[0].numel(), tiles_of(x.shape[0], stack.b.shape[0])
                        grid: Any = (size // 8192, tiles)
                        options: dict[str, Any] = {"SIZE": size, "RUN": 8192, "num_warps": 1}
                        _fetch_kernel[grid](stack.b, self.order, x.shape[0], **options)
                current.wait_stream(self.branch)
            else:
                h = run(SHRINK, shrink, x, stack.a, self.order, name in ("chained", "gated"))
            if name == "gated":
                return run(GATED, expand, y, h, stack.b, stack.scales, self.order, True)
            run(EXPAND, expand, y, h, stack.b, stack.scales, self.order, *self.ends, name in ("none", "chained"))
            return activated(y, self.activation)

        return call

    def wanted(self, op: Op) -> Tensor:
        """What the definition makes in float64 of the first layer's arguments."""
        wide = [
            value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in self.arguments(op, 0)
        ]
        result = op.reference(*wide)
        return wide[0] if op is EXPAND else result

    def error(self, op: Op, variant: Variant, want: Tensor) -> float:
        """The RMS error relative to the RMS of the definition."""
        args = [value.clone() if isinstance(value, Tensor) else value for value in self.arguments(op, 0)]
        result = run(op, variant, *args)
        return float(errors(args[0] if op is EXPAND else result, want)[1])

    def same_bits(self) -> bool:
        """Whether replays of all ways give the last layer the same bits."""
        found = []
        for way in (*map(self.way, self.ways), self.engine):
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
        return {"shrink": stack.a.nbytes, "expand": stack.b.nbytes} | ({"expand_gated": stack.b.nbytes} if self.gated else {})


WAYS = ("serial", "none", "chained", "first", "fetched")


def run(op: Op, variant: Variant | None, *args: Any) -> Any:
    if variant is None:
        return op.run(*args)
    return next(impl for impl in op.impls if impl.name == variant.impl).launch(variant.config, *args)


def accepted(name: str, op: Op, args: argparse.Namespace) -> list[Variant]:
    """The variants that this kind of layer can have."""
    found = Case(name, args, "meta")
    device, problem = device_of(0), op.problem(*found.arguments(op, 0))
    impls = {impl.name: impl for impl in op.impls if impl.refusal(device, problem) is None}
    return [
        variant for variant in VARIANTS[op]
        if variant.impl in impls and impls[variant.impl].space.refusal(device, problem, variant.config) is None
    ]  # fmt: skip


def compile_all(args: argparse.Namespace) -> None:
    """Compile all variants in several threads; the calls that follow find them in Triton's cache."""
    device = device_of(0)
    cases = {name: Case(name, args, "meta") for name in LAYERS}
    with on_card(device), compile_only(device.arch, os.cpu_count() or 1):
        for name, case in cases.items():
            for op in (SHRINK, EXPAND, *([GATED] if case.gated else [])):
                for variant in accepted(name, op, args) if args.variants else ():
                    call = case.arguments(op, 0)
                    run(op, variant, *call)
                    run(op, variant, *call[:-1], True)


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    case = Case(name, args)
    calls: dict[str, Callable[[int], Any]] = {
        "base": case.base,
        "activation": case.after,
        "shrink": case.alone(SHRINK, None),
        "expand": case.alone(EXPAND, None),
        **{way: case.way(way) for way in case.ways},
        "engine": case.engine,
    }
    if case.gated:
        calls["expand_gated"] = case.alone(GATED, None)
    else:
        del calls["activation"]
    times = interleaved_us(list(calls.values()), sets=args.layers, rounds=args.rounds)
    row: dict[str, Any] = {"layer": name, "activation": 0.0}
    row |= {way: round(us, 2) for way, (us, _) in zip(calls, times, strict=True)}
    row["tb_per_s"] = {way: round(size / row[way] * 1e-6, 2) for way, size in case.moved().items()}
    row["bits"] = case.same_bits()
    row["best"] = min(
        ({"way": way, "us": round(row[way] - row["base"], 2)} for way in case.ways), key=lambda found: found["us"]
    )
    if args.variants:
        add_variants(row, case, args)
    return row


def add_variants(row: dict[str, Any], case: Case, args: argparse.Namespace) -> None:
    """Time the variants of both operators alone, then the fastest in the layer."""
    fastest: dict[Op, list[Variant]] = {}
    for op, key in ((SHRINK, "shrink"), (EXPAND, "expand"), *([(GATED, "expand_gated")] if case.gated else [])):
        variants = accepted(row["layer"], op, args)
        want = case.wanted(op)
        checked = [(variant, case.error(op, variant, want)) for variant in variants]
        timed = interleaved_us([case.alone(op, v) for v in variants], sets=args.layers, rounds=args.rounds)
        ranked = sorted(zip(timed, checked, strict=True), key=lambda pair: pair[0][0])
        size = case.moved()[key]
        row[f"{key}_variants"] = [
            {"us": round(us, 2), "tb_per_s": round(size / us * 1e-6, 2), "error": error, "wrong": not error < LIMITS[op]}
            | {"impl": variant.impl, **variant.config}
            for (us, _), (variant, error) in ranked
        ]
        fastest[op] = [variant for _, (variant, error) in ranked if error < LIMITS[op]][:FASTEST]
    pairs: list[tuple[Variant, Variant, str]] = [
        *product(fastest[SHRINK], fastest[EXPAND], ("chained", "first", "fetched")),
        *product(fastest[SHRINK], fastest.get(GATED, []), ("gated",)),
    ]
    calls = [case.base, *(case.way(way, shrink, expand) for shrink, expand, way in pairs)]
    (base, _), *timed = interleaved_us(calls, sets=args.layers, rounds=args.rounds)
    row["pairs"] = sorted(
        (
            {"way": way, "us": round(us - base, 2), "shrink": shrink._asdict(), "expand": expand._asdict()}
            for (us, _), (shrink, expand, way) in zip(timed, pairs, strict=True)
        ),
        key=lambda pair: pair["us"],
    )
    row["best"] = min((row["best"], *row["pairs"][:1]), key=lambda found: found["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="number of tokens")
    parser.add_argument("--adapters", type=int, default=64, help="number of adapters; token i has adapter i modulo this number")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12, help="number of layers of each kind")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--variants", action="store_true", help="also time implementations and configs of both operators")
    parser.add_argument("--out", type=Path, help="JSON file for the result, with the card, versions, commit and date")
    args = parser.parse_args()
    with torch.inference_mode():
        compile_all(args)
        rows = [measured(name, args) for name in LAYERS]
    step = {way: round(BLOCKS * sum(row[way] - row["base"] for row in rows) / 1e3, 3) for way in (*WAYS, "engine")}
    best = {row["layer"]: row["best"] for row in rows}
    least = round(BLOCKS * sum(row["us"] for row in best.values()) / 1e3, 3)
    found = {"environment": environment(), "rows": rows, "step_ms": step, "best": best, "best_step_ms": least}
    text = json.dumps(found, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
