"""`conv` for Hopper as an implicit matrix product, scheduled by hand in Gluon: the implementation `sm90`.

    y[n, p, q, o] = activation(sum over r, s, c of x[n, p * stride + r * dilation - padding, ..., c] * weight[o, r, s, c] + ...)

x [N, H, W, C] and weight [O, KH, KW, C], channels-last; fp16, bf16, or int8 with scales. The host side is sm90.py for `conv`
and conv/transpose/sm90.py for `conv_transpose`, whose phases are convolutions too. Both share sm90_im2col.py.

The copy engine (TMA) performs the implicit im2col. The output is divided into boxes of bn x bh x bw pixels (images, rows,
columns). Each extent is a power of two, and a box has 64 or 128 pixels. For one filter position, such a box needs a box of x of
the same shape, at another place. So one load brings [pixels, channels] into shared memory in the layout that a matrix product
needs. TMA fills the elements outside of x with zeros: this implements the padding. Ragged sizes need no mask either, because
the store clips the box. With a stride of 2, one filter position reads every second pixel. So x has one descriptor per phase in
which it is read (four at most), and a filter position is a phase and a shift.

The rest is the persistent kernel of `linear` (gemm/sm90_kernel.py, whose functions are used here): a producer warp and two
consumer warpgroups, which synchronise through barriers. Where there are few tiles, several programs share a tile along K. A
step is one filter position and BLOCK_K channels. The residual is loaded through the same ring of stages, after the last step
of its tile, so the latency of its load is hidden like that of x.

The copy engine needs 4.6 cycles per pixel, whatever the pixel holds, so narrow products are limited by it (docs/log.md). Hence
a step may also be a whole column of the filter. One box with a few additional rows then serves all positions of the column, and
each position reads the box from a different row on. This requires at least eight pixels per row, because shared memory is
swizzled in units of eight; the pixels of all images of the box count.

Not here: groups, strides other than 1, 2 and 4, channels that are no multiple of 16 bytes (sm90_space_to_depth.py rewrites such
convolutions), three spatial dims.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# N images, C channels, O output channels; boxes of pixels; K = filter positions * C

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.gemm.sm90_kernel import piece_count, piece_of, place_of, with_parts
from tilewright.kernels.hopper.epilogue import activate, column_blocks, rounded
from tilewright.kernels.hopper.primitives import TRITON, load_box, release, store_box, viewed
from tilewright.kernels.hopper.ring import barriers, new_ring

__all__ = ["VIEWS_REACH_ON", "conv_sm90_kernel", "corner"]

VIEWS_REACH_ON = TRITON < (3, 8)
"""Whether a view of shared memory may extend beyond the buffer that it is taken from. Steps of whole filter columns need it."""


@gluon.jit
def _as_matrices(boxes):
    """View boxes [count, ..., columns] as [count, rows, columns]. Rows are contiguous, whatever the dims between."""
    COLS: gl.constexpr = boxes.shape[len(boxes.shape) - 1]
    dtype: gl.constexpr = boxes.dtype
    shape: gl.constexpr = [boxes.shape[0], boxes.numel // (boxes.shape[0] * COLS), COLS]
    layout: gl.constexpr = gl.NVMMASharedLayout(boxes.layout.swizzle_byte_width, dtype.primitive_bitwidth, 2)
    return viewed(boxes, dtype, shape, layout)


@gluon.jit
def _box_at(units, unit, dtype: gl.constexpr, desc):
    """View the memory from `unit` on as a box of the descriptor."""
    shape: gl.constexpr = desc.block_type.shape
    layout: gl.constexpr = desc.layout
    return viewed(units.index(unit), dtype, shape, layout)


@gluon.jit
def _matrix_at(units, unit, dtype: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, SWIZZLE: gl.constexpr):
    """View ROWS pixels from `unit` on as a matrix [ROWS, COLS]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, dtype.primitive_bitwidth, 2)
    shape: gl.constexpr = [ROWS, COLS]
    return viewed(units.index(unit), dtype, shape, layout)


@gluon.jit
def corner(box, boxes_h, boxes_w, shape: gl.constexpr):
    """(row, image, column) of the first pixel of a box. For a box beyond the last one the image does not exist."""
    row = box // boxes_w
    return row % boxes_h * shape[0], row // boxes_h * shape[1], box % boxes_w * shape[2]


# ---- producer


