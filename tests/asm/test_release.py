"""Who gives a slot of a ring back waits for all warps of its group first: read from the PTX of the Triton that is installed.

`mbarrier.arrive` is one thread's. A warp that still reads the slot while another one's thread gives it back would read what is
written there next. Triton's own analysis knows of reads of shared memory alone, not of those of global memory (`hopper.take`).
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewright.asm.compile import CompileFailed, record
from tilewright.bench.dims import parse_dims
from tilewright.bench.peers import default_shapes
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.hopper.primitives import hand_out, release, take
from tilewright.op import Args, Impl, Inputs, Op
from tilewright.ops import ALL

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")

# `$L__tmp7:` marks a line of the source, `$L__BB0_7:` a block. Neither a product nor the wait for it is a read that an arrival
# could overtake: they complete for four warps together. An atomic addition to global memory reads no slot.
_MEETS = re.compile(r"(bar|barrier(\.cta)?)\.(warp\.)?sync\b")
_ARRIVES = re.compile(r"mbarrier\.arrive\.(?!expect_tx)")
_BETWEEN = re.compile(r"\b(ld|ldmatrix|st|stmatrix|cp|mbarrier)\b|^\$L__BB\w+:")


def alone(ptx: str) -> list[str]:
    """What stands between an arrival and the barrier before it, for each arrival that a read may follow into."""
    found, since = [], ["no barrier before it"]
    for line in (line.strip() for line in ptx.splitlines()):
        if _MEETS.search(line):
            since = []
        elif _ARRIVES.search(line) and "cp.async" not in line:
            if since:
                found.append(f"{line} after {since[-1]}")
            since.append(line)
        elif _BETWEEN.search(line):
            since.append(line)
    return found


ARRIVE = "@%p6 mbarrier.arrive.shared::cta.b64 _, [%r15];"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"bar.sync 0, 128;\nadd.s32 %r1, %r2, %r3;\n{ARRIVE}", 0),
        (f"barrier.sync 1, 128;\n{ARRIVE}", 0),
        (f"bar.sync 0, 128;\n$L__tmp7:\n{ARRIVE}", 0),
        (f"bar.warp.sync -1;\n{ARRIVE}", 0),
        (f"bar.sync 0, 128;\nld.volatile.global.b32 {{ %r20 }}, [ %rd3 + 0 ];\n{ARRIVE}", 1),
        (f"bar.sync 0, 128;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r23}}, [%r5];\n{ARRIVE}", 1),
        (f"bar.sync 0, 128;\n$L__BB0_13:\n{ARRIVE}", 1),
        (f"bar.sync 0, 128;\n{ARRIVE}\n{ARRIVE}", 1),
        (ARRIVE, 1),
        ("@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4096;", 0),
    ],
)
def test_the_reader_of_ptx(text: str, count: int) -> None:
    assert len(alone(text)) == count


@gluon.jit
def _hands(slots_ptr, full, empty, tiles):
    for n in range(tiles):
        hand_out(n, (n, n), n, slots_ptr, full, empty, 4)


@gluon.jit
def _takes(slots_ptr, out_ptr, full, empty, buf, done, tiles):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout=layout)
    total = at * 0
    for n in range(tiles):
        tile, place = take(n, slots_ptr, full, empty, 4, 2)
        total += tile + place[0] + place[1] + buf.load(layout)
        release(done)
        total += gl.load(slots_ptr + 9, volatile=True)
        release(done, pred=n > 0)
    gl.store(out_ptr + at, total)


@gluon.jit
def _probe_kernel(slots_ptr, out_ptr, tiles):
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    buf = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(done, count=1)
    fence_async_shared()
    takes = (slots_ptr, out_ptr, full, empty, buf, done, tiles)
    gl.warp_specialize([(_takes, takes), (_hands, (slots_ptr, full, empty, tiles))], [1], [24])


def test_four_warps_meet_before_one_thread_arrives() -> None:
    source = GluonASTSource(_probe_kernel, {"slots_ptr": "*i32", "out_ptr": "*i32", "tiles": "i32"}, {})
    ptx: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert len(_ARRIVES.findall(ptx)) == 4, "one of the hand that gives, three of the group that takes"
    assert alone(ptx) == []


def kernels() -> Iterator[Any]:
    for op in ALL:
        of_hopper = (impl for impl in op.impls if 90 in (impl.min_arch, impl.written_for))
        yield from (pytest.param(op, impl, id=f"{op.name}-{impl.name}") for impl in of_hopper)


def arguments(op: Op) -> Iterator[Args]:
    yield from (example.make(Inputs()) for example in op.examples)
    if op.make is not None:
        shapes = (parse_dims(op, shape.split()) for shape in default_shapes(op.name))
        yield from (op.make(Inputs("meta"), **shape) for shape in shapes)


@pytest.mark.long
@pytest.mark.parametrize(("op", "impl"), tuple(kernels()))
def test_all_hopper_kernels(op: Op, impl: Impl) -> None:
    """With the first problem that the implementation takes: of the op's examples, then of its bench."""
    card = CARD_OF_ARCH[90]
    for args in arguments(op):
        problem = op.problem(*args)
        if impl.refusal(card, problem) is not None:
            continue
        try:
            binaries = record(impl, impl.space.default(card, problem), args, 90)
        except CompileFailed as error:
            pytest.skip(str(error))
        found = {binary.kernel: alone(binary.ptx) for binary in binaries}
        assert not any(found.values()), found
        return
    pytest.skip("no example of the op and no problem of its bench is for this implementation")
