"""The epilogue of gemm/sm90_kernel.py: parts of tiles that programs share, bias, activation, residual, rounding, and the store.

A tile is processed one block of columns at a time, to keep few registers in use. Each block is a separate tensor, in the
layout of wgmma's result.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewright.kernels.device.activations import A1, A2, A3, A4, A5, RATE
from tilewright.kernels.hopper.primitives import block_barrier, store_box

__all__ = ["activate", "add_parts", "column_blocks", "finish_tile", "leave_part", "residual_blocks", "rounded"]


@gluon.jit
def column_blocks(x, COUNT: gl.constexpr):
    """Split x [M, N] into a tuple of COUNT blocks of adjacent columns, in float32. No element moves between threads."""
    blocks = (x,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for j in gl.static_range(len(blocks)):
            y = blocks[j]
            halves += y.reshape(y.shape[0], 2, y.shape[1] // 2).permute(0, 2, 1).split()
        blocks = halves
    K: gl.constexpr = x.type.layout.instr_shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, x.shape[1] // COUNT, K]
    )
    named = ()
    for j in gl.static_range(COUNT):
        named += (gl.convert_layout(blocks[j], layout, assert_trivial=True).to(gl.float32),)
    return named


# ---- parts of a tile that several programs share


@gluon.jit
def _as_line(block):
    """A block as one dimension in which each thread has four adjacent elements, for 16-byte loads. Threads exchange nothing."""
    ROWS: gl.constexpr = block.shape[0]
    COLS: gl.constexpr = block.shape[1]
    # The layout of wgmma's result: 64 rows at a time, 16 per warp. A thread has rows 8 apart and pairs of columns 8 apart.
    apart = block.reshape([ROWS // 64 * 4, 2, 8, COLS // 8, 4, 2])
    return apart.permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * COLS])


@gluon.jit
def _as_block(line, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """The inverse of `_as_line`."""
    apart = line.reshape([COLS // 8, ROWS // 64 * 4, 8, 4, 2, 2])
    block = apart.permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, COLS])
    return gl.convert_layout(block, layout, assert_trivial=True)


@gluon.jit
def _line_pointers(ptr, line):
    layout: gl.constexpr = line.type.layout
    return ptr + gl.arange(0, line.shape[0], layout=layout)


@gluon.jit
def leave_part(blocks, parts_ptr, ticket_ptr):
    """Write this program's part of a shared tile to memory, then signal it."""
    for j in gl.static_range(len(blocks)):
        line = _as_line(blocks[j])
        gl.store(_line_pointers(parts_ptr + j * line.shape[0], line), line)
    # One thread increments the counter for all, so the writes of all threads must come before.
    block_barrier()
    gl.atomic_add(ticket_ptr, 1, sem="release")


@gluon.jit
def add_parts(blocks, parts_ptr, ticket_ptr, others, PART: gl.constexpr):
    """Wait for the other programs' parts of a tile and add them in the order of K.

    There is no deadlock: a program first writes its part of the tile that it ends, then waits for parts of the one it begins.
    """
    ROWS: gl.constexpr = blocks[0].shape[0]
    COLS: gl.constexpr = blocks[0].shape[1]
    layout: gl.constexpr = blocks[0].type.layout
    while gl.atomic_add(ticket_ptr, 0, sem="acquire") < others:
        pass
    for part in range(others):
        added = ()
        for j in gl.static_range(len(blocks)):
            ptrs = _line_pointers(parts_ptr + part * PART + j * (ROWS * COLS), _as_line(blocks[j]))
            added += (blocks[j] + _as_block(gl.load(ptrs, cache_modifier=".cg"), ROWS, COLS, layout),)
        blocks = added
    gl.store(ticket_ptr, 0)
    return blocks


# ---- the end of a tile


@gluon.jit
def _reciprocal(x):
    """1 / x within 1 ulp, in one instruction; an exact division needs ten."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _power_of_two(x):
    """2^x within 2 ulp, in one instruction; without flushing subnormal numbers to zero it needs four."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _normal_cdf(x):
    """Phi(x) within 3e-7. libdevice's erf is accurate to float32's last bit, but needs many more instructions.

    The formula for the tail below -|x| is in device/activations.py.
    """
    t = _reciprocal(1.0 + RATE * gl.abs(x))
    poly = ((((A5 * t + A4) * t + A3) * t + A2) * t + A1) * t
    tail = poly * _power_of_two(x * (x * -0.7213475204))
    return gl.where(x < 0, tail, 1.0 - tail)


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == "relu":
        return gl.where(x < 0, 0.0, x)  # a NaN stays a NaN
    elif ACTIVATION == "gelu":
        return x * _normal_cdf(x)
    elif ACTIVATION == "gelu_tanh":
        return x * _reciprocal(1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        return x * _reciprocal(1.0 + gl.exp(-x))
    else:
        return x


@gluon.jit
def _add_bias(x, bias_ptr, first_col, F):
    cols = first_col + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    bias = gl.load(bias_ptr + cols, mask=cols < F, other=0.0).to(gl.float32)
    return x + gl.expand_dims(bias, 0)


@gluon.jit
def _row_scales(x_scale_ptr, first_row, M, ROW_STEP: gl.constexpr, block):
    rows = first_row + gl.arange(0, block.shape[0], layout=gl.SliceLayout(1, block.type.layout)) * ROW_STEP
    return gl.expand_dims(gl.load(x_scale_ptr + rows, mask=rows < M, other=0.0), 1)


@gluon.jit
def _scaled(x, row_scales, w_scale_ptr, first_col, F):
    cols = first_col + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    scales = gl.load(w_scale_ptr + cols, mask=cols < F, other=0.0)
    return x * row_scales * gl.expand_dims(scales, 0)


@gluon.jit
def rounded(y, inverse, dtype: gl.constexpr):
    """y in the output's dtype. With inverse, y * inverse quantised to 8 bits, saturated. A NaN becomes 0 in int8."""
    if inverse is None:
        return y.to(dtype)
    else:
        MOST: gl.constexpr = 127.0 if dtype == gl.int8 else 57344.0 if dtype == gl.float8e5 else 448.0
        y *= inverse
        held = gl.minimum(gl.maximum(y, -MOST), MOST)
        if dtype == gl.int8:
            # From 2^23 to 2^24 float32 numbers are spaced 1 apart. So the sum is rounded (ties to even); its low bits are the
            # integer.
            return (gl.where(y == y, held, 0.0) + 12582912.0).to(gl.int32, bitcast=True).to(gl.int8)
        else:
            return gl.where(y == y, held, y).to(dtype)


@gluon.jit
def _offsets(first_row, first_col, M, F, ROW_STEP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """(rows, columns, mask of those that exist) of a tile, in a layout."""
    rows = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)) * ROW_STEP, 1)
    cols = gl.expand_dims(first_col + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout)), 0)
    return rows.to(gl.int64), cols, (rows < M) & (cols < F)


