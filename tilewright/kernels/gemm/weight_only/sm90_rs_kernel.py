"""`mixed_linear` for Hopper: the weight is wgmma's register operand, so no converted weight passes through shared memory.

The product is transposed, y^T = W x^T: wgmma can read its tall operand from registers, and codes are converted there. The
kernel is persistent. A block has nine warps in two groups, which synchronise through barriers in shared memory:

    producer    one warp: issues TMA loads of pipeline stages, 64 or 128 columns of x and of the codes
    consumers   two warpgroups, each for 64 rows of the weight by BLOCK_M rows of x. They read codes from shared memory (int4
                with 16-byte loads, see int4_layout.py; 8-bit codes in pairs), and convert them into the next operand while the
                product of the previous one runs

Row scales multiply the sums at the end. With ON_SUMS, the scale of a group multiplies the group's sum in float32. Otherwise it
multiplies the weight, in float32, which is then rounded to x's dtype once. For NaN and infinity in float8 codes see
device/dequant.py.

With STREAM the tiles are cut along K into equal shares, as in gemm/sm90_kernel.py. With few rows of x the kernel is limited by
reading the codes, with many by the tensor cores: 128x256x64 takes them 1024 cycles, and a scheduler about 250 instructions.

ptxas 12.8 lets products overlap only under two conditions; otherwise it ends each product before the next begins. First, the
consumers must be a single group of warps, the first one: with two groups, each with its own setmaxnreg, ptxas finds too few
registers for the operands in flight (C7512). Second, the first product must have `use_acc` False instead of an accumulator that
was set to zero (C7515).
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# M rows of x, N rows of the weight, K the shared dimension, F columns of the output (N, or N / 2 with a gate)

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewright.kernels.device.dequant import minus, widen, widen_pairs
from tilewright.kernels.gemm.sm90_kernel import piece_count, piece_of, place_of, program_rank
from tilewright.kernels.hopper.epilogue import activate, add_parts, leave_part
from tilewright.kernels.hopper.primitives import load_box, viewed
from tilewright.kernels.hopper.ring import new_ring

__all__ = ["mixed_registers_kernel"]


@gluon.jit
def _load_tiles(
    x_desc, w_desc, x_bufs, code_boxes, ring, F, tiles_m, tiles_n, steps, waves, share,
    HALVES: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """Fill stages of SPAN times 64 columns, in the order in which they are used."""
    BOXES: gl.constexpr = code_boxes.shape[0] // (STAGES * HALVES)
    ROWS: gl.constexpr = code_boxes.shape[1]
    UNITS: gl.constexpr = code_boxes.shape[2]
    BLOCK_M: gl.constexpr = x_bufs.shape[1]
    at = ring.to_fill()
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        for step in range(first * (2 // SPAN), end * (2 // SPAN)):
            bar = at.fill(BLOCK_M * SPAN * 128 + 128 * BOXES * 64)
            for b in gl.static_range(BOXES):
                for half in gl.static_range(HALVES):
                    buf = code_boxes.index((at.stage * BOXES + b) * HALVES + half)
                    load_box(w_desc, [col * ROWS + half * F, (step * BOXES + b) * UNITS], bar, buf)
            for b in gl.static_range(SPAN):
                load_box(x_desc, [row * BLOCK_M, (step * SPAN + b) * 64], bar, x_bufs.index(at.stage * SPAN + b))
            at = at.next()


# ---- codes to operands


@constexpr_function
def _code_layout(format: str) -> gl.DistributedLinearLayout:
    """The layout of the codes of 128 rows: int4 words [128, 16], or pairs of 8-bit codes [128, 32].

    Rows are distributed to threads as in wgmma's register operand.
    """
    rows, warps = [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]]
    if format == "int4":
        return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *rows], warps, [], [128, 16])
    return gl.DistributedLinearLayout([[0, 4], [0, 8], [0, 16], [8, 0]], [[0, 1], [0, 2], *rows], warps, [], [128, 32])


@gluon.jit
def _half_of_codes(words, FORMAT: gl.constexpr, HALF: gl.constexpr):
    """Of int4's words 4 t + c, those with c = 2 HALF and 2 HALF + 1, for 64 columns: [128, 8]. 8-bit codes are unchanged."""
    if FORMAT == "int4":
        even, odd = words.reshape([128, 4, 2, 2]).permute([0, 1, 3, 2]).split()
        words = even.reshape([128, 8]) if HALF == 0 else odd.reshape([128, 8])
    return words


