"""The readers of TTGIR, PTX and SASS on hand-written text: each kind of line that they know, and what they must leave alone."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tilewright.asm.compile import Binary
from tilewright.asm.facts import Facts, counts, instruction_mix
from tilewright.asm.judge import Partition, kinds, partitions, warnings
from tilewright.asm.layouts import Layouts, types_in, words
from tilewright.asm.memory import Access, Conflict, Copy, Memory, memory
from tilewright.asm.program import Program

# ---- PTX

PTX = [
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};", {"mma": 1}),
    ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 1;", {"wgmma": 1}),
    ("wgmma.wait_group.sync.aligned 0;", {}),
    ("tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p1;", {"tcgen05": 1}),
    ("tcgen05.wait::ld.sync.aligned;", {}),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];",
        {"tma_loads": 1},
    ),
    ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];", {"tma_stores": 1}),
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {%r1, %r2}], [%r3];", {"tma_stores": 1}),
    ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", {"loads": {16: 1}}),
    ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 4;", {"loads": {4: 1}}),
    ("cp.async.commit_group;", {}),
    ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", {"loads": {16: 1}}),
    ("ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];", {"loads": {16: 1}}),
    ("ld.global.v8.b32 { %r1 }, [ %rd1 + 0 ];", {"loads": {32: 1}}),
    ("ld.relaxed.gpu.global.b16 { %rs1 }, [ %rd1 + 0 ];", {"loads": {2: 1}}),
    ("ld.global.b32 %r1, [%rd1];\nld.global.v2.b32 {%r1, %r2}, [%rd1];\nld.global.b32 %r1, [%rd1];", {"loads": {8: 1, 4: 2}}),
    ("ld.shared.v4.b32 {%r1}, [%r2];", {}),
    ("ld.param.b64 %rd1, [f_param_0];", {}),
    ("st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };", {"stores": {16: 1}}),
    ("st.global.b8 [ %rd1 + 0 ], { %rs1 };", {"stores": {1: 1}}),
    ("st.shared.b32 [%r1], %r2;", {}),
    ("atom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 + 0 ], %r2;", {}),
]


@pytest.mark.parametrize(("text", "expected"), PTX, ids=[text.split(" ")[0][:40] for text, _ in PTX])
def test_ptx(text: str, expected: dict[str, Any]) -> None:
    found = {name: count for name, count in counts(text).items() if count}
    assert found == expected
    assert list(found.get("loads", {})) == list(expected.get("loads", {})), "widest first"


# ---- SASS

SASS = """
.text.f:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   UTMALDG.2D [UR8], [UR4], desc[UR10] ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0060*/                   STL.64 [R1+0x8], R2 ;
        /*0070*/                   LDSM.16.M88.4 R4, [R5] ;
        /*0080*/                   IMAD.WIDE R2, R3, 0x4, R4 ;
        /*0090*/                   FADD R1, R2, R3 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   MYSTERY ;
