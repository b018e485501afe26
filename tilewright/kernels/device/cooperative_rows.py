"""Cooperative rows: several programs share a row, and each keeps its part in registers until the row's sums are known.

Without this, a row that is too wide for the registers of an SM is read twice. Both reads are from memory if L2 cannot hold 132
such rows (multi_pass_rows.py). Here a group of programs processes the row. Each program reads its part once, writes the sums of
its part to memory, waits for the others, and continues with the part in its registers. So the row is read from memory once and
written once, whatever its width.

**Why there is no deadlock.** When a program starts, it draws a ticket, which gives it a group and a place in the group; groups
are filled one after the other. The groups below the first incomplete group are complete, so they finish. The incomplete group
itself has fewer waiting members than a complete one. So if the card has room for one whole group, there is room for its next
member. No cooperative (grid-wide) launch is needed, and two such kernels may run at the same time.

The bits do not depend on the order in which programs start, because sums are added in the order of the parts. Each call needs
its own counters, which must be zero. Triton's interpreter runs one program after the other, so it cannot run these kernels.
No launchers.

**Rows that start anywhere**, such as rows of 50257 columns, are counted from the multiple of 8 columns before their start.
Loads and stores are 16 bytes wide where all 8 columns belong to the row; up to 14 columns at its ends are accessed one by one.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import rows_of

__all__ = ["PART_BYTES", "SPLIT_SPACE", "draw", "edges", "lead_of", "meet", "mine", "packed", "places", "start_of", "starts"]

# The size of a program's part of a row: half of the registers of its threads. A part consists of slabs of BLOCK columns. The
# slabs are processed one by one, so that only a small piece of the part is in float32 at a time.
PART_BYTES = 65536
SPLIT_SPACE = row_space(lambda device, problem: {"BLOCK": 2048, "num_warps": 8}, BLOCK=(2048,), num_warps=(8,))


@triton.jit
def draw(counters_ptr):
    """This program's place: 0, 1, 2, ... in the order in which programs start."""
    return tl.atomic_add(counters_ptr, 1, sem="relaxed")


@triton.jit
def meet(counter_ptr, MEMBERS: tl.constexpr):
    """Wait until MEMBERS programs have arrived. Then each sees what the others wrote before; it must be loaded with `.cg`."""
    tl.debug_barrier()  # only one thread does the release below; the writes of all threads must precede it
    came = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while came < MEMBERS:
        came = tl.atomic_add(counter_ptr, 0, sem="acquire")


@triton.jit
def packed(x):
    """x unchanged, hidden from the compiler if it has 16 bits. Otherwise float32 copies would be kept: twice the registers."""
    if x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


def starts(*tensors: Tensor) -> str:
    """Where the rows of all these tensors start; the value of a kernel's STARTS.

    "eights": at multiples of 8 columns. "lead": anywhere, but at the same positions in all tensors, because rows are dense and
    the tensors start at multiples of 16 bytes. "anywhere": all other cases.
    """
    cols, strides = tensors[0].shape[-1], [rows_of(t)[1] for t in tensors]
    if all(stride % 8 == 0 for stride in strides):
        return "eights"
    alike = all(stride == cols for stride in strides) and all(t.data_ptr() % 16 == 0 for t in tensors)
    return "lead" if alike else "anywhere"


@triton.jit
def lead_of(row, D: tl.constexpr, STARTS: tl.constexpr):
    """For "lead": the number of columns from the multiple of 8 before a row's start to the start. Otherwise 0."""
    return (row * D % 8).to(tl.int32) if STARTS == "lead" else 0


@triton.jit
def start_of(row, stride, lead, STARTS: tl.constexpr):
    """The position from which a row's columns are counted: its start, or the multiple of 8 before it."""
    if STARTS == "lead":
        return tl.multiple_of(row * stride - lead, 8)
    elif STARTS == "eights":
        return row * (stride // 8) * 8  # written as a multiple of 8, so that the compiler knows it
    else:
        return row * stride


@triton.jit
def mine(lane, cols, end, lead, D: tl.constexpr, LEAD: tl.constexpr):
    """A mask of the columns before `end` that belong to the row.

    lane: the first column of each group of 8. cols: all columns. If D % 8 is 0, or with LEAD, the mask is per group, so it
    splits no load. With LEAD it contains only groups that lie completely inside the row; `edges` gives the others.
    """
    if LEAD:
        return (lane < end) & (lane >= lead) & (lane + 8 <= D + lead)
    elif D % 8 == 0:
        return lane < tl.minimum(end, D)
    else:
        return (lane < end) & (cols < D)


@triton.jit
def edges(part, lead, D: tl.constexpr):
    """(columns [16], mask): the columns at a row's ends that are not in complete groups of 8. The first part handles them."""
    at = tl.arange(0, 16)
    cols = tl.where(at < 8, at, (D + lead) // 8 * 8 + at - 8)
    whole = (cols // 8 * 8 >= lead) & (cols // 8 * 8 + 8 <= D + lead)
    return cols, (part == 0) & (cols >= lead) & (cols < D + lead) & (whole == 0)


@triton.jit
def places(part, slab, lead, D: tl.constexpr, WIDTH: tl.constexpr, LEAD: tl.constexpr, BLOCK: tl.constexpr):
    """(columns, mask) of a slab of a part. Columns are counted from `start_of`; the mask is that of `mine`."""
    lane = part * WIDTH + slab * BLOCK + tl.arange(0, BLOCK // 8)[:, None] * 8
    cols = lane + tl.arange(0, 8)[None, :]
    return cols, mine(lane, cols, (part + 1) * WIDTH, lead, D, LEAD)