@gluon.jit
def _load_x(
    x_desc, x1_desc, x2_desc, x3_desc, units, unit, bar, h, n, w, c,
    STRIDE_H: gl.constexpr, STRIDE_W: gl.constexpr, PHASES: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """Load the box of x whose first pixel is (h, w). Its pixels are one stride apart; they may lie outside of x.

    With EXTRA, also load EXTRA rows below the box, through x1_desc. There is only one phase then.
    """
    dtype: gl.constexpr = x_desc.dtype
    row = h >> (STRIDE_H // 2)  # row within a phase; strides are 1, 2 or 4
    col = w >> (STRIDE_W // 2)
    box = _box_at(units, unit, dtype, x_desc)
    if len(PHASES) == 1:
        HEIGHT: gl.constexpr = x_desc.block_type.shape[0]
        load_box(x_desc, [row, n, col, c], bar, box)
        if EXTRA:
            load_box(x1_desc, [row + HEIGHT, n, col, c], bar, _box_at(units, unit + HEIGHT, dtype, x1_desc))
    else:
        phase = (h - row * STRIDE_H) * STRIDE_W + (w - col * STRIDE_W)
        if phase == PHASES[0]:
            load_box(x_desc, [row, n, col, c], bar, box)
        if phase == PHASES[1]:
            load_box(x1_desc, [row, n, col, c], bar, box)
        if len(PHASES) > 2:
            if phase == PHASES[2]:
                load_box(x2_desc, [row, n, col, c], bar, box)
        if len(PHASES) > 3:
            if phase == PHASES[3]:
                load_box(x3_desc, [row, n, col, c], bar, box)


@gluon.jit
def _load_weight(
    w_desc, w_boxes, bar, stage, col, r, s, c,
    W_MAJOR: gl.constexpr, TAPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Load the weights of a step: of the filter position (r, s), or of TAPS positions of a column, from row r on."""
    for t in gl.static_range(TAPS):
        buf = w_boxes.index(stage * TAPS + t)
        if W_MAJOR == "k":
            load_box(w_desc, [col * BLOCK_N, r + t, s, c], bar, buf)
        else:
            load_box(w_desc, [c, r + t, s, col * BLOCK_N], bar, buf)


@gluon.jit
def _load_residual(
    residual_desc, x_units, at, corners, first_col,
    UNITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load a tile of the residual, one block of columns per stage. Returns the place in the ring after it."""
    WIDTH: gl.constexpr = residual_desc.block_type.shape[3]
    M_BOXES: gl.constexpr = len(corners)
    for j in gl.static_range(BLOCK_N // WIDTH):
        bar = at.fill(BLOCK_M * WIDTH * residual_desc.dtype.primitive_bitwidth // 8)
        for b in gl.static_range(M_BOXES):
            p, n, q = corners[b]
            buf = _box_at(x_units, (at.stage * M_BOXES + b) * UNITS, residual_desc.dtype, residual_desc)
            load_box(residual_desc, [p, n, q, first_col + j * WIDTH], bar, buf)
        at = at.next()
    return at


@gluon.jit
def _load_boxes(
    x_desc, x1_desc, x2_desc, x3_desc, w_desc, residual_desc, x_units, w_boxes, ring,
    filter_h, filter_w, pad_h, pad_w, dilation_h, dilation_w, boxes_h, boxes_w, tiles_m, tiles_n, steps, waves, share,
    STRIDE_H: gl.constexpr, STRIDE_W: gl.constexpr, PHASES: gl.constexpr, W_MAJOR: gl.constexpr,
    TAPS: gl.constexpr, EXTRA: gl.constexpr, BACKWARD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    shape: gl.constexpr = x_desc.block_type.shape
    PIXELS: gl.constexpr = shape[0] * shape[1] * shape[2]
    M_BOXES: gl.constexpr = BLOCK_M // PIXELS
    UNITS: gl.constexpr = x_units.shape[0] // (STAGES * M_BOXES)
    BLOCK_K: gl.constexpr = shape[3]
    LOADED: gl.constexpr = BLOCK_M + M_BOXES * EXTRA * shape[1] * shape[2] + TAPS * BLOCK_N
    at = ring.to_fill()
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        corners = ()
        for b in gl.static_range(M_BOXES):
            corners += (corner(row * M_BOXES + b, boxes_h, boxes_w, shape),)
        chunk = first // (filter_h * filter_w)
        r = first // filter_w - chunk * filter_h
        s = first % filter_w
        for _step in range(first, end):
            bar = at.fill(LOADED * BLOCK_K * x_desc.dtype.primitive_bitwidth // 8)
            top = r * dilation_h - pad_h
            if BACKWARD:
                top -= TAPS - 1
            for b in gl.static_range(M_BOXES):
                p, n, q = corners[b]
                _load_x(
                    x_desc, x1_desc, x2_desc, x3_desc, x_units, (at.stage * M_BOXES + b) * UNITS, bar,
                    p * STRIDE_H + top, n, q * STRIDE_W + s * dilation_w - pad_w, chunk * BLOCK_K,
                    STRIDE_H, STRIDE_W, PHASES, EXTRA,
                )  # fmt: skip
            _load_weight(w_desc, w_boxes, bar, at.stage, col, r, s, chunk * BLOCK_K, W_MAJOR, TAPS, BLOCK_N)
            at = at.next()
            s += 1
            if s == filter_w:
                s = 0
                r += 1
                if r == filter_h:
                    r = 0
                    chunk += 1
        if residual_desc is not None:
            if first == 0:
                at = _load_residual(residual_desc, x_units, at, corners, col * BLOCK_N, UNITS, BLOCK_M, BLOCK_N, STAGES)


# ---- consumers


@gluon.jit
def _sum_steps(
    x_units, w_bufs, at, turns, first, end, wg: gl.constexpr, W_MAJOR: gl.constexpr, TAPS: gl.constexpr,
    BACKWARD: gl.constexpr, ROWS: gl.constexpr, M_BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One consumer's product over the steps of a piece of work, [rows, columns]. Releases each stage after its use."""
    UNITS: gl.constexpr = x_units.shape[0] // (STAGES * M_BOXES)
    dtype: gl.constexpr = x_units.dtype
    BLOCK_K: gl.constexpr = x_units.shape[4]
    COLS: gl.constexpr = w_bufs.shape[1 if W_MAJOR == "k" else 2]
    # A wgmma instruction processes 32 bytes of K. Triton supports the int8 instructions up to 224 columns.
    INTEGERS: gl.constexpr = dtype == gl.int8
    SWIZZLE: gl.constexpr = x_units.layout.swizzle_byte_width
    N: gl.constexpr = 128 if INTEGERS and COLS > 128 else COLS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 256 // dtype.primitive_bitwidth]
    )
    acc = gl.zeros([ROWS, COLS], gl.int32 if INTEGERS else gl.float32, layout)
    for step in range(first, end):
        at.wait()
        unit = (at.stage * M_BOXES + (wg if M_BOXES == 2 else 0)) * UNITS
        for t in gl.static_range(TAPS):
            x = _matrix_at(x_units, unit + (TAPS - 1 - t if BACKWARD else t), dtype, ROWS, BLOCK_K, SWIZZLE)
            w = w_bufs.index(at.stage * TAPS + t)
            if W_MAJOR == "k":
                w = w.permute((1, 0))
            started = warpgroup_mma(x, w, acc, use_acc=(step > first) | (t > 0), is_async=True)
            # One product stays in flight. So after the first product of a step, the last one of the previous step has ended,
            # and its stage may be overwritten.
            acc = warpgroup_mma_wait(1, deps=(started,))
            if t == 0:
                at.give_back_last(pred=step > first)
        at = at.next()
    if M_BOXES == 1:
        release(turns.index(1 - wg))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    at.give_back_last()
    return acc


@gluon.jit
def _image_scales(x_scale_ptr, box, N, boxes_h, boxes_w, shape: gl.constexpr, block):
    """The scale of each row, which is the scale of its image."""
    rows = gl.arange(0, block.shape[0], layout=gl.SliceLayout(1, block.type.layout))
    n = box // boxes_w // boxes_h * shape[1] + rows // shape[2] % shape[1]
    return gl.expand_dims(gl.load(x_scale_ptr + n, mask=n < N, other=0.0), 1)


@gluon.jit
def _per_channel(ptr, first_col, O, period, block):
    cols = first_col + gl.arange(0, block.shape[1], layout=gl.SliceLayout(0, block.type.layout))
    return gl.expand_dims(gl.load(ptr + cols % period, mask=cols < O, other=0.0).to(gl.float32), 0)


@gluon.jit
def _finish(
    blocks, tile_boxes, x_units, ring, residual_desc, y_desc, x_scale_ptr, w_scale_ptr, bias_ptr, passed, box, first_col,
    N, O, period, boxes_h, boxes_w, wg: gl.constexpr, M_BOXES: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Apply scales, bias, residual and activation; round once and store. One block of columns at a time, via shared memory.

    If the result is int8 (int8.py), the scale of the image is applied last.
    """
    COUNT: gl.constexpr = len(blocks)
    CODES: gl.constexpr = y_desc.dtype == gl.int8
    ROWS: gl.constexpr = blocks[0].shape[0]
    COLS: gl.constexpr = blocks[0].shape[1]
    UNITS: gl.constexpr = x_units.shape[0] // (STAGES * M_BOXES)
    OWN: gl.constexpr = tile_boxes.shape[0] // 2
    BUFS: gl.constexpr = OWN if OWN < COUNT else COUNT  # used in turn: a tile uses each buffer equally often
    box_shape: gl.constexpr = y_desc.block_type.shape
    # A residual's boxes are as wide as y's.
    SWIZZLE: gl.constexpr = y_desc.layout.swizzle_byte_width
    tile_bufs = _as_matrices(tile_boxes)
    p, n, q = corner(box, boxes_h, boxes_w, box_shape)
    for j in gl.static_range(COUNT):
        y = blocks[j]
        if x_scale_ptr is not None:
            y = y * _per_channel(w_scale_ptr, first_col + j * COLS, O, O, y)
            if not CODES:
                y = y * _image_scales(x_scale_ptr, box, N, boxes_h, boxes_w, box_shape, y)
        if bias_ptr is not None:
            y += _per_channel(bias_ptr, first_col + j * COLS, O, period, y)
        if residual_desc is not None:
            at = ring.after(passed + j)
            at.wait()
            residual = _matrix_at(x_units, (at.stage * M_BOXES + wg) * UNITS, residual_desc.dtype, ROWS, COLS, SWIZZLE)
            y += residual.load(y.type.layout).to(gl.float32)
            at.give_back()
        y = activate(y, ACTIVATION)
        if CODES:
            y = rounded(y, _image_scales(x_scale_ptr, box, N, boxes_h, boxes_w, box_shape, y), y_desc.dtype)
        else:
            y = y.to(y_desc.dtype)
        tma.store_wait(pendings=BUFS - 1)
        tile_bufs.index(wg * OWN + j % BUFS).store(y)
        fence_async_shared()
        store_box(y_desc, [p, n, q, first_col + j * COLS], tile_boxes.index(wg * OWN + j % BUFS))


@gluon.jit
def _multiply_boxes(
    x_units, w_boxes, tile_boxes, ring, turns,
    residual_desc, y_desc, x_scale_ptr, w_scale_ptr, bias_ptr, parts_ptr, tickets_ptr,
    N, O, period, boxes_h, boxes_w, tiles_m, tiles_n, steps, waves, share, PARTS,
    wg: gl.constexpr, W_MAJOR: gl.constexpr, TAPS: gl.constexpr, BACKWARD: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STREAM: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    y_shape: gl.constexpr = y_desc.block_type.shape
    ROWS: gl.constexpr = y_shape[0] * y_shape[1] * y_shape[2]
    M_BOXES: gl.constexpr = BLOCK_M // ROWS
    TURNS: gl.constexpr = 1 if M_BOXES == 2 else 2
    FIRST: gl.constexpr = 0 if M_BOXES == 2 else wg
    w_bufs = _as_matrices(w_boxes)
    WIDTH: gl.constexpr = tile_boxes.shape[4]
    passed = steps * FIRST  # stages that the producer filled before this piece, including those for the other consumer
    for i in range(FIRST, piece_count(tiles_m * tiles_n, waves, share, steps, STREAM), TURNS):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        if TURNS == 2:
            # The parity of a barrier distinguishes only its last two rounds. So begin only when the other consumer has seen its
            # whole tile arrive.
            mbarrier.wait(turns.index(wg), (i // 2 + 1 - wg) & 1)
        acc = _sum_steps(
            x_units, w_bufs, ring.after(passed), turns, first, end, wg, W_MAJOR, TAPS, BACKWARD, ROWS, M_BOXES, STAGES
        )
        passed += (end - first) * TURNS
        blocks = column_blocks(acc, BLOCK_N // WIDTH)
        if STREAM:
            if end - first < steps:
                left = tile - waves * gl.num_programs(0)
                blocks = with_parts(blocks, parts_ptr, tickets_ptr, left, first, share, steps, PARTS, wg, ROWS * BLOCK_N)
        if first == 0:
            box = row * M_BOXES + (wg if M_BOXES == 2 else 0)
            _finish(
                blocks, tile_boxes, x_units, ring, residual_desc, y_desc, x_scale_ptr, w_scale_ptr, bias_ptr,
                passed, box, col * BLOCK_N, N, O, period, boxes_h, boxes_w, wg, M_BOXES, STAGES, ACTIVATION,
            )  # fmt: skip
            if residual_desc is not None:
                passed += BLOCK_N // WIDTH
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=[
        "N", "period", "filter_h", "filter_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "boxes", "boxes_h", "boxes_w",
        "steps", "waves", "share", "PARTS",
    ]
)  # fmt: skip
def conv_sm90_kernel(
    x_desc, x1_desc, x2_desc, x3_desc, w_desc, residual_desc, y_desc,
    x_scale_ptr, w_scale_ptr, bias_ptr, parts_ptr, tickets_ptr,
    N, O, period, filter_h, filter_w, pad_h, pad_w, dilation_h, dilation_w, boxes, boxes_h, boxes_w, steps, waves, share, PARTS,
    STRIDE_H: gl.constexpr, STRIDE_W: gl.constexpr, PHASES: gl.constexpr, W_MAJOR: gl.constexpr, TAPS: gl.constexpr,
    EXTRA: gl.constexpr, BACKWARD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, TILE_BUFS: gl.constexpr,
    STREAM: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Launch on at most as many programs as there are SMs, with num_warps=4 (warp specialisation adds the other warps).

    A consumer's box of x is [rows, images, columns, BLOCK_K]. Two boxes make a tile, one per consumer; or, if a box has BLOCK_M
    pixels, the consumers take turns at whole tiles. w_desc: [O, KH, KW, C] with W_MAJOR "k", [C, KH, KW, O] with "n". x_desc to
    x3_desc: one per entry of PHASES, the others None; a phase has the number row * STRIDE_W + column. filter_h, filter_w: size
    of the filter; each position is a step. boxes, boxes_h, boxes_w: number of boxes of pixels: in total, down an image, across
    an image. Padding and dilation may be negative. The bias repeats after `period` columns. waves, share, PARTS: as in
    gemm/sm90_kernel.py.

    With TAPS above 1, a step is a column of the filter with TAPS positions, and the stride is 1. EXTRA rows below a box are
    loaded with it, through x1_desc, and each position reads the box from one row further down. The number of pixels in a row of
    a box, over all its images, is then a multiple of eight. filter_h is 1; dilation_h is 1, or -1 with BACKWARD.
    """
    x_shape: gl.constexpr = x_desc.block_type.shape
    M_BOXES: gl.constexpr = BLOCK_M // (x_shape[0] * x_shape[1] * x_shape[2])
    # The memory of x is divided into units at which a product can begin: boxes, or rows of boxes.
    UNITS: gl.constexpr = x_shape[0] + EXTRA if TAPS > 1 else 1
    UNIT_H: gl.constexpr = 1 if TAPS > 1 else x_shape[0]
    x_units = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * M_BOXES * UNITS, UNIT_H, x_shape[1], x_shape[2], x_shape[3]], x_desc.layout
    )
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TAPS] + w_desc.block_type.shape, w_desc.layout)
    tile_boxes = gl.allocate_shared_memory(y_desc.dtype, [2 * TILE_BUFS] + y_desc.block_type.shape, y_desc.layout)
    ring = new_ring(STAGES, M_BOXES)
    turns = barriers(2, 1)
    tiles_m = gl.cdiv(boxes, M_BOXES)
    tiles_n = gl.cdiv(O, BLOCK_N)
    gl.warp_specialize([
        (_multiply_boxes, (
            x_units, w_boxes, tile_boxes, ring, turns,
            residual_desc, y_desc, x_scale_ptr, w_scale_ptr, bias_ptr, parts_ptr, tickets_ptr,
            N, O, period, boxes_h, boxes_w, tiles_m, tiles_n, steps, waves, share, PARTS,
            0, W_MAJOR, TAPS, BACKWARD, BLOCK_M, BLOCK_N, STAGES, GROUP_M, STREAM, ACTIVATION,
        )),
        (_multiply_boxes, (
            x_units, w_boxes, tile_boxes, ring, turns,
            residual_desc, y_desc, x_scale_ptr, w_scale_ptr, bias_ptr, parts_ptr, tickets_ptr,
            N, O, period, boxes_h, boxes_w, tiles_m, tiles_n, steps, waves, share, PARTS,
            1, W_MAJOR, TAPS, BACKWARD, BLOCK_M, BLOCK_N, STAGES, GROUP_M, STREAM, ACTIVATION,
        )),
        (_load_boxes, (
            x_desc, x1_desc, x2_desc, x3_desc, w_desc, residual_desc, x_units, w_boxes, ring,
            filter_h, filter_w, pad_h, pad_w, dilation_h, dilation_w, boxes_h, boxes_w, tiles_m, tiles_n, steps, waves, share,
            STRIDE_H, STRIDE_W, PHASES, W_MAJOR, TAPS, EXTRA, BACKWARD, BLOCK_M, BLOCK_N, STAGES, GROUP_M, STREAM,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
