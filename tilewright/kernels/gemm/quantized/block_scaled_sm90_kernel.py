"""`block_scaled_linear` for Hopper, scheduled by hand in Gluon: the implementation `sm90`.

    y = activation(sum over blocks b of K of (x[:, b] @ weight[:, b]^T) * x_scales[:, b] * w_scales[:, b] + bias) + residual

float8 operands, both dense along K, with one scale per 128 columns of each row of x, and one per 128 x 128 elements of the
weight. The host side is in block_scaled_sm90.py. The producer, the order of tiles and the sharing of tiles along K are those of
gemm/sm90_kernel.py; the epilogue is in hopper/epilogue.py.

For every 128 columns of K, the tensor cores compute a separate product. It is multiplied by its scales and added to the
accumulators in registers, in float32. That is one operation per 128 products. An SM does 128 such operations in the time in
which its tensor cores do 4096 products, so both must run at the same time. A consumer processes its tile in parts of 64 rows
and PART_N columns. Its accumulators take up to 128 registers per thread. In addition the registers have room for one of these:

    two parts of 64x64: one is added while the tensor cores compute the next ("parts")
    one part of 64x128: its addition overlaps the products of the other consumer ("")
    two parts of 64x128 if the accumulators take only 64 registers: the products of two steps, which alternate ("steps")

A part is always computed in the registers of a part that is no longer needed (`room`). If ptxas were free to choose registers,
it would start more parts than there are registers for, and spill. Multiplying x from registers, which reads less shared memory,
was 2 % slower.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# M rows of x, N rows of the weight, K the shared dimension, F columns of the output (N, or N / 2 with a gate)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from tilewright.kernels.gemm.sm90_kernel import load_tiles, piece_count, piece_of, place_of, with_parts
from tilewright.kernels.hopper.epilogue import column_blocks, finish_tile
from tilewright.kernels.hopper.primitives import viewed
from tilewright.kernels.hopper.ring import new_ring

__all__ = ["block_sm90_kernel"]


@gluon.jit
def _row_scales(x_scale_ptr, first_row, step, M, m_stride, k_stride, COUNT: gl.constexpr, layout: gl.constexpr):
    """The scales of COUNT groups of 64 rows of x for a step: a tuple of vectors."""
    scales = ()
    for r in gl.static_range(COUNT):
        rows = first_row + r * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        scales += (gl.load(x_scale_ptr + rows * m_stride + step * k_stride, mask=rows < M, other=0.0),)
    return scales


@gluon.jit
def _block_scales(
    w_scale_ptr, first_col, step, F, n_stride, k_stride, COUNT: gl.constexpr, COLS: gl.constexpr, HALVES: gl.constexpr
):
    """The scales of COUNT equal blocks of a consumer's columns for a step: a tuple of scalars."""
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
    """The tuple with `value` at index `place`."""
    changed = ()
    for i in gl.static_range(len(values)):
        if i == place:
            changed += (value,)
        else:
            changed += (values[i],)
    return changed