"""


def test_sass() -> None:
    assert instruction_mix(SASS)["LDG.E.128"] == 2
    assert next(iter(instruction_mix(SASS))) == "LDG.E.128", "most frequent first"
    assert kinds(SASS) == {
        "wgmma": 1, "TMA load": 1, "cp.async": 1, "global load": 2, "ldmatrix": 1, "local store": 1,
        "float": 1, "integer": 1, "branch": 1, "other": 2,
    }  # fmt: skip


# ---- TTGIR

HEAD = """
#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1], order = [1, 0]}>
#column = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [32, 1], warpsPerCTA = [1, 4], order = [0, 1]}>
#mma2 = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 2], instrShape = [16, 8]}>
#mma3 = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>
#line = #ttg.linear<{register = [[0, 1]], lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], warp = [[8, 0], [16, 0]], block = []}>
#plain = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [1, 0]}>
#wide = #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 1, order = [1, 0]}>
#swizzled = #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>
#pairs = #ttg.swizzled_shared<{vec = 8, perPhase = 2, maxPhase = 4, order = [1, 0]}>
#nvmma = #ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>
#turned = #ttg.nvmma_shared<{swizzlingByteWidth = 64, transposed = true, elementBitWidth = 16}>
#flat = #ttg.nvmma_shared<{swizzlingByteWidth = 0, transposed = false, elementBitWidth = 16}>
#bar = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>
#smem = #ttg.shared_memory
#tmem = #ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = 1>
module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, ttg.target = "cuda:90", "ttg.threads-per-warp" = 32 : i32} {
"""  # noqa: E501


def binary(body: str, arch: int = 90, ptx: str = "") -> Binary:
    return Binary(
        kernel="f", arch=arch, key="", constants={}, warps=4, stages=3, shared_bytes=0, tmem_columns=0, blocks=1,
        ttgir=f"{HEAD}  tt.func public @f(%x: !tt.ptr<f32>) {{\n{body}\n  }}\n}}\n", ptx=ptx, cubin=b"",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("tensor<64x64xf32, #blocked>", "blocked: a thread holds 1x8 neighbours, a warp is 4x8 threads, the block 4x1 warps, "),
        ("tensor<64x64xf32, #column>", "blocked: a thread holds one element, .* dimension 0 fastest"),
        ("tensor<64xf32, #ttg.slice<{dim = 1, parent = #blocked}>>", "a vector, dimension 1 taken out of a layout: blocked: "),
        ("tensor<64x64xf32, #mma2>", r"accumulator \(mma.sync, a warp at a time\): 16x8 .* stand 2x2"),
        ("tensor<64x64xf32, #mma3>", r"accumulator \(wgmma, four warps at a time\): 16x64 .* stand 4x1"),
        ("tensor<64x64xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma2, kWidth = 2}>>", "left operand .* 2 neighbours along K"),
        ("tensor<64x64xbf16, #ttg.dot_op<{opIdx = 1, parent = #mma2, kWidth = 2}>>", "right operand"),
        ("tensor<32x8xf32, #line>", "linear: .* 2 elements a thread, 32 lanes, 4 warps; .* lanes by .0, 2."),
        ("!ttg.memdesc<64x64xbf16, #nvmma, #smem, mutable>", "as tensor cores and TMA read it: .* over 128 bytes$"),
        ("!ttg.memdesc<64x64xbf16, #turned, #smem, mutable>", "swizzled over 64 bytes, read transposed"),
        ("!ttg.memdesc<64x64xbf16, #flat, #smem, mutable>", "not swizzled"),
        ("!ttg.memdesc<64x64xf32, #plain, #smem, mutable>", "rows as they are"),
        ("!ttg.memdesc<64x64xbf16, #pairs, #smem>", "swizzled: groups of 8 .* every 2 rows, 4 patterns"),
        ("!ttg.memdesc<128x64xf32, #tmem, #ttng.tensor_memory, mutable>", "tensor memory: an accumulator of 128x64"),
    ],
)  # fmt: skip
def test_layouts_in_words(kind: str, sentence: str) -> None:
    layouts = Layouts(binary("").ttgir, 90)
    (found,) = types_in(kind)
    assert re.search(sentence, words(layouts.of(found)))


def test_types() -> None:
    text = (
        "%b = ttg.memdesc_index %a[%i] : !ttg.memdesc<3x64x16xbf16, #pairs, #smem, mutable> -> "
        "!ttg.memdesc<64x16xbf16, #pairs, #smem, mutable, 3x64x64> : tensor<8x!tt.ptr<f8E4M3FN>, #blocked>"
    )
    whole, part, pointers = types_in(text)
    assert (whole.shape, whole.element, whole.shared, whole.allocated) == ((3, 64, 16), "bf16", True, (3, 64, 16))
    assert (part.shape, part.allocated) == ((64, 16), (64, 64))
    assert (pointers.shape, pointers.element_bits, pointers.shared) == ((8,), 8, False)
    assert types_in("!tt.tensordesc<tensor<64x64xbf16, #nvmma>>") != []  # what it describes is a tensor
    assert types_in("tensor<!tt.tensordesc<tensor<64x64xbf16>>>")[0].shape == (64, 64)


@pytest.mark.parametrize(
    ("buffer", "trips"),
    [
        # Rows of 128 bytes: eight of them start at the same bank, unless each is turned by another 16 bytes.
        ("64x64xbf16, #wide, #smem, mutable", 7),
        ("64x64xbf16, #swizzled, #smem, mutable", 0),
        # Rows of 64 bytes: two fill the banks.
        ("64x32xbf16, #wide, #smem, mutable", 3),
        ("64x32xbf16, #pairs, #smem, mutable", 0),
        # Turned in pairs, rows of 128 bytes meet in pairs.
        ("64x64xbf16, #pairs, #smem, mutable", 1),
        # Rows of 16 bytes lie side by side.
        ("64x8xbf16, #wide, #smem, mutable", 0),
        # A part of a buffer has the rows of the whole.
        ("64x16xbf16, #wide, #smem, mutable, 64x64", 7),
        ("4x64xbf16, #wide, #smem, mutable", 3),
        ("64x64xbf16, #nvmma, #smem, mutable", 0),
        ("64x64xbf16, #flat, #smem, mutable", None),
        ("64x64xbf16, #plain, #smem, mutable", None),
    ],
)
def test_ldmatrix_conflicts(buffer: str, trips: int | None) -> None:
    layouts = Layouts(binary("").ttgir, 80)
    (found,) = types_in(f"!ttg.memdesc<{buffer}>")
    assert layouts.matrix_conflicts(found) == trips


STEPS = [
    ("%v = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32, #blocked>", (1,)),
    ("%v = arith.muli %i, %c3 : tensor<8xi32, #blocked>", (3,)),
    ("%v = arith.muli %c3, %i : tensor<8xi32, #blocked>", (3,)),
    ("%v = arith.muli %i, %n : tensor<8xi32, #blocked>", (None,)),
    ("%v = arith.muli %i, %i : tensor<8xi32, #blocked>", (None,)),
    ("%v = arith.addi %i, %n : tensor<8xi32, #blocked>", (1,)),
    ("%v = arith.subi %n, %i : tensor<8xi32, #blocked>", (-1,)),
    ("%v = arith.extsi %i : tensor<8xi32, #blocked> to tensor<8xi64, #blocked>", (1,)),
    ("%v = arith.divsi %i, %c3 : tensor<8xi32, #blocked>", (None,)),
    ("%v = arith.divsi %n, %c3 : tensor<8xi32, #blocked>", ()),
    ("%v = tt.load %p : tensor<8x!tt.ptr<i32>, #blocked>", (None,)),
    ("%v = tt.addptr %p, %i : tensor<8x!tt.ptr<i32>, #blocked>, tensor<8xi32, #blocked>", (2,)),
    ("%v = tt.expand_dims %i {axis = 0 : i32} : tensor<8xi32, #s> -> tensor<1x8xi32, #blocked>", (0, 1)),
    ("%v = tt.expand_dims %i {axis = 1 : i32} : tensor<8xi32, #s> -> tensor<8x1xi32, #blocked>", (1, 0)),
    ("%v = tt.broadcast %e : tensor<8x1xi32, #blocked> -> tensor<8x4xi32, #blocked>", (1, 0)),
    ("%v = tt.trans %e {order = array<i32: 1, 0>} : tensor<8x1xi32, #blocked> -> tensor<1x8xi32, #column>", (0, 1)),
    ("%v = ttg.convert_layout %i : tensor<8xi32, #blocked> -> tensor<8xi32, #column>", (1,)),
]


@pytest.mark.parametrize(("line", "steps"), STEPS, ids=[line.split("= ")[1].split(" :")[0] for line, _ in STEPS])
def test_steps_of_addresses(line: str, steps: Any) -> None:
    program = Program(
        f"""
    %c3 = arith.constant dense<3> : tensor<8xi32, #blocked>
    %n = tt.splat %arg : i32 -> tensor<8xi32, #blocked>
    %i = tt.make_range {{end = 8 : i32, start = 0 : i32}} : tensor<8xi32, #blocked>
    %e = tt.expand_dims %i {{axis = 1 : i32}} : tensor<8xi32, #s> -> tensor<8x1xi32, #blocked>
    %base = tt.splat %x : !tt.ptr<i32> -> tensor<8x!tt.ptr<i32>, #blocked>
    %p = tt.addptr %base, %i : tensor<8x!tt.ptr<i32>, #blocked>, tensor<8xi32, #blocked>
    {line}
    tt.store %p, %v : tensor<8x!tt.ptr<i32>, #blocked>"""
    )
    (store,) = program.named("tt.store")
    assert store.steps == ((1,), steps)