@gluon.jit
def _store_lines(buf, y_ptr, y_stride, first_row, first_col, M, F, ROW_STEP: gl.constexpr, VECTOR: gl.constexpr):
    """Copy shared memory to y by ordinary stores of VECTOR elements; y need not be aligned beyond that."""
    ROWS: gl.constexpr = buf.shape[0]
    COLS: gl.constexpr = buf.shape[1]
    ACROSS: gl.constexpr = 32 if COLS // VECTOR > 32 else COLS // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    rows, cols, inside = _offsets(first_row, first_col, M, F, ROW_STEP, ROWS, COLS, layout)
    gl.store(y_ptr + rows * y_stride + cols, buf.load(layout), mask=inside)


@gluon.jit
def residual_blocks(
    residual_ptr, first_row, first_col, M, F, residual_stride,
    ROWS: gl.constexpr, COLS: gl.constexpr, COUNT: gl.constexpr, INSTRUCTION_K: gl.constexpr,
):  # fmt: skip
    """The residual of COUNT adjacent blocks of a tile, in the layout of wgmma's result."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, INSTRUCTION_K]
    )
    held = ()
    for j in gl.static_range(COUNT):
        rows, cols, inside = _offsets(first_row, first_col + j * COLS, M, F, 1, ROWS, COLS, layout)
        held += (gl.load(residual_ptr + rows * residual_stride + cols, mask=inside, other=0.0),)
    return held


@gluon.jit
def finish_tile(
    blocks, tile_bufs, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
    first_row, first_col, M, F, residual_stride,
    wg: gl.constexpr, ACTIVATION: gl.constexpr, HALVES: gl.constexpr, ROW_STEP: gl.constexpr, VECTOR: gl.constexpr,
    y_stride=None, y_scale_ptr=None, held=None,
):  # fmt: skip
    """Scales, bias, activation, residual, a single rounding, and the store; one block of columns at a time, via shared memory.

    Without y_stride, rows of y are F apart. With y_scale_ptr, the output is quantised to 8 bits. held: from `residual_blocks`.
    """
    ROWS: gl.constexpr = tile_bufs.shape[1]
    COLS: gl.constexpr = tile_bufs.shape[2]
    COUNT: gl.constexpr = len(blocks)
    OUTPUTS: gl.constexpr = COUNT // HALVES
    OWN: gl.constexpr = tile_bufs.shape[0] // 2
    BUFS: gl.constexpr = OWN if OWN < OUTPUTS else OUTPUTS  # used in turn: a tile uses each equally often
    layout: gl.constexpr = blocks[0].type.layout
    inverse = None
    if y_scale_ptr is not None:
        inverse = 1.0 / gl.load(y_scale_ptr)
    row_scales = 1.0
    if x_scale_ptr is not None:
        row_scales = _row_scales(x_scale_ptr, first_row, M, ROW_STEP, blocks[0])
    for j in gl.static_range(OUTPUTS):
        col = first_col + j * COLS
        y = blocks[j]
        if x_scale_ptr is not None:
            y = _scaled(y, row_scales, w_scale_ptr, col, F)
        if bias_ptr is not None:
            y = _add_bias(y, bias_ptr, col, F)
        y = activate(y, ACTIVATION)
        if HALVES == 2:
            up = blocks[j + COUNT // 2]
            if x_scale_ptr is not None:
                up = _scaled(up, row_scales, w_scale_ptr + F, col, F)
            if bias_ptr is not None:
                up = _add_bias(up, bias_ptr + F, col, F)
            y *= up
        if held is not None:
            y += held[j].to(gl.float32)
        elif residual_ptr is not None:
            rows, cols, inside = _offsets(first_row, col, M, F, ROW_STEP, ROWS, COLS, layout)
            y += gl.load(residual_ptr + rows * residual_stride + cols, mask=inside, other=0.0).to(gl.float32)
        buf = tile_bufs.index(wg * OWN + j % BUFS)
        if y_desc is not None:
            tma.store_wait(pendings=BUFS - 1)
            buf.store(rounded(y, inverse, y_ptr.dtype.element_ty))
            fence_async_shared()
            store_box(y_desc, [first_row, col], buf)
        else:
            buf.store(rounded(y, inverse, y_ptr.dtype.element_ty))
            _store_lines(buf, y_ptr, F if y_stride is None else y_stride, first_row, col, M, F, ROW_STEP, VECTOR)
