"""Rows whose parts are held by several programs at once: each keeps its part in registers until the row's sums are known.

A row that is too wide for the registers of an SM is otherwise read twice, and from memory where L2 does not hold 132 such rows
(multi_pass_rows.py). Here a group of programs takes it: each reads its part once, writes the part's sums to memory, waits for
the others, and goes on with what it holds. So memory sees one reading and one writing, whatever the width.

**Why nobody waits for ever.** Programs take their place by ticket, in the order in which they start, a group after the other.
The lowest group that is not complete has fewer waiting members than members, and the groups below it are complete and end: as
long as a card has room for one whole group, there is a place for its next member. No grid-wide launch is asked for, and two
such kernels may run beside each other.

The bits do not depend on who came first: sums are added in the order of the parts. The counters are the call's own: zeros.
Not for Triton's interpreter, which runs one program after the other. No launchers.

**Rows that start anywhere**, as those of 50257 columns do, are counted from the multiple of 8 columns before their start: loads
and stores of 16 bytes where all 8 columns are the row's; up to 14 at its ends go one by one.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import rows_of

__all__ = ["PART_BYTES", "SPLIT_SPACE", "draw", "edges", "lead_of", "meet", "mine", "packed", "places", "start_of", "starts"]

# What a program holds of a row, in slabs of BLOCK columns: half of the registers of its threads. A slab is gone through at a
# time, so that little of a part is in float32 at once.
PART_BYTES = 65536
SPLIT_SPACE = row_space(lambda device, problem: {"BLOCK": 2048, "num_warps": 8}, BLOCK=(2048,), num_warps=(8,))


@triton.jit
def draw(counters_ptr):
    """This program's place, 0 and on, in the order in which programs start."""
    return tl.atomic_add(counters_ptr, 1, sem="relaxed")


@triton.jit
def meet(counter_ptr, MEMBERS: tl.constexpr):
    """Wait until MEMBERS programs have come here; then each sees what the others wrote before they came (read it by `.cg`)."""
    tl.debug_barrier()  # the release below is one thread's: the others' writes come before it
    came = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while came < MEMBERS:
        came = tl.atomic_add(counter_ptr, 0, sem="acquire")


@triton.jit
def packed(x):
    """x again, of 16 bits, as the compiler has not seen it, or it would keep float32 copies instead: twice the registers."""
    if x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


def starts(*tensors: Tensor) -> str:
    """Where the rows of all these tensors start, told to a kernel as STARTS.

    "eights": at multiples of 8 columns; "lead": anywhere, but alike: rows are dense, and the tensors start at 16 bytes; else
    "anywhere".
    """
    cols, strides = tensors[0].shape[-1], [rows_of(t)[1] for t in tensors]
    if all(stride % 8 == 0 for stride in strides):
        return "eights"
    alike = all(stride == cols for stride in strides) and all(t.data_ptr() % 16 == 0 for t in tensors)
    return "lead" if alike else "anywhere"


@triton.jit
def lead_of(row, D: tl.constexpr, STARTS: tl.constexpr):
    """The columns between a multiple of 8 and the start of a row; 0 but for "lead"."""
    return (row * D % 8).to(tl.int32) if STARTS == "lead" else 0


@triton.jit
def start_of(row, stride, lead, STARTS: tl.constexpr):
    """Where the columns of a row are counted from: its start, or the multiple of 8 before it."""
    if STARTS == "lead":
        return tl.multiple_of(row * stride - lead, 8)
    elif STARTS == "eights":
        return row * (stride // 8) * 8  # as a product by 8, which the compiler sees
    else:
        return row * stride


@triton.jit
def mine(lane, cols, end, lead, D: tl.constexpr, LEAD: tl.constexpr):
    """Which columns before `end` a part has; of rows that start anywhere only those whose 8 neighbours are all the row's.

    lane: the first of 8 neighbouring columns, cols: each; where D % 8 is 0, or LEAD, a mask of lanes, that cuts no load in two.
    """
    if LEAD:
        return (lane < end) & (lane >= lead) & (lane + 8 <= D + lead)
    elif D % 8 == 0:
        return lane < tl.minimum(end, D)
    else:
        return (lane < end) & (cols < D)


@triton.jit
def edges(part, lead, D: tl.constexpr):
    """(columns, [16], and which of them the first part has beside `mine`): a row's ends that are no 8 neighbours."""
    at = tl.arange(0, 16)
    cols = tl.where(at < 8, at, (D + lead) // 8 * 8 + at - 8)
    whole = (cols // 8 * 8 >= lead) & (cols // 8 * 8 + 8 <= D + lead)
    return cols, (part == 0) & (cols >= lead) & (cols < D + lead) & (whole == 0)


@triton.jit
def places(part, slab, lead, D: tl.constexpr, WIDTH: tl.constexpr, LEAD: tl.constexpr, BLOCK: tl.constexpr):
    """(columns of a slab of a part, counted from where the row is, and which of them there are)."""
    lane = part * WIDTH + slab * BLOCK + tl.arange(0, BLOCK // 8)[:, None] * 8
    cols = lane + tl.arange(0, 8)[None, :]
    return cols, mine(lane, cols, (part + 1) * WIDTH, lead, D, LEAD)
