"""The Hopper kernels of grouped products without a card: their own source, each group of warps a thread (gluon_threads.py).

Every tile of ragged groups is there once, no stage is written while it is read, nobody waits for ever, and rows that belong to
nobody are zeros. On a card conformance runs the kernel itself.
"""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import gluon_threads
from tests.kernels.gluon_threads import Barriers, Buffers, Pointer, Stuck, Whole, language, replayed, together
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.gemm import sm90_kernel, sm90_mainloop
from tilewright.kernels.gemm.grouped import block_scaled, block_scaled_sm90, sm90
from tilewright.kernels.gemm.grouped import block_scaled_sm90_kernel as block_kernel_grouped
from tilewright.kernels.gemm.grouped import sm90_kernel as grouped_kernel
from tilewright.kernels.gemm.grouped.block_scaled import grouped_block_scaled_linear_op
from tilewright.kernels.gemm.grouped.linear import grouped_linear_op
from tilewright.kernels.gemm.grouped.problem import grouped_activated
from tilewright.kernels.gemm.grouped.sm90 import GROUPED_SM90
from tilewright.kernels.gemm.quantized import block_scaled_sm90_kernel as block_kernel
from tilewright.kernels.hopper import groups, ring
from tilewright.op import Inputs

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the run without the interpreter has it, and no kernel is needed")
H100 = CARD_OF_ARCH[90]
PROGRAMS = 3


def box(desc: Any, at: list[int]) -> Tensor:
    """What the copy engine brings: zeros where a box lies outside."""
    held = torch.zeros(desc.block_shape, dtype=torch.float64)
    (r, c), (high, across) = at, desc.block_shape
    assert min(at) >= 0
    part = desc.base[r : r + high, c : c + across].double()
    held[: part.shape[0], : part.shape[1]] = part
    return held