def test_pointers_that_a_loop_carries_and_what_stands_in_a_loop() -> None:
    program = Program(
        """
    %i = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32, #blocked>
    %r:2 = scf.for %k = %a to %b step %c iter_args(%p = %i, %sum = %z) -> (tensor<8xi32>, f32)  : i32 {
      %x = tt.load %p : tensor<8x!tt.ptr<i32>, #blocked>
    }
    tt.store %r#0, %x : tensor<8x!tt.ptr<i32>, #blocked>"""
    )
    (load,), (store,) = program.named("tt.load"), program.named("tt.store")
    assert (load.steps[0], load.looped) == ((1,), True)
    assert (store.steps[0], store.looped) == ((1,), False)


def test_names_are_used_again_in_the_next_region() -> None:
    """MLIR numbers values anew in each branch: a value is what was made last under its name."""
    program = Program(
        """
    scf.if %c {
      %1 = tt.make_range {end = 32 : i32, start = 0 : i32} : tensor<32xi32, #blocked>
      tt.store %1, %x : tensor<32x!tt.ptr<f32>, #blocked>
    } else {
      %1 = arith.muli %a, %b : tensor<32xi32, #blocked>
      tt.store %1, %x : tensor<32x!tt.ptr<f32>, #blocked>
    }"""
    )
    assert [line.steps[0] for line in program.named("tt.store")] == [(1,), ()]


