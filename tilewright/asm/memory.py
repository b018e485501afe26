"""How a kernel accesses memory, read from its TTGIR: coalescing, bank conflicts, and the depth of its load pipeline.

**Sectors.** The layout of a tensor of pointers says which elements the 32 threads of a warp access in one instruction; the
address arithmetic (`tilewright.asm.program`) says how far apart they are. L2 transfers sectors of 32 bytes. An access is
coalesced if it needs no more sectors than its bytes fill. Assumptions: the tensor starts on a sector; if a stride is known only
at run time, rows are on different sectors and start on one. Not considered: masks, real alignment, indices that are loaded
(`exact` is then false), and the strides that a caller passes.

**Bank conflicts** are the additional passes beyond the minimum: for ld.shared and st.shared Triton's own count for a register
layout and a shared-memory layout, for ldmatrix by the rows that it reads at once. Not considered: wgmma, tcgen05 and TMA, and
conversions between register layouts, whose scratch layout Triton chooses later.

**Pipeline.** A loop's buffers are an allocation with an additional first dimension; its size is the depth that the compiler
made of `num_stages` (one less if the tensor cores read registers, which are a stage, too). If TMA fills them, the barriers show
the number of stages, because a stage may have several boxes. 0 means that no loop has such buffers, so loads are waited for
where they are used.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tilewright.asm.compile import Binary
from tilewright.asm.layouts import Bases, Layouts, TensorType, words
from tilewright.asm.program import Line, Program, Steps

__all__ = ["Access", "Conflict", "Copy", "Memory", "memory"]

SECTOR_BYTES = 32
LANES = 32


@dataclass(frozen=True, kw_only=True)
class Access:
    """One load, store, copy or atomic operation on global memory that threads address one by one (not TMA)."""

    op: str
    """"load", "store", "copy to shared memory" or "atomic"."""
    value: str
    """The program's name of the result, or of the stored value."""
    tile: str
    """"128x64 bf16"."""
    thread_bytes: int
    """Bytes that a thread accesses in one instruction, by the layout; masks and unknown alignment may reduce them."""
    sectors: int
    """Sectors that a warp requests in one instruction."""
    least_sectors: int
    """Sectors that its bytes fill."""
    exact: bool
    """Whether all addresses are known; otherwise `sectors` assumes that rows of unknown distance are far apart."""
    layout: str
    looped: bool

    @property
    def efficiency(self) -> float:
        """The share of the bytes in the warp's sectors that it requested."""
        return self.least_sectors / self.sectors


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """One access of registers to shared memory."""

    op: str
    """"read", "ldmatrix", "write" or "copy"."""
    tile: str
    extra_trips: int | None
    """Extra trips of one instruction of a warp, beyond the minimum; None if unknown."""
    registers: str
    shared: str
    looped: bool


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One copy by the copy engine (TMA)."""

    op: str
    """"load", "store", "reduce", "gather" or "scatter"."""
    tile: str
    tile_bytes: int
    layout: str
    looped: bool


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Facts about memory from the TTGIR of a kernel."""

    accesses: tuple[Access, ...]
    copies: tuple[Copy, ...]
    conflicts: tuple[Conflict, ...]
    pipeline_depth: int
    """Stages that the deepest pipelined loop fills in turn; 0 if no loop is pipelined."""
    buffers: tuple[str, ...]
    """The buffers of all loops: "4 x 128x64 bf16"."""
    copies_in_flight: int | None
    """Groups of cp.async that the loop leaves unfinished when it waits; None without cp.async (TMA waits on barriers)."""
    layouts: dict[str, str]
    """TTGIR's name of each layout of a tensor in memory or in a product -> its description."""