class Played:
    """In the kernel's place: runs its source for each program, with barriers that Python waits at."""

    stored: Tensor
    """How often each element of the result was written."""

    def __init__(self, break_it: str = "", module: ModuleType = grouped_kernel, kernel: str = "grouped_sm90_kernel"):
        self.break_it, self.module, self.kernel = break_it, module, kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            given = dict(zip(getattr(self.module, self.kernel).arg_names, args, strict=False)) | constants
            for program in range(min(grid[0], PROGRAMS)):
                self.program(program, min(grid[0], PROGRAMS), given)

        return launch

    def program(self, program: int, programs: int, given: dict[str, Any]) -> None:
        """One program of the launch, to its end."""
        y, stored = given["y_ptr"], self.stored
        gl = language(
            program_id=lambda axis: Whole(program), num_programs=lambda axis: programs, allocate_shared_memory=self._allocate,
            warp_specialize=lambda parts, warps, registers: together([partial(f, *a) for f, a in parts]),
        )  # fmt: skip

        def finish_tile(blocks: Any, bufs: Any, desc: Any, y_ptr: Any, xs: Any, ws: Any, bias: Any, residual: Any, *more: Any):
            first_row, first_col, end, width, _, _, activation, halves, *_ = more
            self._finish(torch.cat(blocks, 1), stored, y, bias, first_row, first_col, end, width, activation, halves)

        kernel = self._source(gl, finish_tile)
        kernel["clear_unused"] = lambda y_ptr, groups, width, vector: self._clear(y, stored, groups, program, programs)
        part = given | {"y_ptr": SimpleNamespace(dtype=SimpleNamespace(element_ty=0))}
        for name in ("bounds_ptr", "bias_ptr", "x_scale_ptr", "w_scale_ptr"):
            if given.get(name) is not None:
                part[name] = Pointer(given[name])
        for name in ("x_desc", "w_desc"):
            base, shape = given[name].base, given[name].block_shape
            part[name] = SimpleNamespace(
                base=base, block_shape=shape, block_type=SimpleNamespace(shape=list(shape)), layout=None,
                dtype=SimpleNamespace(primitive_bitwidth=8 * base.element_size()),
            )  # fmt: skip
        kernel[self.kernel](**part)

    def _source(self, gl: Any, finish_tile: Any) -> dict[str, Any]:
        """The kernel's module on what is played, and on the sources that it shares with others."""
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda bar, count: bar.init(count), wait=lambda bar, parity: bar.wait(parity),
            expect=lambda bar, size: bar.expect(size), arrive=lambda bar, count, pred: bar.arrive(count, pred=pred),
        )  # fmt: skip

        def release(bar: Any, pred: Any = True) -> None:
            bar.arrive(pred=pred)

        def load_box(desc: Any, at: list[int], bar: Any, buf: Buffers) -> None:
            buf.memory.copy_(box(desc, at))
            bar.landed(buf.memory.numel() * desc.base.element_size())

        def multiply(x: Buffers, w: Buffers, acc: Tensor, use_acc: Any, is_async: bool) -> Tensor:
            product = x.memory @ w.memory
            return acc + product if use_acc else product

        products: dict[str, Any] = {
            "gl": gl, "warpgroup_mma": multiply, "column_blocks": lambda acc, count: acc.chunk(count, 1),
            "warpgroup_mma_wait": lambda n, deps: deps[0] if len(deps) == 1 else deps,
        }  # fmt: skip
        shared = replayed(ring, gl=gl, mbarrier=mbarrier, release=release) | products
        shared |= {"mbarrier": mbarrier, "load_box": load_box, "finish_tile": finish_tile, "viewed": self._viewed}
        shared["new_ring"] = self._sound(shared["new_ring"])
        shared["Groups"] = replayed(groups, gl=gl)["Groups"]
        shared["place_of"] = replayed(sm90_kernel, gl=gl)["place_of"]
        shared["sum_piece"] = replayed(sm90_mainloop, release=release, fence_async_shared=None, **products)["sum_piece"]
        shared["_sum_piece"] = replayed(block_kernel, **products)["_sum_piece"]
        if self.module is not grouped_kernel:
            shared["load_groups"] = replayed(grouped_kernel, **shared)["load_groups"]
        return replayed(self.module, **shared)

    def _sound(self, new_ring: Any) -> Any:
        """The ring; with break_it "readers" one that waits for a reader less than there are."""
        return (lambda stages, readers: new_ring(stages, max(1, readers - 1))) if self.break_it == "readers" else new_ring

    @staticmethod
    def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        return Barriers(shape[0]) if shape[1:] == [1] else Buffers(torch.full(shape, torch.nan).double(), dtype)

    @staticmethod
    def _viewed(bufs: Buffers, dtype: Any, shape: list[int], layout: Any) -> Buffers:
        return Buffers(bufs.memory.view(shape), dtype)

    def _finish(
        self, acc: Tensor, stored: Tensor, y: Tensor, bias: Any, first_row: int, first_col: int, end: int, width: int,
        activation: str, halves: int,
    ) -> None:  # fmt: skip
        each = acc.shape[1] // halves
        cols = torch.cat([torch.arange(first_col, first_col + each) + half * width for half in range(halves)])
        inside = (torch.arange(first_col, first_col + each) < width).repeat(halves)
        if bias is not None:
            values = bias.base.flatten().double()[bias.at + cols.clamp(max=width * halves - 1)]
            acc = acc + values
        out = grouped_activated(acc, {"silu": "silu_mul", "gelu": "gelu_mul"}[activation] if halves == 2 else activation)
        rows = max(0, min(acc.shape[0], end - first_row))
        out = out[:rows, inside[:each]]
        flat, count = y.flatten(0, -2), stored.flatten(0, -2)
        flat[first_row : first_row + rows, first_col : first_col + out.shape[1]] = out.to(y.dtype)
        count[first_row : first_row + rows, first_col : first_col + out.shape[1]] += 1

    @staticmethod
    def _clear(y: Tensor, stored: Tensor, groups: Any, program: int, programs: int) -> None:
        for group in range(0 if groups.MASKED else groups.X - 1, groups.X):
            first, end = groups.unused(group)
            for row in range(first + program, end, programs):
                y.flatten(0, -2)[row] = 0.0
                stored.flatten(0, -2)[row] += 1


CASES = {
    "even": {"X": 3, "M": 384, "N": 256, "K": 128},
    "ragged": {"X": 5, "M": 391, "N": 264, "K": 200, "skew": "random"},
    "one expert": {"X": 4, "M": 300, "N": 136, "K": 72, "skew": "one"},
    "tail": {"X": 2, "M": 301, "N": 128, "K": 64, "skew": "tail", "bias": True},
    "gated": {"X": 3, "M": 150, "N": 304, "K": 136, "skew": "random", "bias": True, "activation": "silu_mul"},
    "masked": {"X": 3, "M": 420, "N": 128, "K": 72, "layout": "masked", "bias": True, "activation": "gelu_mul"},
    "n major": {"X": 3, "M": 200, "N": 136, "K": 128, "w_major": "n", "skew": "random"},
    "gathered": {"X": 6, "M": 160, "N": 128, "K": 64, "chosen": 4, "skew": "random"},
}


