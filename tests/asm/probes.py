"""Small kernels, each of which shows one fact of a compiled kernel, launchers for them, and something like an op."""

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.op import Example, Impl
from tilewright.tune.space import Config, Space

__all__ = ["TinyOp", "copy", "gather", "matmul", "matmul_tma", "nested", "nonsense", "turn", "twice"]


@triton.jit(do_not_specialize=["n"])
def _copy_kernel(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    # No mask by element: a bound of unknown divisibility would split every vector.
    for start in range(0, n, BLOCK):
        offsets = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets * stride))


def _copy(config: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _copy_kernel[(1,)](x, y, x.numel(), x.stride(0), **config)
    return y


def _twice(config: Any, x: Tensor) -> Tensor:
    return _copy(config, _copy({"BLOCK": 128}, x))


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows, cols, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + rows[:, None] * K + start + ks[None, :])
        b = tl.load(b_ptr + (start + ks[:, None]) * N + cols[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], total.to(c_ptr.dtype.element_ty))


def _matmul(config: Any, a: Tensor, b: Tensor) -> Tensor:
    c = a.new_empty(a.shape[0], b.shape[1])
    _matmul_kernel[(1,)](a, b, c, a.shape[1], M=a.shape[0], N=b.shape[1], BLOCK_K=64, **config)
    return c


@triton.jit
def _matmul_tma_kernel(a_desc, b_desc, c_desc, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK_K):
        total = tl.dot(a_desc.load([0, start]), b_desc.load([start, 0]), total)
    c_desc.store([0, 0], total.to(tl.bfloat16))


def _matmul_tma(config: Any, a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    blocks = ((a, [m, 64]), (b, [64, n]), (c, [m, n]))
    descriptors = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in blocks]
    _matmul_tma_kernel[(1,)](*descriptors, k, M=m, N=n, BLOCK_K=64, **config)
    return c


@triton.jit
def _nonsense_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N // 2)))


def _nonsense(config: Any, x: Tensor) -> None:
    _nonsense_kernel[(1,)](x, N=12)


@triton.jit
def _helper(N: tl.constexpr):
    return tl.arange(0, N)


@triton.jit
def _nested_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + _helper(N), 0.0)


def _nested(config: Any, x: Tensor) -> None:
    _nested_kernel[(1,)](x, N=12)


copy, twice, matmul, matmul_tma, nonsense, nested = (
    SimpleNamespace(launch=launch) for launch in (_copy, _twice, _matmul, _matmul_tma, _nonsense, _nested)
)


class TinyOp:
    """As much of an op as a certificate reads, with this default config. A real Op would be registered with torch for good.

    `wide` doubles the tile, `stages` are the depths of the space. One of its three configs spills, one is too big for an SM.
    """

    name = "tiny"
    make = None

    def __init__(self, config: Config, wide: bool = False, stages: tuple[int, ...] = (2,)):
        cols = 256 if wide else 128
        bf16 = torch.bfloat16
        self.examples = (Example("only", lambda i: (i.randn(64, 256, dtype=bf16), i.randn(256, cols, dtype=bf16))),)
        space = Space(
            default=lambda device, problem: config,
            axes={"maxnreg": (64, None), "num_stages": (*stages, 12)},
            refusal=lambda device, problem, c: "one is enough" if c["maxnreg"] == 64 and c["num_stages"] > 3 else None,
        )
        self.impls = (
            Impl(name="triton", launch=_matmul, space=space),
            Impl(name="later", launch=_matmul, space=space, min_arch=90),
            Impl(name="vendor", launch=lambda config, a, b: a @ b),
        )

    def problem(self, a: Tensor, b: Tensor) -> tuple[int, ...]:
        return tuple(a.shape)


@gluon.jit
def _turn_kernel(x_ptr, y_ptr, PHASES: gl.constexpr):
    """A 32x32 tile through shared memory: written by rows, read by columns."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    by_col: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, PHASES, [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, by_row))[:, None]
    cols = gl.arange(0, 32, gl.SliceLayout(0, by_row))[None, :]
    tile = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [32, 32], shared)
    tile.store(gl.load(x_ptr + rows * 32 + cols))
    rows = gl.arange(0, 32, gl.SliceLayout(1, by_col))[:, None]
    cols = gl.arange(0, 32, gl.SliceLayout(0, by_col))[None, :]
    gl.store(y_ptr + rows * 32 + cols, tile.load(by_col))


def _turn(config: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _turn_kernel[(1,)](x, y, PHASES=config["PHASES"], num_warps=4)
    return y


@triton.jit
def _gather_kernel(x_ptr, index_ptr, y_ptr, stride, STEP: tl.constexpr, N: tl.constexpr):
    """Reads of every kind: neighbours, every STEP-th, rows of a stride that is not known, and whatever an index says."""
    i = tl.arange(0, N)
    total = tl.load(x_ptr + i) + tl.load(x_ptr + i * STEP)
    total += tl.sum(tl.load(x_ptr + i[:, None] * stride + tl.arange(0, 8)[None, :]), 1)
    total += tl.load(x_ptr + tl.load(index_ptr + i))
    tl.store(y_ptr + i, total)


def _gather(config: Any, x: Tensor) -> None:
    _gather_kernel[(1,)](x, x.view(torch.int32), x, 7, N=256, num_warps=4, **config)


turn, gather = SimpleNamespace(launch=_turn), SimpleNamespace(launch=_gather)