@gluon.jit
def _operand(codes, zeros, FORMAT: gl.constexpr, x, layout: gl.constexpr):
    """64 columns of the weight in x's dtype, as wgmma's register operand, before scales. zeros: int4's zero points, [128]."""
    if FORMAT == "int4":
        LAYOUT: gl.constexpr = gl.SliceLayout(1, codes.type.layout)
        less = gl.expand_dims(gl.convert_layout(minus(zeros, x), LAYOUT, assert_trivial=True), 1)
        w = widen(codes, less, FORMAT, x)
        w = w.reshape([128, 4, 2, 4, 2]).permute([0, 2, 3, 1, 4])
    else:
        low, high = codes.reshape([128, 4, 2, 4]).permute([0, 1, 3, 2]).split()
        w = widen_pairs(low, high, FORMAT, x).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(w.reshape([128, 64]), layout, assert_trivial=True)


@gluon.jit
def _block_numbers(ptr, weights, F, step, K, stride, other, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr):
    """Scales or zero points of a stage, a tuple: one for 128 columns, two for 64 each, or none."""
    made = ()
    for g in gl.static_range(128 // BLOCK_COLS if BLOCK_COLS and ptr is not None else 0):
        k = step * 128 + g * BLOCK_COLS
        made += (gl.load(ptr + weights // BLOCK_ROWS * stride + k // BLOCK_COLS, mask=(weights < F) & (k < K), other=other),)
    return made


@gluon.jit
def _stage_numbers(
    scales_ptr, zeros_ptr, weights, N, step, K, stride, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
):  # fmt: skip
    """(scales, zero points) of a stage, each as `_block_numbers` returns them."""
    scales = _block_numbers(scales_ptr, weights, N, step, K, stride, 0.0, BLOCK_ROWS, BLOCK_COLS)
    return scales, _block_numbers(zeros_ptr, weights, N, step, K, stride, 8, BLOCK_ROWS, BLOCK_COLS)


# ---- epilogue


@gluon.jit
def _blocks_of_rows(acc, COUNT: gl.constexpr):
    """Sums [128 weight rows, rows of x] as a tuple of COUNT blocks of rows of x. Each thread keeps its elements."""
    blocks = (acc,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for j in gl.static_range(len(blocks)):
            y = blocks[j]
            halves += y.reshape(128, 2, y.shape[1] // 2).permute(0, 2, 1).split()
        blocks = halves
    named = ()
    for j in gl.static_range(COUNT):
        named += (gl.convert_layout(blocks[j], _sums(acc.shape[1] // COUNT), assert_trivial=True),)
    return named


@constexpr_function
def _sums(width: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, width, 16])


@constexpr_function
def _turned_layout(width: int) -> gl.DistributedLinearLayout:
    """[width rows of x, 128 weight rows]: a thread has neighbours, and those 64 further on (with a gate, the up half)."""
    cols = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32]]
    rows = [[1 << i, 0] for i in range(width.bit_length() - 1)]
    own = 1 if width == 8 else 2
    threads = cols[own:] + rows
    return gl.DistributedLinearLayout(cols[:own] + [[0, 64]] + threads[8:], threads[:5], threads[5:8], [], [width, 128])


@gluon.jit
def _finish_block(
    y, y_ptr, row_scales, bias, residual_ptr, first_row, first_col, M, F, residual_stride,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Apply scales, bias, activation and residual to sums [128 weight rows, rows of x], round them once and store them."""
    if row_scales is not None:
        y = y * gl.expand_dims(row_scales, 1)
    if bias is not None:
        y = y + gl.expand_dims(bias, 1)
    y = gl.convert_layout(y.permute([1, 0]), _turned_layout(y.shape[1]))
    if GATED:
        gate, up = y.reshape([y.shape[0], 2, 64]).permute([0, 2, 1]).split()
        y = activate(gate, ACTIVATION) * up
    else:
        y = activate(y, ACTIVATION)
    rows = gl.expand_dims(first_row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout)), 1)
    cols = gl.expand_dims(first_col + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout)), 0)
    inside = (rows < M) & (cols < F)
    if residual_ptr is not None:
        y += gl.load(residual_ptr + rows.to(gl.int64) * residual_stride + cols, mask=inside, other=0.0).to(gl.float32)
    gl.store(y_ptr + rows.to(gl.int64) * F + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _finish(
    blocks, y_ptr, scales_ptr, bias_ptr, residual_ptr, weights, first_row, first_col, M, F, residual_stride,
    BLOCK_COLS: gl.constexpr, HALVES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.SliceLayout(1, blocks[0].type.layout)
    own = gl.convert_layout(weights, LAYOUT, assert_trivial=True)
    row_scales = None
    bias = None
    if not BLOCK_COLS:
        row_scales = gl.load(scales_ptr + own, mask=own < F * HALVES, other=0.0)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + own, mask=own < F * HALVES, other=0.0).to(gl.float32)
    for j in gl.static_range(len(blocks)):
        _finish_block(
            blocks[j], y_ptr, row_scales, bias, residual_ptr, first_row + j * blocks[0].shape[1], first_col, M, F,
            residual_stride, ACTIVATION, HALVES == 2,
        )  # fmt: skip


# ---- consumers


@gluon.jit
def _scaled(w, scale, layout: gl.constexpr):
    """An operand times the scales of its rows, in float32, rounded once."""
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout), assert_trivial=True)
    return (w.to(gl.float32) * gl.expand_dims(scale, 1)).to(w.dtype)


@gluon.jit
def _sum_steps(
    x_bufs, code_bufs, ring, scales_ptr, zeros_ptr, weights, N, K, scales_stride, passed, first, end,
    FORMAT: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr, BLOCK_M: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr, ON_SUMS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """The product over the steps of a piece, 128 columns each. Stages are released as they are consumed."""
    GROUPS: gl.constexpr = 128 // BLOCK_COLS if BLOCK_COLS else 1
    ACC: gl.constexpr = _sums(BLOCK_M)
    W: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CODES: gl.constexpr = _code_layout(FORMAT)
    BOXES: gl.constexpr = code_bufs.shape[0] // STAGES
    x_like = gl.zeros([1], x_bufs.dtype, gl.SliceLayout(0, ACC))
    eights = gl.full([128], 8, gl.int32, gl.SliceLayout(1, ACC))
    at = ring.after(passed)
    acc = gl.zeros([128, BLOCK_M], gl.float32, ACC)
    part = gl.zeros([128, BLOCK_M], gl.float32, ACC)
    ahead = _stage_numbers(scales_ptr, zeros_ptr, weights, N, first, K, scales_stride, BLOCK_ROWS, BLOCK_COLS)
    for step in range(first, end):
        scales, zeros = ahead
        if AHEAD:
            ahead = _stage_numbers(scales_ptr, zeros_ptr, weights, N, step + 1, K, scales_stride, BLOCK_ROWS, BLOCK_COLS)
        for h in gl.static_range(2):
            if h % SPAN == 0:
                at.wait()
            codes = _half_of_codes(code_bufs.index(at.stage * BOXES + h % BOXES).load(CODES), FORMAT, h)
            w = _operand(codes, zeros[h * GROUPS // 2] if zeros_ptr is not None else eights, FORMAT, x_like, W)
            x = x_bufs.index(at.stage * SPAN + h % SPAN).permute((1, 0))
            if ON_SUMS:
                part = warpgroup_mma(w, x, part, use_acc=h * GROUPS == 1, is_async=True)
                if h == 1 or GROUPS == 2:
                    part = warpgroup_mma_wait(0, deps=(part,))
                    acc += part * gl.expand_dims(scales[h * GROUPS // 2], 1)
                if h % SPAN == SPAN - 1:
                    at.give_back()
            else:
                if BLOCK_COLS:
                    w = _scaled(w, scales[h * GROUPS // 2], W)
                acc = warpgroup_mma(w, x, acc, use_acc=(step > first) | (h == 1), is_async=True)
                # One product stays in flight. The one before is complete: the producer may overwrite the stage that it read.
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if h % SPAN == 0:
                    at.give_back_last((step > first) | (h == 1))
            if h % SPAN == SPAN - 1:
                at = at.next()
        if not AHEAD:
            ahead = _stage_numbers(scales_ptr, zeros_ptr, weights, N, step + 1, K, scales_stride, BLOCK_ROWS, BLOCK_COLS)
    if not ON_SUMS:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        at.give_back_last()
    return acc


@gluon.jit
def _multiply_tiles(
    x_bufs, code_bufs, ring, y_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
    M, F, K, tiles_m, tiles_n, steps, waves, share, PARTS, scales_stride, residual_stride,
    FORMAT: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STREAM: gl.constexpr, ON_SUMS: gl.constexpr,
    AHEAD: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    at = gl.arange(0, 128, layout=gl.SliceLayout(1, _sums(BLOCK_M)))
    passed = 0  # stages consumed before this piece
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        first_col = col * (128 // HALVES)
        weights = first_col + at
        if HALVES == 2:
            weights = at // 64 * F + first_col + at % 64
        acc = _sum_steps(
            x_bufs, code_bufs, ring, scales_ptr, zeros_ptr, weights, F * HALVES, K, scales_stride, passed, first, end,
            FORMAT, BLOCK_ROWS, BLOCK_COLS, BLOCK_M, SPAN, STAGES, ON_SUMS, AHEAD,
        )  # fmt: skip
        passed += (end - first) * (2 // SPAN)
        blocks = _blocks_of_rows(acc, BLOCK_M // 16 if BLOCK_M > 16 else 1)
        if STREAM:
            if end - first < steps:
                left = tile - waves * gl.num_programs(0)
                begin = left * steps // share
                tile_parts_ptr = parts_ptr + left.to(gl.int64) * PARTS * (128 * BLOCK_M)
                if first > 0:
                    part_ptr = tile_parts_ptr + (program_rank() - begin - 1) * (128 * BLOCK_M)
                    leave_part(blocks, part_ptr, tickets_ptr + left)
                else:
                    others = (left * steps + steps - 1) // share - begin
                    blocks = add_parts(blocks, tile_parts_ptr, tickets_ptr + left, others, 128 * BLOCK_M)
        if first == 0:
            _finish(
                blocks, y_ptr, scales_ptr, bias_ptr, residual_ptr, weights, row * BLOCK_M, first_col, M, F, residual_stride,
                BLOCK_COLS, HALVES, ACTIVATION,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "K", "steps", "waves", "share", "PARTS"])
def mixed_registers_kernel(
    x_desc, w_desc, y_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
    M, F, K, steps, waves, share, PARTS, scales_stride, residual_stride,
    FORMAT: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STREAM: gl.constexpr, ON_SUMS: gl.constexpr,
    AHEAD: gl.constexpr, ACTIVATION: gl.constexpr, CODE_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=8, and at most as many programs as can run concurrently: with STREAM they wait for each other.

    w_desc: boxes of 64 bytes of a row's codes, int4 as 32-bit words and others as pairs. parts and tickets: used with STREAM.
    SPAN: the columns per stage, divided by 64; 2 for int4.
    AHEAD: the scales and zero points of the next step are loaded at the start of a step, not at its end.
    """
    BOXES: gl.constexpr = 1 if FORMAT == "int4" else SPAN
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * SPAN] + x_desc.block_type.shape, x_desc.layout)
    code_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BOXES * HALVES] + w_desc.block_type.shape, w_desc.layout)
    code_bufs = code_boxes
    if HALVES == 2:
        shape: gl.constexpr = [STAGES * BOXES, 128, w_desc.block_type.shape[1]]
        code_bufs = viewed(code_boxes, code_boxes.dtype, shape, CODE_LAYOUT)
    ring = new_ring(STAGES, 1)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(F * HALVES, 128)
    gl.warp_specialize([
        (_multiply_tiles, (
            x_bufs, code_bufs, ring, y_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
            M, F, K, tiles_m, tiles_n, steps, waves, share, PARTS, scales_stride, residual_stride,
            FORMAT, BLOCK_ROWS, BLOCK_COLS, HALVES, BLOCK_M, SPAN, STAGES, GROUP_M, STREAM, ON_SUMS, AHEAD,
            ACTIVATION,
        )),
        (_load_tiles, (
            x_desc, w_desc, x_bufs, code_boxes, ring, F, tiles_m, tiles_n, steps, waves, share,
            HALVES, SPAN, STAGES, GROUP_M, STREAM,
        )),
    ], [1], [24])  # fmt: skip