TMA_RING = """
    %x_bufs = ttg.local_alloc : () -> !ttg.memdesc<8x64x64xbf16, #nvmma, #smem, mutable>
    %w_bufs = ttg.local_alloc : () -> !ttg.memdesc<4x64x32xbf16, #turned, #smem, mutable>
    %y_bufs = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16, #nvmma, #smem, mutable>
    %full = ttg.local_alloc : () -> !ttg.memdesc<4x1xi64, #bar, #smem, mutable>
    %turns = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #bar, #smem, mutable>
    %0 = ttg.memdesc_index %full[%c0] : !ttg.memdesc<4x1xi64, #bar, #smem, mutable> -> !ttg.memdesc<1xi64, #bar, #smem, mutable>
    %1 = ttg.memdesc_index %turns[%c0] : !ttg.memdesc<2x1xi64, #bar, #smem, mutable> -> !ttg.memdesc<1xi64, #bar, #smem, mutable>
    ttg.warp_specialize(%x_bufs) attributes {requestedRegisters = array<i32: 240, 24>}
    default {
      scf.for %k = %a to %b step %c  : i32 {
        %2 = ttg.memdesc_index %x_bufs[%k] : !ttg.memdesc<8x64x64xbf16, #nvmma, #smem, mutable> -> !ttg.memdesc<64x64xbf16, #nvmma, #smem, mutable>
        %3 = ttg.memdesc_index %w_bufs[%k] : !ttg.memdesc<4x64x32xbf16, #turned, #smem, mutable> -> !ttg.memdesc<64x32xbf16, #turned, #smem, mutable>
        ttng.async_tma_copy_global_to_local %d[%k, %k] %2, %0, %p : !tt.tensordesc<tensor<64x64xbf16, #nvmma>>, !ttg.memdesc<1xi64, #bar, #smem, mutable> -> !ttg.memdesc<64x64xbf16, #nvmma, #smem, mutable>
      }
      %4 = ttg.memdesc_index %y_bufs[%c0] : !ttg.memdesc<2x64x64xbf16, #nvmma, #smem, mutable> -> !ttg.memdesc<64x64xbf16, #nvmma, #smem, mutable>
      ttng.async_tma_copy_local_to_global %y[%k, %k] %4 : !tt.tensordesc<tensor<64x64xbf16, #nvmma>>, !ttg.memdesc<64x64xbf16, #nvmma, #smem, mutable>
      ttg.warp_yield
    }
    partition0(%arg0: !ttg.memdesc<8x64x64xbf16, #nvmma, #smem, mutable>) num_warps(4) {
      ttg.warp_return
    }
    partition1(%arg0: !ttg.memdesc<8x64x64xbf16, #nvmma, #smem, mutable>) num_warps(1) {
      ttg.warp_return
    } : (!ttg.memdesc<8x64x64xbf16, #nvmma, #smem, mutable>) -> ()"""  # noqa: E501