@gluon.jit
def _start_part(x, w, room, p: gl.constexpr, C_PARTS: gl.constexpr):
    """Start the product of part p in the registers of `room`, whose contents do not matter."""
    PART_N: gl.constexpr = room.shape[1]
    x_part = x.slice(p // C_PARTS * 64, 64, dim=0)
    w_part = w.slice(p % C_PARTS * PART_N, PART_N, dim=0).permute((1, 0))
    return warpgroup_mma(x_part, w_part, room, use_acc=False, is_async=True)


@gluon.jit
def _sum_blocks(
    x_bufs, w_bufs, at, first, end, first_row, first_col, M, F,
    x_scale_ptr, w_scale_ptr, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, PART_N: gl.constexpr, OVERLAP: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """One consumer's sum over the steps of a piece: a tuple of [64, PART_N] blocks, row by row. OVERLAP is "parts" or ""."""
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    N_BOXES: gl.constexpr = w_bufs.shape[0] // STAGES
    C_PARTS: gl.constexpr = COLS // PART_N
    R_PARTS: gl.constexpr = ROWS // 64
    BLOCKS: gl.constexpr = COLS // 128 if COLS // 128 > HALVES else HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART_N, 32])
    accs = ()
    for _ in gl.static_range(COUNT):
        accs += (gl.zeros([64, PART_N], gl.float32, layout),)
    # The first part that is added is all zeros. These must be separate tensors: Gluon does not carry an alias through the loop.
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
        at.wait()
        x = x_bufs.index(at.stage * M_BOXES + (wg if CONSUMERS == "m" else 0))
        w = w_bufs.index(at.stage * N_BOXES + (wg if CONSUMERS == "n" else 0))
        for p in gl.static_range(COUNT):
            started = _start_part(x, w, room if OVERLAP == "parts" else part, p, C_PARTS)
            acc = accs[(p + COUNT - 1) % COUNT]
            if OVERLAP == "parts":
                acc += part * gl.expand_dims(part_scales, 1)
                room = part
            # The previous accumulator is an argument of the wait, so that the compiler cannot move its additions behind it.
            part, acc = warpgroup_mma_wait(0, deps=(started, acc))
            accs = _replaced(accs, (p + COUNT - 1) % COUNT, acc)
            part_scales = scales[p // C_PARTS * BLOCKS + p % C_PARTS * BLOCKS // C_PARTS]
            if OVERLAP != "parts":
                accs = _replaced(accs, p, accs[p] + part * gl.expand_dims(part_scales, 1))
        at.give_back()
        scales = _products(next_rows, next_blocks)
        at = at.next()
    if OVERLAP == "parts":
        accs = _replaced(accs, COUNT - 1, accs[COUNT - 1] + part * gl.expand_dims(part_scales, 1))
    return accs


@gluon.jit
def _added(accs, part, scales):
    """Add a part to the accumulators `accs`, which are neighbouring blocks of its columns, with scales [64] for each block."""
    parts = column_blocks(part, len(accs))
    added = ()
    for b in gl.static_range(len(accs)):
        added += (accs[b] + parts[b] * gl.expand_dims(scales[b], 1),)
    return added


@gluon.jit
def _waited(part, accs):
    """Wait for a part in flight and return it with the accumulators.

    The accumulators are arguments of the wait, so that the compiler cannot move additions to them behind it.
    """
    named = warpgroup_mma_wait(0, deps=(part,) + accs)
    sums = ()
    for b in gl.static_range(len(accs)):
        sums += (named[b + 1],)
    return named[0], sums


@gluon.jit
def _start_step(x_bufs, w_bufs, place, room, wg: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Start a step's product in the registers of `room`."""
    place.wait()
    x = x_bufs.index(place.stage * (x_bufs.shape[0] // STAGES) + (wg if CONSUMERS == "m" else 0))
    w = w_bufs.index(place.stage * (w_bufs.shape[0] // STAGES) + (wg if CONSUMERS == "n" else 0))
    return warpgroup_mma(x, w.permute((1, 0)), room, use_acc=False, is_async=True)


@gluon.jit
def _step_scales(at, step, end, COUNT: gl.constexpr, COLS: gl.constexpr, HALVES: gl.constexpr, layout: gl.constexpr):
    """The scales of 64 rows and of a consumer's columns for a step, or for the last step before `end`; not yet multiplied.

    at: the pointers to the scales of x and of the weight, the first row and column, M, F, and the scales' strides.
    """
    x_scale_ptr, w_scale_ptr, first_row, first_col, M, F, x_m_stride, x_k_stride, w_n_stride, w_k_stride = at
    step = gl.minimum(step, end - 1)
    rows = _row_scales(x_scale_ptr, first_row, step, M, x_m_stride, x_k_stride, 1, layout)
    return rows, _block_scales(w_scale_ptr, first_col, step, F, w_n_stride, w_k_stride, COUNT, COLS, HALVES)


@gluon.jit
def _sum_turns(
    x_bufs, w_bufs, ring, filled, first, end, at,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, HALVES: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    PART_N: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """As _sum_blocks, for 64 rows. One step's product is added while the tensor cores compute another's in separate registers.

    filled: the number of stages filled before. at: as in _step_scales. The loop body covers two steps, so that each of the two
    products keeps its registers. No product is in flight between iterations: otherwise ptxas would mistake an addition of the
    other product for one of it, and insert a wait after every product.
    """
    whole: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART_N, 32])
    even = gl.zeros([64, COLS], gl.float32, whole)
    odd = gl.zeros([64, COLS], gl.float32, whole)
    accs = ()
    odd_scales = ()
    for _ in gl.static_range(COUNT):
        accs += (gl.zeros([64, PART_N], gl.float32, layout),)
        odd_scales += (gl.zeros([64], gl.float32, gl.SliceLayout(1, layout)),)
    start = first + (end - first) % 2
    if start > first:
        rows, blocks = _step_scales(at, first, end, COUNT, COLS, HALVES, layout)
        odd, accs = _waited(_start_step(x_bufs, w_bufs, ring.after(filled), odd, wg, CONSUMERS, STAGES), accs)
        odd_scales = _products(rows, blocks)
        ring.after(filled).give_back()
        filled += 1
    even_rows, even_blocks = _step_scales(at, start, end, COUNT, COLS, HALVES, layout)
    odd_rows, odd_blocks = _step_scales(at, start + 1, end, COUNT, COLS, HALVES, layout)
    for step in range(start, end, 2):
        # The scales are multiplied one iteration after their load. Otherwise ptxas would multiply them right after the load,
        # which would delay the products of this iteration.
        even_scales = _products(even_rows, even_blocks)
        next_scales = _products(odd_rows, odd_blocks)
        even_rows, even_blocks = _step_scales(at, step + 2, end, COUNT, COLS, HALVES, layout)
        odd_rows, odd_blocks = _step_scales(at, step + 3, end, COUNT, COLS, HALVES, layout)
        started = _start_step(x_bufs, w_bufs, ring.after(filled), even, wg, CONSUMERS, STAGES)
        accs = _added(accs, odd, odd_scales)
        next_started = _start_step(x_bufs, w_bufs, ring.after(filled + 1), odd, wg, CONSUMERS, STAGES)
        even = warpgroup_mma_wait(1, deps=(started,))
        ring.after(filled).give_back()
        accs = _added(accs, even, even_scales)
        odd, accs = _waited(next_started, accs)
        ring.after(filled + 1).give_back()
        odd_scales = next_scales
        filled += 2
    return _added(accs, odd, odd_scales)


@gluon.jit
def _sum_piece(
    x_bufs, w_bufs, ring, passed, first, end, first_row, first_col, M, F,
    x_scale_ptr, w_scale_ptr, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, PART_N: gl.constexpr, OVERLAP: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """One consumer's sum over the steps of a piece, as OVERLAP states. `passed`: the number of stages filled before."""
    if OVERLAP == "steps":
        at = (x_scale_ptr, w_scale_ptr, first_row, first_col, M, F, x_m_stride, x_k_stride, w_n_stride, w_k_stride)
        return _sum_turns(x_bufs, w_bufs, ring, passed, first, end, at, wg, CONSUMERS, HALVES, COLS, STAGES, PART_N, COUNT)
    else:
        return _sum_blocks(
            x_bufs, w_bufs, ring.after(passed), first, end, first_row, first_col, M, F,
            x_scale_ptr, w_scale_ptr, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
            wg, CONSUMERS, HALVES, ROWS, COLS, STAGES, PART_N, OVERLAP, COUNT,
        )  # fmt: skip


@gluon.jit
def multiply_tiles(
    x_bufs, w_bufs, tile_bufs, ring,
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
    F = F // VECTOR * VECTOR  # does not change F, but tells the compiler that VECTOR divides it
    if PDL:
        gdc_wait()  # before the scales of x are read, and before anything is written
    passed = steps * 0
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        first_row = row * BLOCK_M + M_BOX * ROWS
        first_col = (col * N_BOXES + N_BOX) * (COLS // HALVES)
        accs = _sum_piece(
            x_bufs, w_bufs, ring, passed, first, end, first_row, first_col, M, F,
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
                blocks = with_parts(blocks, parts_ptr, tickets_ptr, left, first, share, steps, PARTS, wg, ROWS * COLS)
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
    """Launch with at most one program per SM and num_warps=4 (warp specialisation adds the producer and one consumer).

    If y_desc is None, y is written by ordinary stores of VECTOR elements. With STREAM: `waves` is the number of whole tiles per
    program, `share` the steps of K per program in the remaining tiles, and PARTS the largest number of programs that add to a
    tile begun by another program.

    OVERLAP: what a consumer adds while the tensor cores compute its next product. "parts": parts of a step, which must be an
    even number; "steps": whole steps, with a consumer tile of 64 x 128; "": nothing.
    """
    BLOCK_K: gl.constexpr = 128
    M_BOXES: gl.constexpr = 2 if CONSUMERS == "m" else 1
    N_BOXES: gl.constexpr = 2 if CONSUMERS == "n" else 1
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * M_BOXES, BLOCK_M // M_BOXES, BLOCK_K], x_desc.layout)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * N_BOXES * HALVES] + w_desc.block_type.shape, w_desc.layout)
    w_bufs = w_boxes
    if HALVES == 2:
        w_shape: gl.constexpr = [STAGES * N_BOXES, COLS, BLOCK_K]
        w_layout: gl.constexpr = w_desc.layout
        w_bufs = viewed(w_boxes, w_boxes.dtype, w_shape, w_layout)
    tile_bufs = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [2 * EPILOGUE_BUFS, 64, EPILOGUE_N], TILE_LAYOUT)
    ring = new_ring(STAGES, 2)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(F * HALVES, BLOCK_N)
    gl.warp_specialize([
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, ring, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, parts_ptr,
            tickets_ptr, M, F, tiles_m, tiles_n, steps, waves, share, PARTS,
            x_m_stride, x_k_stride, w_n_stride, w_k_stride, residual_stride,
            0, CONSUMERS, HALVES, BLOCK_M, BLOCK_N, STAGES, GROUP_M, PART_N, OVERLAP, STREAM,
            ACTIVATION, VECTOR, PDL,
        )),
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, ring, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, parts_ptr,
            tickets_ptr, M, F, tiles_m, tiles_n, steps, waves, share, PARTS,
            x_m_stride, x_k_stride, w_n_stride, w_k_stride, residual_stride,
            1, CONSUMERS, HALVES, BLOCK_M, BLOCK_N, STAGES, GROUP_M, PART_N, OVERLAP, STREAM,
            ACTIVATION, VECTOR, PDL,
        )),
        (load_tiles, (
            x_desc, None, w_desc, x_bufs, w_boxes, ring, M, F, tiles_m, tiles_n, steps, waves, share, 0, 0,
            "k", "k", HALVES, N_BOXES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, 0, PDL,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