def memory(binary: Binary) -> Memory:
    """Analyse one binary, in about 50 ms. The result is empty for a kernel whose TTGIR is unknown."""
    program, layouts = Program(binary.ttgir), Layouts(binary.ttgir, binary.arch)
    depth, buffers = _pipeline(program)
    waits = [int(n) for line in program.named("ttg.async_wait") if line.looped for n in re.findall(r"num = (\d+)", line.text)]
    widest = 32 if binary.arch >= 100 else 16
    return Memory(
        accesses=tuple(_unique(_accesses(program, layouts, widest))),
        copies=tuple(_unique(_copies(program, layouts))),
        conflicts=tuple(_unique(_conflicts(program, layouts, "ldmatrix" in binary.ptx))),
        pipeline_depth=depth,
        buffers=buffers,
        copies_in_flight=max(waits, default=None),
        layouts=_described(program, layouts),
    )


def _unique(found: Iterator[Any]) -> Iterator[Any]:
    """The items without repetitions: the first iterations of a pipelined loop are repeated literally before it."""
    return iter(dict.fromkeys(found))


# ---- global memory

_GLOBAL = {
    "tt.load": "load",
    "tt.store": "store",
    "ttg.async_copy_global_to_local": "copy to shared memory",
    "tt.atomic_rmw": "atomic",
    "tt.atomic_cas": "atomic",
}


