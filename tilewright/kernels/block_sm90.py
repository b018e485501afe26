"""`block_scaled_linear` for Hopper, scheduled by hand in Gluon: the implementation `sm90`.

    y = activation(sum over blocks b of K of (x[:, b] @ weight[:, b]^T) * x_scales[:, b] * w_scales[:, b] + bias) + residual

float8 operands, both dense along K; a scale for 128 columns of each row of x, and for 128 x 128 elements of the weight. The
host side is in block_sm90_launch.py. The producer, the order of tiles and how programs share a tile along K are
matmul_sm90.py's, and what follows the sum is in matmul_sm90_end.py.

Every 128 columns of K are a product of its own on the tensor cores, which then is multiplied by its scales and added to the
sum in registers, in float32: an operation for each 128 products, of which an SM does 128 in the time in which its tensor cores
do 4096. So both must run at once. A consumer goes through its tile in parts of 64 rows and PART_N columns. Its sums take up to
128 registers a thread. Beside them two parts of 64x64 fit, so that one is added up while the tensor cores work on the next
(OVERLAP), or one of 64x128, which the other consumer's products cover. A part goes into the registers of one that is done with
(`room`): were it free to take others, ptxas would begin more parts than it has registers for, and spill. x multiplied from
registers, which asks less of shared memory, was 2 % slower.
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

# M rows of x, N rows of the weight, K shared, F columns of the output (N, or N / 2 with a gate)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from tilewright.kernels.hopper import viewed
from tilewright.kernels.matmul_sm90 import load_tiles, piece_count, piece_of, place_of, program_rank
from tilewright.kernels.matmul_sm90_end import add_parts, column_blocks, finish_tile, leave_part

__all__ = ["block_sm90_kernel"]


@gluon.jit
def _row_scales(x_scale_ptr, first_row, step, M, m_stride, k_stride, COUNT: gl.constexpr, layout: gl.constexpr):
    """The scales of COUNT times 64 rows of x for a step, a vector each."""
    scales = ()
    for r in gl.static_range(COUNT):
        rows = first_row + r * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        scales += (gl.load(x_scale_ptr + rows * m_stride + step * k_stride, mask=rows < M, other=0.0),)
    return scales


@gluon.jit
def _block_scales(
    w_scale_ptr, first_col, step, F, n_stride, k_stride, COUNT: gl.constexpr, COLS: gl.constexpr, HALVES: gl.constexpr
):
    """The scales of COUNT equal blocks of a consumer's columns for a step, a number each."""
    scales = ()
    for b in gl.static_range(COUNT):
        col = first_col + b * (COLS // COUNT) % (COLS // HALVES) + b * HALVES // COUNT * F
        col = gl.minimum(col, F * HALVES - 1)  # a tile may reach beyond the last block
        scales += (gl.load(w_scale_ptr + col // 128 * n_stride + step * k_stride),)
    return scales


@gluon.jit
def _products(row_scales, block_scales):
    products = ()
    for r in gl.static_range(len(row_scales)):
        for b in gl.static_range(len(block_scales)):
            products += (row_scales[r] * block_scales[b],)
    return products


@gluon.jit
def _replaced(values, place: gl.constexpr, value):
    """The tuple with another value at a place."""
    changed = ()
    for i in gl.static_range(len(values)):
        if i == place:
            changed += (value,)
        else:
            changed += (values[i],)
    return changed


@gluon.jit
def _start_part(x, w, room, p: gl.constexpr, C_PARTS: gl.constexpr):
    """Begin the product of part p in the registers of `room`, whose numbers do not matter."""
    PART_N: gl.constexpr = room.shape[1]
    x_part = x.slice(p // C_PARTS * 64, 64, dim=0)
    w_part = w.slice(p % C_PARTS * PART_N, PART_N, dim=0).permute((1, 0))
    return warpgroup_mma(x_part, w_part, room, use_acc=False, is_async=True)


@gluon.jit
def _sum_blocks(
    x_bufs, w_bufs, full, empty, stage, phase, first, end, first_row, first_col, M, F,
    x_scale_ptr, w_scale_ptr, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, PART_N: gl.constexpr, OVERLAP: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """One consumer's sum over the steps of a piece, a tuple of [64, PART_N] blocks, row by row."""
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    N_BOXES: gl.constexpr = w_bufs.shape[0] // STAGES
    C_PARTS: gl.constexpr = COLS // PART_N
    R_PARTS: gl.constexpr = ROWS // 64
    BLOCKS: gl.constexpr = COLS // 128 if COLS // 128 > HALVES else HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART_N, 32])
    accs = ()
    for _ in gl.static_range(COUNT):
        accs += (gl.zeros([64, PART_N], gl.float32, layout),)
    # The first part that is added is zeros. None of these may be another's alias: Gluon would not carry it through the loop.
    part = gl.zeros([64, PART_N], gl.float32, layout)
    part_scales = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    room = gl.zeros([64, PART_N], gl.float32, layout)  # for the next product
    scales = _products(
        _row_scales(x_scale_ptr, first_row, first, M, x_m_stride, x_k_stride, R_PARTS, layout),
        _block_scales(w_scale_ptr, first_col, first, F, w_n_stride, w_k_stride, BLOCKS, COLS, HALVES),
    )
    for step in range(first, end):
        ahead = gl.minimum(step + 1, end - 1)
        next_rows = _row_scales(x_scale_ptr, first_row, ahead, M, x_m_stride, x_k_stride, R_PARTS, layout)
        next_blocks = _block_scales(w_scale_ptr, first_col, ahead, F, w_n_stride, w_k_stride, BLOCKS, COLS, HALVES)
        mbarrier.wait(full.index(stage), phase)
        x = x_bufs.index(stage * M_BOXES + (wg if CONSUMERS == "m" else 0))
        w = w_bufs.index(stage * N_BOXES + (wg if CONSUMERS == "n" else 0))
        for p in gl.static_range(COUNT):
            started = _start_part(x, w, room if OVERLAP else part, p, C_PARTS)
            acc = accs[(p + COUNT - 1) % COUNT]
            if OVERLAP:
                acc += part * gl.expand_dims(part_scales, 1)
                room = part
            # The sum before is named so that the compiler does not put its additions off until after this wait.
            part, acc = warpgroup_mma_wait(0, deps=(started, acc))
            accs = _replaced(accs, (p + COUNT - 1) % COUNT, acc)
            part_scales = scales[p // C_PARTS * BLOCKS + p % C_PARTS * BLOCKS // C_PARTS]
            if not OVERLAP:
                accs = _replaced(accs, p, accs[p] + part * gl.expand_dims(part_scales, 1))
        mbarrier.arrive(empty.index(stage))
        scales = _products(next_rows, next_blocks)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if OVERLAP:
        accs = _replaced(accs, COUNT - 1, accs[COUNT - 1] + part * gl.expand_dims(part_scales, 1))
    return accs


@gluon.jit
def multiply_tiles(
    x_bufs, w_bufs, tile_bufs, full, empty,
    y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
    M, F, tiles_m, tiles_n, steps, waves, share, PARTS, x_m_stride, x_k_stride, w_n_stride, w_k_stride, residual_stride,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, PART_N: gl.constexpr, OVERLAP: gl.constexpr,
    STREAM: gl.constexpr, ACTIVATION: gl.constexpr, VECTOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    N_BOXES: gl.constexpr = w_bufs.shape[0] // STAGES
    ROWS: gl.constexpr = BLOCK_M // M_BOXES
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    M_BOX: gl.constexpr = wg if CONSUMERS == "m" else 0
    N_BOX: gl.constexpr = wg if CONSUMERS == "n" else 0
    C_PARTS: gl.constexpr = COLS // PART_N
    COUNT: gl.constexpr = ROWS // 64 * C_PARTS
    F = F // VECTOR * VECTOR  # F itself: this tells the compiler what divides it
    if PDL:
        gdc_wait()  # before the scales of x are read, and anything is written
    passed = steps * 0
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        first_row = row * BLOCK_M + M_BOX * ROWS
        first_col = (col * N_BOXES + N_BOX) * (COLS // HALVES)
        stage = passed % STAGES
        phase = passed // STAGES & 1
        accs = _sum_blocks(
            x_bufs, w_bufs, full, empty, stage, phase, first, end, first_row, first_col, M, F,
            x_scale_ptr, w_scale_ptr, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
            wg, CONSUMERS, HALVES, ROWS, COLS, STAGES, PART_N, OVERLAP, COUNT,
        )  # fmt: skip
        passed += end - first
        blocks = ()
        for p in gl.static_range(COUNT):
            blocks += column_blocks(accs[p], PART_N // tile_bufs.shape[2])
        if STREAM:
            if end - first < steps:
                left = tile - waves * gl.num_programs(0)
                begin = left * steps // share
                ticket_ptr = tickets_ptr + left * 2 + wg
                tile_parts_ptr = parts_ptr + (left.to(gl.int64) * PARTS * 2 + wg) * (ROWS * COLS)
                if first > 0:
                    part = program_rank() - begin - 1
                    leave_part(blocks, tile_parts_ptr + part * (2 * ROWS * COLS), ticket_ptr)
                else:
                    others = (left * steps + steps - 1) // share - begin
                    blocks = add_parts(blocks, tile_parts_ptr, ticket_ptr, others, 2 * ROWS * COLS)
        if first == 0:
            for r in gl.static_range(ROWS // 64):
                row_blocks = ()
                for j in gl.static_range(COLS // tile_bufs.shape[2]):
                    row_blocks += (blocks[r * (COLS // tile_bufs.shape[2]) + j],)
                finish_tile(
                    row_blocks, tile_bufs, y_desc, y_ptr, None, None, bias_ptr, residual_ptr,
                    first_row + r * 64, first_col, M, F, residual_stride, wg, ACTIVATION, HALVES, 1, VECTOR,
                )  # fmt: skip
    if y_desc is not None:
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M", "F", "steps", "waves", "share", "PARTS", "x_k_stride"])
def block_sm90_kernel(
    x_desc, w_desc, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
    M, F, steps, waves, share, PARTS, x_m_stride, x_k_stride, w_n_stride, w_k_stride, residual_stride,
    CONSUMERS: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, PART_N: gl.constexpr, OVERLAP: gl.constexpr,
    EPILOGUE_N: gl.constexpr, EPILOGUE_BUFS: gl.constexpr, TILE_LAYOUT: gl.constexpr,
    STREAM: gl.constexpr, ACTIVATION: gl.constexpr, VECTOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Launch on at most as many programs as there are SMs, with num_warps=4 (the producer and a consumer bring their own).

    y_desc is None when y is written by ordinary stores of VECTOR elements. waves, share, PARTS: with STREAM, whole tiles a
    program, then steps of K a program, and the most programs that add to what another one has of a tile. OVERLAP: for an even
    number of parts a consumer.
    """
    BLOCK_K: gl.constexpr = 128
    M_BOXES: gl.constexpr = 2 if CONSUMERS == "m" else 1
    N_BOXES: gl.constexpr = 2 if CONSUMERS == "n" else 1
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * M_BOXES] + x_desc.block_type.shape, x_desc.layout)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * N_BOXES * HALVES] + w_desc.block_type.shape, w_desc.layout)
    w_bufs = w_boxes
    if HALVES == 2:
        w_shape: gl.constexpr = [STAGES * N_BOXES, COLS, BLOCK_K]
        w_layout: gl.constexpr = w_desc.layout
        w_bufs = viewed(w_boxes, w_boxes.dtype, w_shape, w_layout)
    tile_bufs = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [2 * EPILOGUE_BUFS, 64, EPILOGUE_N], TILE_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(F * HALVES, BLOCK_N)
    gl.warp_specialize([
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, full, empty, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, parts_ptr,
            tickets_ptr, M, F, tiles_m, tiles_n, steps, waves, share, PARTS,
            x_m_stride, x_k_stride, w_n_stride, w_k_stride, residual_stride,
            0, CONSUMERS, HALVES, BLOCK_M, BLOCK_N, STAGES, GROUP_M, PART_N, OVERLAP, STREAM,
            ACTIVATION, VECTOR, PDL,
        )),
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, full, empty, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, parts_ptr,
            tickets_ptr, M, F, tiles_m, tiles_n, steps, waves, share, PARTS,
            x_m_stride, x_k_stride, w_n_stride, w_k_stride, residual_stride,
            1, CONSUMERS, HALVES, BLOCK_M, BLOCK_N, STAGES, GROUP_M, PART_N, OVERLAP, STREAM,
            ACTIVATION, VECTOR, PDL,
        )),
        (load_tiles, (
            x_desc, None, w_desc, x_bufs, w_boxes, full, empty, M, F, tiles_m, tiles_n, steps, waves, share, 0, 0,
            "k", "k", HALVES, N_BOXES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, 0, PDL,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
