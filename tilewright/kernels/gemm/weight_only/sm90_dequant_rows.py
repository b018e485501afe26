"""Conversion of int4 weight rows to 16 bits inside the kernel that multiplies by them (sm90_kernel.py).

The unit of this work is an item of ITEM rows. W = (code - zero) * scale is computed in float32 and rounded once; the bits are
those that dequant_then_gemm.py writes. Codes are in the order of int4_layout.py: in a chunk of 128, word 4 t + c contains
columns 32 c + 8 i + 2 t + j. A thread loads the words of one t and converts them in registers. Then groups of four threads
exchange t for i through shared memory, so that each thread has 8 neighbouring columns.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from tilewright.kernels.device.dequant import minus, widen
from tilewright.kernels.hopper.producer_rows import say_done

__all__ = ["ITEM", "write_item"]

ITEM = gl.constexpr(4)
"""The number of rows of an item: one per warp."""


@constexpr_function
def _eights(cols: int) -> gl.DistributedLinearLayout:
    """[4, cols] with one row per warp: each thread has groups of eight neighbouring columns, four threads cover 32 columns."""
    further = [[0, 1024 << bit] for bit in range((cols // 1024).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], *further],
        lane_bases=[[0, 8], [0, 16], [0, 128], [0, 256], [0, 512]], warp_bases=[[1, 0], [2, 0]], block_bases=[],
        shape=[4, cols],
    )  # fmt: skip


@gluon.jit
def _in_order(x, COLS: gl.constexpr):
    """[ITEM, COLS / 32, c, 2 i + j], whose second index is 4 * chunk + t, as [ITEM, COLS] in the order of columns."""
    apart = x.reshape([ITEM, COLS // 128, 4, 4, 4, 2])
    layout: gl.constexpr = _eights(COLS)
    return gl.convert_layout(apart.permute([0, 1, 3, 4, 2, 5]).reshape([ITEM, COLS]), layout)


@gluon.jit
def write_item(
    source, counters_ptr, item, N, K, GROUP: gl.constexpr, COLS: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Write ITEM rows of a weight [N, K], COLS columns at a time, and count them as done. VECTOR divides K.

    source: a tuple of the codes as int32 words [N, 16 * ceil(K / 128)], scales and zeros (or None) [N, K / GROUP] rounded up,
    the memory for W (dense), and the row strides of words and of scales.
    """
    words_ptr, scale_ptr, zero_ptr, w_ptr, words_stride, scale_stride = source
    K = K // VECTOR * VECTOR  # does not change K, but tells the compiler that VECTOR divides it
    CHUNKS: gl.constexpr = COLS // 128
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    lines: gl.constexpr = gl.SliceLayout(2, layout)
    row = gl.expand_dims(gl.expand_dims(item * ITEM + gl.arange(0, ITEM, layout=gl.SliceLayout(1, lines)), 1), 2)
    line = gl.expand_dims(gl.expand_dims(gl.arange(0, CHUNKS * 4, layout=gl.SliceLayout(0, lines)), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)
    like = gl.zeros([1], w_ptr.dtype.element_ty, gl.BlockedLayout([1], [32], [4], [0]))
    words_ptrs = words_ptr + row.to(gl.int64) * words_stride + line * 4 + c
    for k in range(0, K, COLS):
        here = (row < N) & (line // 4 * 128 < K - k) & (c < 4)  # memory has whole chunks; c < 4 only gives the mask its shape
        words = gl.load(words_ptrs + k // 8, mask=here, other=0)
        x = _in_order(widen(words, minus(gl.zeros_like(words), like), "int4", like), COLS)
        rows = item * ITEM + gl.arange(0, ITEM, layout=gl.SliceLayout(1, x.type.layout))
        groups = x.to(gl.float32).reshape([ITEM, COLS // GROUP, GROUP])
        place: gl.constexpr = gl.SliceLayout(2, groups.type.layout)
        at_row = gl.expand_dims(item * ITEM + gl.arange(0, ITEM, layout=gl.SliceLayout(1, place)), 1)
        at = k // GROUP + gl.expand_dims(gl.arange(0, COLS // GROUP, layout=gl.SliceLayout(0, place)), 0)
        held = (at_row < N) & (at * GROUP < K)
        places = at_row.to(gl.int64) * scale_stride + at
        scale = gl.load(scale_ptr + places, mask=held, other=0.0)
        zero = 8.0
        if zero_ptr is not None:
            zero = gl.expand_dims(gl.load(zero_ptr + places, mask=held, other=0).to(gl.float32), 2)
        made = ((groups - zero) * gl.expand_dims(scale, 2)).to(w_ptr.dtype.element_ty).reshape([ITEM, COLS])
        final: gl.constexpr = x.type.layout
        made = gl.convert_layout(made, final, assert_trivial=True)
        cols = k + gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, final)), 0)
        down = gl.expand_dims(rows, 1)
        gl.store(w_ptr + down.to(gl.int64) * K + cols, made, mask=(down < N) & (cols < K))
    say_done(counters_ptr, item * ITEM, gl.minimum(ITEM, N - item * ITEM))
