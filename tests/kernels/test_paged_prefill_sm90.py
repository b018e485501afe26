"""Hopper's paged kernel for prompts without a card: its own source, each group of warps a thread (gluon_threads.py).

Every row is written once with the right numbers, nobody waits for ever, and no stage is written while it is read: by two groups
of warps that multiply, and by one where each sequence has one query. The arithmetic of a group is torch's. On a card,
conformance runs the kernel itself.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import gluon_threads
from tests.kernels.gluon_threads import Barriers, Buffers, Pointer, Stuck, Whole, language, replayed, together
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.attention import sm90_kernel
from tilewright.kernels.attention.paged import prefill_sm90, prefill_sm90_kernel
from tilewright.kernels.attention.paged.attention import _example, paged_attention_op
from tilewright.kernels.hopper import primitives, ring
from tilewright.op import Inputs

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the run without the interpreter has it, and no kernel is needed")
"""A head is one panel of a box: two would have to be joined in memory."""


class Values(Tensor):
    """Numbers of a group of warps."""

    type: Any = SimpleNamespace(layout=None)


def zeros(shape: list[int], dtype: Any = None, layout: Any = None) -> Values:
    return torch.zeros(shape, dtype=torch.float64).as_subclass(Values)


def memory(pointer: Pointer) -> Tensor:
    return pointer.base.flatten()


def box(desc: Any, at: list[int]) -> Tensor:
    """What the copy engine brings: zeros where a box lies outside."""
    held = torch.zeros(desc.block_shape, dtype=torch.float64)
    part = desc.base[tuple(slice(a, a + high) for a, high in zip(at, desc.block_shape, strict=True))].double()
    held[tuple(slice(size) for size in part.shape)] = part
    return held


def masked(s: Tensor, n: int, row: int, offset: int, k_len: int, window: Any, right: bool, left: bool, pack: int) -> Tensor:
    cols, own = int(n) * s.shape[1] + torch.arange(s.shape[1]), (int(row) + torch.arange(s.shape[0]))[:, None] // pack + offset
    seen = (cols < k_len) & ((cols <= own) if right else True) & ((cols >= own - window[0]) if left else True)
    return s.masked_fill(~seen, -torch.inf)


def exponentials(s: Tensor, m: Tensor, scale: float, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    high = torch.maximum(m, s.amax(1))
    base = high.masked_fill(high == -torch.inf, 0.0)
    return torch.exp2((s - base[:, None]) * scale), high, torch.exp2((m - base) * scale)


def clear_end(buf: Buffers, rows: int, across: int) -> None:
    buf.memory[rows:] = 0.0


class Played:
    """In the kernel's place: runs its source for each program."""

    def __init__(self, programs: int, stages: int | None = None) -> None:
        self.programs, self.stages, self.consumers = programs, stages, list[int]()
        self.out, self.stored = torch.zeros(0), torch.zeros(0)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, num_warps: int, maxnreg: int = 0, **constants: Any) -> None:
            given = dict(zip(prefill_sm90_kernel.paged_varlen_sm90_kernel.arg_names, args, strict=False)) | constants
            self.consumers.append(constants["CONSUMERS"])
            constants["STAGES"] = self.stages or constants["STAGES"]
            self.out = given["out_ptr"]
            self.stored = torch.zeros(self.out.shape[:2])
            for name, value in given.items():
                if isinstance(value, Tensor):
                    given[name] = Pointer(value)
                elif hasattr(value, "block_shape"):
                    shape = list(value.block_shape)
                    given[name] = SimpleNamespace(
                        base=value.base, block_shape=shape, block_type=SimpleNamespace(shape=shape), layout=None, dtype=None
                    )
            for program in range(min(grid[0], self.programs)):
                self._source(program, min(grid[0], self.programs))["paged_varlen_sm90_kernel"](**given)

        return launch

    def _source(self, program: int, programs: int) -> dict[str, Any]:
        """The kernel's module on what is played, and on the sources that it shares with others."""

        def specialise(parts: Any, warps: Any, registers: Any) -> None:
            together([partial(function, *given) for function, given in parts])

        gl = language(
            program_id=lambda axis: Whole(program), num_programs=lambda axis: programs, load=self._load, store=self._store,
            atomic_add=self._add, barrier=None, warp_specialize=specialise, allocate_shared_memory=self._allocate, zeros=zeros,
            NVMMASharedLayout=lambda **given: None,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda bar, count: bar.init(count), wait=lambda bar, parity: bar.wait(parity),
            expect=lambda bar, size: bar.expect(size), arrive=lambda bar, count, pred: bar.arrive(count, pred=pred),
        )  # fmt: skip
        tma = SimpleNamespace(async_load=None, async_store=None, store_wait=lambda pendings: None)
        names: dict[str, Any] = {"gl": gl, "mbarrier": mbarrier, "tma": tma}
        played = {
            "release": lambda bar, pred=True: bar.arrive(pred=pred), "fence_async_shared": lambda: None, "clear_end": clear_end,
            "row_parts": lambda p: p.sum(1, keepdim=True), "scaled_rows": lambda x, alpha: x * alpha[:, None],
            "load_box": self._load_box, "barriers": self._barriers(replayed(ring, **names, release=None)["barriers"]),
            "PLACE": 10, "SLOT": 16, "ROWS": 64, "PANEL": 64, "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": lambda n, deps: deps[0] if len(deps) == 1 else deps,
        }  # fmt: skip
        shared = replayed(primitives, **names, triton=SimpleNamespace(__version__="3.6.0"))
        played |= {name: shared[name] for name in ("hand_out", "next_tile", "take")}
        shared |= {"block_barrier": lambda: None, "release": played["release"]}
        attention = replayed(sm90_kernel, **names, **played)
        attention |= {
            "_masked": masked, "_exponentials": exponentials, "_as_operand": lambda p, o, dtype: p, "_finish": self._finish,
            "_floor": lambda sinks, head, scale, layout, pack: zeros([64]) - torch.inf,
        }  # fmt: skip
        joined = {"boxes_joined": lambda boxes, count, n, d: Buffers(boxes.memory.view(count, n, d), boxes.dtype)}
        return replayed(prefill_sm90_kernel, **names, **played, **joined, attend=attention["attend"], page_rows=self._page_rows)

    def _barriers(self, made: Any) -> Any:
        return made

    @staticmethod
    def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        return Barriers(shape[0]) if shape[1:] == [1] else Buffers(torch.full(shape, torch.nan).double(), dtype)

    @staticmethod
    def _load(pointer: Pointer, volatile: bool = False) -> Whole:
        return Whole(memory(pointer)[pointer.at].item())

    @staticmethod
    def _store(pointer: Pointer, value: Any) -> None:
        memory(pointer)[pointer.at] = int(value)

    @staticmethod
    def _add(pointer: Pointer, value: int) -> int:
        before = int(memory(pointer)[pointer.at])
        memory(pointer)[pointer.at] += value
        return before

    @staticmethod
    def _load_box(desc: Any, at: list[int], bar: Any, buf: Buffers) -> None:
        buf.memory.copy_(box(desc, at).view(buf.memory.shape))
        bar.landed(buf.memory.numel() * 2)

    @staticmethod
    def _multiply(a: Any, b: Buffers, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
        product = (a.memory if isinstance(a, Buffers) else a) @ b.memory
        return (acc + product if use_acc else product).as_subclass(Values)

    @staticmethod
    def _page_rows(table: Pointer, key: int, k_len: int, g: int, G: int, S: int, step: int, count: int) -> list[int]:
        keys = range(key, key + count * step, step)
        return [(int(memory(table)[table.at + n // S]) * G + g) * S + n % S if n < k_len else 1 << 30 for n in keys]

    def _finish(
        self, o: Tensor, m: Tensor, parts: Tensor, buf: Any, out: Any, row: int, head: int, begin: int, count: int, *more: Any
    ) -> None:  # fmt: skip
        pack, weight = more[-1], parts.sum(1)
        found = torch.where(weight[:, None] == 0, 0.0, o / weight[:, None])
        for i in range(max(0, min(64, count * pack - row))):
            place = begin + (row + i) // pack, head * pack + (row + i) % pack
            self.out[place] = found[i].to(self.out.dtype)
            self.stored[place] += 1


def play(
    monkeypatch: pytest.MonkeyPatch, played: Played, lengths: tuple[tuple[int, int], ...], *, heads: tuple[int, int] = (4, 2),
    page_size: int = 16, window: int | None = None, overlap: int = 0, consumers: int = 1,
) -> None:  # fmt: skip
    """Run the launcher with the kernel played, and check what it returns."""
    made = _example("", lengths, heads, 64, page_size, window).make(Inputs(seed=5))
    args: list[Any] = [torch.nan_to_num(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in made]
    monkeypatch.setattr(prefill_sm90, "paged_varlen_sm90_kernel", played)
    monkeypatch.setattr(prefill_sm90, "card_of", lambda x: CARD_OF_ARCH[90])
    launch: Any = prefill_sm90._launch
    found = launch({"OVERLAP": overlap, "CONSUMERS": consumers}, *args)
    assert (played.stored == 1).all(), "a row is missing, or written twice"
    torch.testing.assert_close(found.double(), paged_attention_op.reference(*args).double(), rtol=0.02, atol=0.01)


DECODE = ((1, 700), (1, 5), (1, 128), (1, 129), (1, 1), (1, 300), (1, 64))
PROMPTS = ((127, 127), (33, 130), (0, 20), (1, 129), (1, 1), (31, 257), (64, 64), (1, 300))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("lengths", "consumers", "options"),
    [
        (DECODE, 1, {}),
        (DECODE, 1, {"heads": (8, 1), "page_size": 64}),
        (DECODE, 1, {"heads": (6, 2), "window": 150, "page_size": 32}),
        (DECODE[:1], 1, {"heads": (2, 2), "page_size": 128}),
        (DECODE, 2, {}),
        (PROMPTS, 2, {}),
        (PROMPTS, 2, {"heads": (8, 1), "window": 50, "page_size": 32}),
    ],
)
@pytest.mark.parametrize("programs", [1, 3])
def test_each_row_is_right(
    monkeypatch: pytest.MonkeyPatch, lengths: Any, consumers: int, options: dict[str, Any], overlap: int, programs: int
) -> None:  # fmt: skip
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    played = Played(programs)
    play(monkeypatch, played, lengths, overlap=overlap, consumers=consumers, **options)
    assert played.consumers == [consumers]


@pytest.mark.parametrize("overlap", [0, 1])
def test_one_stage_is_enough(monkeypatch: pytest.MonkeyPatch, overlap: int) -> None:
    """As with one consumer and heads of 128. (These are two boxes wide, which is not emulated.)"""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    play(monkeypatch, Played(2, stages=1), DECODE, overlap=overlap)


def test_a_wait_without_an_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group where the barriers count two: nobody gives the stages back."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 1.0)

    class Waiting(Played):
        def _barriers(self, made: Any) -> Any:
            return lambda count, arrivals: made(count, arrivals + (arrivals > 1))

    with pytest.raises(Stuck):
        play(monkeypatch, Waiting(1), DECODE)