def test_a_ring_that_tma_fills() -> None:
    """Four barriers are four stages, of two boxes of x each; the buffers of the epilogue are no ring of the loop."""
    found = memory(binary(TMA_RING))
    assert (found.pipeline_depth, found.buffers) == (4, ("8 x 64x64 bf16", "4 x 64x32 bf16"))
    layout = "shared memory as tensor cores and TMA read it: rows of 16-bit elements, swizzled over 128 bytes"
    assert found.copies == (
        Copy(op="load", tile="64x64 bf16", tile_bytes=8192, layout=layout, looped=True),
        Copy(op="store", tile="64x64 bf16", tile_bytes=8192, layout=layout, looped=False),
    )
    assert found.accesses == found.conflicts == ()


def testpartitions() -> None:
    assert partitions(TMA_RING) == (Partition(warps=4, registers=240), Partition(warps=1, registers=24))
    unasked = TMA_RING.replace("attributes {requestedRegisters = array<i32: 240, 24>}", "")
    assert partitions(unasked) == (Partition(warps=4, registers=None), Partition(warps=1, registers=None))
    assert partitions("") == ()


CP_ASYNC = """
    %i = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32, #ttg.slice<{dim = 0, parent = #blocked}>>
    %e = tt.expand_dims %i {axis = 0 : i32} : tensor<64xi32, #ttg.slice<{dim = 0, parent = #blocked}>> -> tensor<1x64xi32, #blocked>
    %b = tt.broadcast %e : tensor<1x64xi32, #blocked> -> tensor<64x64xi32, #blocked>
    %s = tt.splat %x : !tt.ptr<bf16> -> tensor<64x64x!tt.ptr<bf16>, #blocked>
    %p = tt.addptr %s, %b : tensor<64x64x!tt.ptr<bf16>, #blocked>, tensor<64x64xi32, #blocked>
    %buf = ttg.local_alloc : () -> !ttg.memdesc<3x64x64xbf16, #swizzled, #smem, mutable>
    scf.for %k = %a to %b step %c  : i32 {
      %0 = ttg.memdesc_index %buf[%k] : !ttg.memdesc<3x64x64xbf16, #swizzled, #smem, mutable> -> !ttg.memdesc<64x64xbf16, #swizzled, #smem, mutable>
      %1 = ttg.async_copy_global_to_local %p, %0 {contiguity = 4 : i32} : tensor<64x64x!tt.ptr<bf16>, #blocked> -> <64x64xbf16, #swizzled, #smem, mutable>
      %2 = ttg.async_wait %1 {num = 2 : i32}
      %3 = ttg.local_load %0 token %2 : !ttg.memdesc<64x64xbf16, #swizzled, #smem, mutable> -> tensor<64x64xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma2, kWidth = 2}>>
      %4 = ttg.local_load %0 : !ttg.memdesc<64x64xbf16, #swizzled, #smem, mutable> -> tensor<64x64xbf16, #column>
    }
    %5 = ttg.async_wait {num = 0 : i32}"""  # noqa: E501


