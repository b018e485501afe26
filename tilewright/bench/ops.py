"""Benchmark of memory-bound operators against a device copy of the same bytes, and of the host time of dispatch.

The device copy is the faster of `copy_`, which a CUDA graph replays as a memory-copy node, and an elementwise kernel of torch
that reads and writes the same number of bytes (`neg`): on an H100 the node moves 1 GB and more at 2.4 TB/s, the kernel at 3.0.
"""

import time
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from tilewright import ops
from tilewright.bench.harness import interleaved_us, sets_for
from tilewright.bench.provenance import ran_by
from tilewright.kernels.optimizer.adamw import adamw_op
from tilewright.kernels.optimizer.adamw_8bit import adamw_8bit_op
from tilewright.kernels.optimizer.grad_norm import grad_squares_op
from tilewright.kernels.optimizer.sgd import momentum_op, sgd_op
from tilewright.op import Inputs, Op

__all__ = ["CASES", "dispatch_overhead_us", "measure"]

_SHAPES = ((4096, 1024), (8192, 4096), (8192, 16384), (4096, 131072), (2048, 262144), (65536, 1024), (262144, 128))
_TRANSPOSED = ((8192, 8192), (8192, 4097), (4097, 8192), (4096, 131072))
_BF16 = torch.bfloat16
_COPY_STEP = 4096

Args = tuple[Any, ...]


def _norm(rows: int, cols: int, extra: int) -> Callable[[Inputs], Args]:
    def make(inputs: Inputs) -> Args:
        weights = [torch.randn(cols, dtype=_BF16, device="cuda") for _ in range(1 + (extra == 2))]
        data = [_randn(rows, cols) for _ in range(1 + (extra == 1))]
        return (*data, *weights, 1e-6)

    return make


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=_BF16, device="cuda")


def _rope(tokens: int, heads: int, dim: int) -> Callable[[Inputs], Args]:
    def make(inputs: Inputs) -> Args:
        q, k = _randn(tokens, heads, dim), _randn(tokens, heads // 4, dim)
        table = torch.rand(tokens, 2, dim // 2, device="cuda")
        return q, k, torch.arange(tokens, device="cuda"), table, False

    return make


def _gated(rows: int, cols: int) -> Callable[[Inputs], Args]:
    def make(inputs: Inputs) -> Args:
        gate, up = _randn(rows, 2 * cols).chunk(2, -1)
        return gate, up

    return make


def _cases() -> Iterator[tuple[str, str, Callable[[Inputs], Args]]]:
    for rows, cols in _SHAPES:
        label = f"{rows}x{cols}"
        yield "rms_norm", label, _norm(rows, cols, 0)
        yield "add_rms_norm", label, _norm(rows, cols, 1)
        yield "layer_norm", label, _norm(rows, cols, 2)
        yield "softmax", label, lambda inputs, r=rows, c=cols: (_randn(r, c),)
        yield "silu_mul", label, _gated(rows, cols)
    for rows, cols in _TRANSPOSED:
        yield "permute", f"{rows}x{cols}", lambda inputs, r=rows, c=cols: (_randn(r, c), [1, 0])
    for tokens, heads, dim in ((16384, 32, 128), (65536, 16, 64), (32768, 32, 128)):
        yield "rope", f"{tokens}x{heads}x{dim}", _rope(tokens, heads, dim)


def _update(op: Op, tensors: int) -> Callable[[Inputs], Args]:
    def make(inputs: Inputs) -> Args:
        assert op.make is not None
        return op.make(Inputs("cuda", here=True), M=tensors, N=4096)

    return make


CASES = (
    *_cases(),
    # A layer of an 8B model has 13 matrices of this size.
    *(
        (op.name, f"{tensors}x4096x4096", _update(op, tensors))
        for op in (adamw_op, adamw_8bit_op, momentum_op, sgd_op, grad_squares_op)
        for tensors in (1, 13)
    ),
)


def measure(
    names: set[str] | None, progress: Callable[[str], None], done: Container[tuple[str, str]] = ()
) -> Iterator[dict[str, Any]]:
    """One row for each case: microseconds of the op and of a copy of the same bytes, and their ratio (1 = copy speed).

    `copy_us` is the smaller of `copy_node_us` and `copy_kernel_us`. `done`: (op, shape) of cases to leave out.
    """
    by_name = {op.name: op for op in ops.ALL}
    for name, label, make in CASES:
        if (names and name not in names) or (name, label) in done:
            continue
        progress(f"{name} {label}")
        row = _row(by_name[name], label, make)
        progress(f"  {row['impl']} {row['us']} us, {row['tb_per_s']} TB/s, {row['of_copy']} of a copy")
        yield row
        torch.cuda.empty_cache()


def _row(op: Op, label: str, make: Callable[[Inputs], Args]) -> dict[str, Any]:
    first = make(Inputs("cuda"))
    moved = op.cost(*first).bytes
    sets = sets_for(moved)
    args = [first, *(make(Inputs("cuda", seed=i)) for i in range(1, sets))]
    # The copy has whole vectors of 16 bytes even if the op's size is odd, because a ragged copy is slow. Its input and output
    # rotate like those of the op.
    elements = -(-moved // 4 // _COPY_STEP) * _COPY_STEP
    sources = [torch.randn(elements, dtype=_BF16, device="cuda") for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    ran = ran_by(lambda: op.run(*first))
    calls = [
        lambda i: op.run(*args[i]),
        lambda i: targets[i].copy_(sources[i]),
        lambda i: torch.neg(sources[i], out=targets[i]),
    ]
    (op_us, op_spread), *copies = interleaved_us(calls, sets=sets)
    copy_us, copy_spread = min(copies)
    return {
        "op": op.name,
        "shape": label,
        "dtype": "bfloat16",
        "impl": op.choice_for(*first).impl.name,
        "bytes": moved,
        "us": round(op_us, 2),
        "us_spread": round(op_spread, 2),
        "copy_us": round(copy_us, 2),
        "copy_us_spread": round(copy_spread, 2),
        "copy_node_us": round(copies[0][0], 2),
        "copy_kernel_us": round(copies[1][0], 2),
        "tb_per_s": round(moved / op_us / 1e6, 3),
        "of_copy": round(copy_us / op_us, 3),
        "kernels": ran,
    }


def dispatch_overhead_us(device: str, calls: int = 20000) -> dict[str, float]:
    """Host microseconds that `ops.rms_norm` adds to its bare launcher: argument checks, problem, choice, cache."""
    x, weight = torch.randn(1, 256, device=device), torch.randn(256, device=device)
    op = next(op for op in ops.ALL if op.name == "rms_norm")
    impl, config, *_ = op.choice_for(x, weight, 1e-6)

    def per_call(fn: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(calls // 5):
                fn()
            best = min(best, (time.perf_counter() - start) / (calls // 5))
            if device == "cuda":
                torch.cuda.synchronize()
        return best * 1e6

    with torch.inference_mode():
        bare = per_call(lambda: impl.launch(config, x, weight, 1e-6))
        whole = per_call(lambda: ops.rms_norm(x, weight, 1e-6))
    return {"bare_us": round(bare, 3), "op_us": round(whole, 3), "added_us": round(whole - bare, 3)}