def play(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], args: tuple[Any, ...], played: Played
) -> tuple[Tensor, Tensor]:
    """(y, how often each element was written)."""
    held: list[Tensor] = []
    empty = sm90.empty_grouped

    def poisoned(*given: Any) -> Tensor:
        held.append(empty(*given).fill_(torch.nan))
        played.stored = torch.zeros(held[0].shape, dtype=torch.int32)
        return held[0]

    monkeypatch.setattr(sm90, "empty_grouped", poisoned)
    monkeypatch.setattr(sm90, "card_of", lambda x: H100)
    monkeypatch.setattr(sm90, "grouped_sm90_kernel", played)
    y = GROUPED_SM90.launch(config, *args)
    return y, played.stored


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile", [(128, 256, "m"), (128, 128, "tiles"), (64, 256, "n")], ids=str)
def test_every_tile_once(case: str, tile: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert grouped_linear_op.make is not None
    args = grouped_linear_op.make(Inputs(seed=3), **CASES[case])
    config: dict[str, Any] = dict(zip(("BLOCK_M", "BLOCK_N", "CONSUMERS"), tile, strict=True))
    y, stored = play(monkeypatch, config, args, Played())
    assert (stored == 1).all(), f"{int((stored != 1).sum())} elements are not written once"
    want = grouped_linear_op.reference(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))
    assert (y.double() - want).square().mean() <= 4e-3**2 * want.square().mean()


@pytest.mark.parametrize("case", ["ragged", "tail", "gated", "masked"])
@pytest.mark.parametrize("tile", [(128, 256), (128, 128), (64, 128)], ids=str)
def test_float8_with_scales(case: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of `grouped_block_scaled_linear`: the scales of the right rows, and of the right expert's weight."""
    op, dims, config = grouped_block_scaled_linear_op, dict(CASES[case]), {"BLOCK_M": tile[0], "BLOCK_N": tile[1]}
    assert op.make is not None
    impl = next(impl for impl in op.impls if impl.name == "sm90")
    args = op.make(Inputs(seed=3), **dims | ({"N": 512} if "activation" in dims else {}))
    if "activation" in dims and tile[0] == 64:
        assert "two epilogue blocks wide" in str(impl.space.refusal(H100, op.problem(*args), config))
        return
    played, empty = Played("", block_kernel_grouped, "grouped_block_sm90_kernel"), block_scaled._empty

    def poisoned(*given: Any) -> Tensor:
        y = empty(*given).fill_(torch.nan)
        played.stored = torch.zeros(y.shape, dtype=torch.int32)
        return y

    monkeypatch.setattr(block_scaled, "_empty", poisoned)
    monkeypatch.setattr(block_scaled_sm90, "card_of", lambda x: H100)
    monkeypatch.setattr(block_scaled_sm90, "grouped_block_sm90_kernel", played)
    y = impl.launch(config, *args)
    assert (played.stored == 1).all(), f"{int((played.stored != 1).sum())} elements are not written once"
    want = op.reference(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))
    assert (y.double() - want).square().mean() <= 4e-3**2 * want.square().mean()


def test_a_ring_that_waits_for_one_reader_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage of the reader that falls behind is overwritten, or a round has an arrival too many."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 2.0)
    args = grouped_linear_op.make(Inputs(seed=3), X=2, M=256, N=256, K=1024)  # pyright: ignore[reportOptionalCall]
    want = grouped_linear_op.reference(*args).double()
    config: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 256, "CONSUMERS": "m"}
    try:
        y, _ = play(monkeypatch, config, args, Played("readers"))
    except AssertionError:
        return
    assert (y.double() - want).square().mean() > 4e-3**2 * want.square().mean()


def test_a_step_too_few_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits for a stage nobody fills is told from one that works."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 2.0)
    args = grouped_linear_op.make(Inputs(seed=3), X=2, M=64, N=128, K=64)  # pyright: ignore[reportOptionalCall]

    class Short(Played):
        def program(self, program: int, programs: int, given: dict[str, Any]) -> None:
            super().program(program, programs, given | {"BLOCK_K": 32})  # half of the bytes that a box brings

    with pytest.raises((Stuck, AssertionError, RuntimeError)):
        play(monkeypatch, {"BLOCK_M": 64, "BLOCK_N": 128, "CONSUMERS": "n"}, args, Short())