def test_a_ring_that_threads_fill() -> None:
    found = memory(binary(CP_ASYNC, arch=80, ptx="ldmatrix.sync"))
    assert (found.pipeline_depth, found.buffers, found.copies_in_flight) == (3, ("3 x 64x64 bf16",), 2)
    (access,) = found.accesses
    # Eight elements a thread by the layout, of which the compiler could prove four; all rows are the same.
    assert (access.op, access.thread_bytes, access.looped, access.exact) == ("copy to shared memory", 8, True, True)
    told = [(c.op, c.extra_trips) for c in found.conflicts]
    assert told[0][0] == "copy"
    assert told[1] == ("ldmatrix", 0)
    assert told[2][0] == "read"
    assert told[2][1] is not None
    # Without ldmatrix in the code the same load is one by ld.shared.
    assert memory(binary(CP_ASYNC, arch=80)).conflicts[1].op == "read"


# ---- judgement

FACTS = Facts(
    kernel="f", warps=4, registers=128, spill_bytes=0, local_bytes=0, shared_bytes=0, tmem_columns=0, mma=0, wgmma=8,
    wgmma_serialised=False, tcgen05=0, tma_loads=0, tma_stores=0, loads={}, stores={}, blocks_per_sm=4, limiter="registers",
)  # fmt: skip
SEEN = Memory(accesses=(), copies=(), conflicts=(), pipeline_depth=3, buffers=(), copies_in_flight=None, layouts={})
FAR = Access(
    op="load", value="x", tile="64 f32", thread_bytes=4, sectors=32, least_sectors=4, exact=True, layout="", looped=True
)
MET = Conflict(op="read", tile="32x32 f32", extra_trips=31, registers="", shared="", looped=True)


@pytest.mark.parametrize(
    ("facts", "seen", "words"),
    [
        ({}, {}, None),
        ({"spill_bytes": 8}, {}, "spills 8 bytes of registers a thread"),
        ({"blocks_per_sm": 0}, {}, "does not fit on an SM: 128 registers, 4 warps"),
        ({"wgmma_serialised": True}, {}, "ptxas serialises wgmma"),
        ({"wgmma": 0, "mma": 4}, {}, "uses mma where sm_90 has wgmma"),
        ({}, {"accesses": (FAR,)}, r"load of x \(64 f32\): a warp asks for 32 sectors where 4 would do"),
        ({}, {"accesses": (replace(FAR, looped=False),)}, None),
        ({}, {"accesses": (replace(FAR, exact=False),)}, None),
        ({}, {"conflicts": (MET,)}, "read of shared memory, 32x32 f32: 31 extra trips per access"),
        ({}, {"conflicts": (replace(MET, extra_trips=None),)}, None),
        ({}, {"pipeline_depth": 0}, "num_stages is 3, but no loop is pipelined"),
        ({"wgmma": 0}, {"pipeline_depth": 0}, None),
    ],
)
def test_warnings(facts: dict[str, Any], seen: dict[str, Any], words: str | None) -> None:
    found = list(warnings(binary(""), replace(FACTS, **facts), replace(SEEN, **seen)))
    assert len(found) == (words is not None)
    assert words is None or re.search(words, found[0])