def _accesses(program: Program, layouts: Layouts, widest: int) -> Iterator[Access]:
    for line in program.named(*_GLOBAL):
        pointers = next((kind for kind in line.types if "!tt.ptr" in kind.element), None)
        bases = layouts.bases(pointers) if pointers else None
        if pointers is None or bases is None:
            continue  # one number for the whole block
        found = line.steps[0]
        steps = found or (None if found is None else 0,) * len(pointers.shape)
        bytes_each = max(1, pointers.element_bits // 8)
        vector = _vector(bases, steps, max(1, widest // bytes_each))
        if told := re.search(r"contiguity = (\d+)", line.text):
            vector = min(vector, int(told[1]))  # the contiguity that the compiler could prove, by alignment and mask
        sectors, least = _sectors(bases, steps, vector, bytes_each)
        yield Access(
            op=_GLOBAL[line.name],
            value=_name(line),
            tile=_tile(pointers),
            thread_bytes=vector * bytes_each,
            sectors=sectors,
            least_sectors=least,
            exact=None not in steps,
            layout=words(layouts.of(pointers)),
            looped=line.looped,
        )


def _vector(bases: Bases, steps: Steps, most: int) -> int:
    """The number of elements that are adjacent both in memory and in one thread's registers."""
    count = 1
    for basis in bases.register:
        if count >= most or _distance(basis, steps) != count:
            break
        count *= 2
    return count


def _distance(coordinates: Sequence[int], steps: Steps) -> int | None:
    """The distance of this element from the first, in elements; None if it depends on an unknown step."""
    total = 0
    for at, step in zip(coordinates, steps, strict=True):
        if at and step is None:
            return None
        total += at * (step or 0)
    return total


def _sectors(bases: Bases, steps: Steps, vector: int, bytes_each: int) -> tuple[int, int]:
    """(sectors asked for, sectors filled) by one instruction of a warp."""
    touched, asked = set(), set()
    for lane in range(LANES):
        at = [0] * len(steps)
        for bit, basis in enumerate(bases.lane):
            if lane >> bit & 1:
                at = [a ^ b for a, b in zip(at, basis, strict=True)]
        # Coordinates with an unknown step identify a row; two rows share no sector.
        row = tuple(a for a, step in zip(at, steps, strict=True) if step is None)
        start = sum(a * step for a, step in zip(at, steps, strict=True) if step is not None) * bytes_each
        for byte in range(start, start + vector * bytes_each):
            touched.add((row, byte // SECTOR_BYTES))
            asked.add((row, byte))
    return len(touched), -(-len(asked) // SECTOR_BYTES)


# ---- the copy engine

_TMA = {
    "ttng.async_tma_copy_global_to_local": "load",
    "ttng.async_tma_copy_local_to_global": "store",
    "ttng.async_tma_reduce": "reduce",
    "ttng.async_tma_gather": "gather",
    "ttng.async_tma_scatter": "scatter",
}


def _copies(program: Program, layouts: Layouts) -> Iterator[Copy]:
    for line in program.named(*_TMA):
        for tile in (kind for kind in line.types if kind.shared and kind.element != "i64"):
            yield Copy(
                op=_TMA[line.name],
                tile=_tile(tile),
                tile_bytes=prod(tile.shape) * tile.element_bits // 8,
                layout=words(layouts.of(tile)),
                looped=line.looped,
            )


# ---- shared memory


def _conflicts(program: Program, layouts: Layouts, ldmatrix: bool) -> Iterator[Conflict]:
    ops = {"ttg.local_load": "read", "ttg.local_store": "write", "ttg.local_alloc": "write"}
    for line in program.named(*ops, "ttg.async_copy_global_to_local"):
        buffers = [kind for kind in line.types if kind.shared and "#ttng.tensor_memory" not in kind.text]
        tensors = [kind for kind in line.types if not kind.shared and "#" in kind.text]
        if not buffers or not tensors:
            continue
        tensor, buffer = tensors[-1 if line.name == "ttg.local_load" else 0], buffers[-1]
        values = TensorType(tensor.text.replace(tensor.element, buffer.element, 1), tensor.shape, buffer.element, False)
        registers, shared = layouts.of(values), layouts.of(buffer)
        if registers is None or shared is None:
            continue
        by_matrix = ldmatrix and ("dot_op" in values.text or type(registers).__name__ == "DistributedLinearLayout")
        yield Conflict(
            op="ldmatrix" if by_matrix else ops.get(line.name, "copy"),
            tile=_tile(values),
            extra_trips=layouts.matrix_conflicts(buffer) if by_matrix else layouts.bank_conflicts(values, buffer),
            registers=words(registers),
            shared=words(shared),
            looped=line.looped,
        )


# ---- pipeline


def _pipeline(program: Program) -> tuple[int, tuple[str, ...]]:
    """(depth, the buffers that a loop fills in turn). The number of TMA's buffers is that of the barriers, or a multiple."""
    indexed = {line.operands[0] for line in program.named("ttg.memdesc_index")}
    rings = [line.types[-1] for line in program.named("ttg.local_alloc") if line.result in indexed]
    barriers = [kind.shape[0] for kind in rings if kind.element == "i64"]
    tiles = [kind for kind in rings if kind.element != "i64"]
    depth = max((kind.shape[0] for kind in tiles), default=0)
    if tiles and barriers and any(program.named("ttng.async_tma_copy_global_to_local")):
        depth = min(depth, max(barriers))
        tiles = [kind for kind in tiles if kind.shape[0] % depth == 0]
    return depth, tuple(f"{kind.shape[0]} x {'x'.join(map(str, kind.shape[1:]))} {kind.element}" for kind in tiles)


# ---- words


def _described(program: Program, layouts: Layouts) -> dict[str, str]:
    """The layouts of loaded, stored, buffered and multiplied tensors; those in address arithmetic are the same."""
    products = r"tt\.dot\w*|ttng\.(warp_group_dot|tc_gen5_mma\w*|tmem_\w+)"
    matters = re.compile(rf"tt\.(load|store|atomic\w*)|ttg\.(local_\w+|async_copy\w+)|{products}")
    found = {}
    for line in program.lines:
        if matters.fullmatch(line.name):
            for kind in line.types:
                layout = layouts.of(kind)
                if layout is not None and kind.element != "i64":
                    found.setdefault(re.split(r", #smem|, #ttng\.tensor", kind.text.partition(", ")[2])[0], words(layout))
    return found


def _name(line: Line) -> str:
    """The name of the variable in the kernel's source, if Triton kept it."""
    if line.result:
        return re.sub(r"_\d+$", "", line.result.lstrip("%"))
    return re.sub(r"_\d+$", "", line.operands[1].lstrip("%")) if len(line.operands) > 1 else ""


def _tile(kind: TensorType) -> str:
    element = kind.element.removeprefix("!tt.ptr<").removesuffix(">")
    return f"{'x'.join(map(str, kind.shape))} {element}"
