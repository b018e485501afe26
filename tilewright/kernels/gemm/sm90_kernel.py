"""`linear` and `scaled_linear` for Hopper, scheduled by hand in Gluon: the implementations `sm90`.

    y = activation((x @ weight^T) * x_scales * w_scales + bias) + residual

bf16 or fp16 without scales, x and weight each dense along either of their dimensions; int8 or float8, both dense along K, with
scales. The host side is in sm90.py, the main loop of a consumer in sm90_mainloop.py, the epilogue in hopper/epilogue.py.

One persistent thread block per SM. It has twelve warps in three groups, which synchronise through barriers in shared memory:

    producer      one warp: issues TMA loads of x and weight tiles, as far ahead as there are pipeline stages
    two consumers one warpgroup each: wgmma on each stage as it fills, then the epilogue. They compute the upper and the lower
                  half of every tile ("m"), its left and right half ("n"), or alternate, a whole tile each ("tiles")

Tiles of 192 or 96 columns use three TMA boxes of the weight and three accumulators per consumer, because tensor shapes must be
powers of two. Such tiles fill the card in one wave where 128 or 256 columns need one and a half.

With "tiles", the epilogue of one consumer overlaps the products of the other. With "m" and "n", both consumers finish a tile at
the same time. Their epilogue then overlaps only the loads into the free stages; with a short K and large tiles this costs time.
The kernel is limited by the tensor cores (128x256 tiles load 48 bytes per cycle per SM from L2).

With STREAM, the tiles of the last, incomplete wave (or all tiles if they are few) are cut along K into equal shares, one per
program (Osama et al., "Stream-K", 2023). With shares of any length, as in that paper, programs would have nothing in common in
L2. So here each tile consists of a whole number of shares, as nearly as the steps of K allow. The program that begins a tile
also finishes it: it waits for the float32 partial sums of the others, adds them in the order of K and runs the epilogue. So two
runs give the same bits.

With CLASSES (1, 2, 4 or 8), x is dense along K but its rows do not start at multiples of 16 bytes, so TMA cannot address x
directly. Rows that are CLASSES rows apart are a multiple of 16 bytes apart. Such a class of rows forms a matrix for TMA,
except that its first row starts `shift` elements into a 16-byte word. A tile takes its rows from one class, and reads K in
windows that start `shift` elements early. The weight is dense along N here; its windows also start `shift` rows early, which
costs nothing. The first and last windows of x also contain elements of neighbouring rows; these are set to zero. (The weight is
zero there too, but 0 * inf would be NaN.)
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# M rows of x, N rows of the weight, K the shared dimension, F columns of the output (N, or N / 2 with a gate)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from tilewright.kernels.gemm.sm90_mainloop import sum_piece
from tilewright.kernels.hopper.epilogue import add_parts, finish_tile, leave_part, residual_blocks
from tilewright.kernels.hopper.primitives import load_box, viewed
from tilewright.kernels.hopper.producer_rows import await_rows
from tilewright.kernels.hopper.ring import barriers, new_ring

__all__ = ["load_tiles", "multiply_tiles", "piece_count", "piece_of", "place_of", "program_rank", "sm90_kernel", "with_parts"]


# ---- the work of a program


@gluon.jit
def program_rank():
    """The program's number, counted from the last program.

    A program that needs partial sums waits for programs of a higher rank. Counting backwards makes those start first.
    """
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def piece_count(tiles, waves, share, steps, STREAM: gl.constexpr):
    """The number of pieces of work of this program: tiles, or parts of tiles."""
    if STREAM:
        begin = program_rank() * share
        end = gl.minimum(begin + share, (tiles - waves * gl.num_programs(0)) * steps)
        count = waves
        if end > begin:
            count += (end - 1) // steps - begin // steps + 1
        return count
    else:
        return gl.cdiv(tiles - program_rank(), gl.num_programs(0))


@gluon.jit
def piece_of(i, waves, share, steps, STREAM: gl.constexpr):
    """(tile, first step of K, end step) of this program's i-th piece: `waves` whole tiles, then its share of the rest."""
    tile = program_rank() + i * gl.num_programs(0)
    first = steps * 0
    end = steps
    if STREAM:
        if i >= waves:
            begin = program_rank() * share
            left = begin // steps + i - waves
            tile = waves * gl.num_programs(0) + left
            first = gl.maximum(begin - left * steps, 0)
            end = gl.minimum(begin + share - left * steps, steps)
    return tile, first, end


@gluon.jit
def place_of(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(tile row, tile column). Tiles run down GROUP_M rows before the next column, so that concurrent tiles share L2 data."""
    top = tile // (GROUP_M * tiles_n) * GROUP_M
    height = gl.minimum(tiles_m - top, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return top + within % height, within // height


@gluon.jit
def _tile_rows(M, BLOCK_M: gl.constexpr, CLASSES: gl.constexpr):
    """The number of tile rows. Each class of rows has its own."""
    longer = M % CLASSES
    return longer * gl.cdiv(M // CLASSES + 1, BLOCK_M) + (CLASSES - longer) * gl.cdiv(M // CLASSES, BLOCK_M)


@gluon.jit
def _class_of(row, M, BLOCK_M: gl.constexpr, CLASSES: gl.constexpr):
    """(class, first row of the tile within its class, whether this is one of the first classes, which have one row more)."""
    longer = M % CLASSES
    tall = gl.cdiv(M // CLASSES + 1, BLOCK_M)
    low = gl.maximum(gl.cdiv(M // CLASSES, BLOCK_M), 1)
    is_longer = row < longer * tall
    rest = row - longer * tall
    kind = gl.where(is_longer, row // tall, longer + rest // low)
    return kind, gl.where(is_longer, row % tall, rest % low) * BLOCK_M, is_longer


@gluon.jit
def load_tiles(
    x_desc, x_low_desc, w_desc, x_bufs, w_bufs, ring, M, F, tiles_m, tiles_n, steps, waves, share, lead, x_stride,
    X_MAJOR: gl.constexpr, W_MAJOR: gl.constexpr, HALVES: gl.constexpr, N_BOXES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STREAM: gl.constexpr, CLASSES: gl.constexpr, PDL: gl.constexpr = False,
    counters_ptr=None,
):  # fmt: skip
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    BOX_M: gl.constexpr = BLOCK_M // M_BOXES
    BOX_N: gl.constexpr = BLOCK_N // (N_BOXES * HALVES)
    X_BOX: gl.constexpr = x_desc.block_type.shape[0] * x_desc.block_type.shape[1]  # with few rows, the box is only that high
    if PDL:
        gdc_wait()
    at = ring.to_fill()
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        m = row * BLOCK_M
        start = 0
        shift = 0
        is_longer = True
        if CLASSES:
            kind, m, is_longer = _class_of(row, M, BLOCK_M, CLASSES)
            start = lead + kind * x_stride
            shift = start % 8
        if counters_ptr is not None:  # counts the weight rows that other programs of this launch have produced
            gl.static_assert(HALVES == 1, "gate and up rows would be made one after the other, and are wanted together")
            await_rows(counters_ptr, col * BLOCK_N, F, BLOCK_N)
        for step in range(first, end):
            bar = at.fill((M_BOXES * X_BOX + BLOCK_N * BLOCK_K) * x_desc.dtype.primitive_bitwidth // 8)
            k = step * BLOCK_K
            for b in gl.static_range(M_BOXES):
                buf = x_bufs.index(at.stage * M_BOXES + b)
                if CLASSES:
                    if is_longer:
                        load_box(x_desc, [m + b * BOX_M, start - shift + k], bar, buf)
                    else:
                        load_box(x_low_desc, [m + b * BOX_M, start - shift + k], bar, buf)
                elif X_MAJOR == "k":
                    load_box(x_desc, [m + b * BOX_M, k], bar, buf.slice(0, x_desc.block_type.shape[0]))
                else:
                    load_box(x_desc, [k, m + b * BOX_M], bar, buf)
            for b in gl.static_range(N_BOXES):
                for half in gl.static_range(HALVES):
                    n = (col * N_BOXES + b) * BOX_N + half * F
                    buf = w_bufs.index((at.stage * N_BOXES + b) * HALVES + half)
                    if W_MAJOR == "k":
                        load_box(w_desc, [n, k], bar, buf)
                    else:
                        load_box(w_desc, [k - shift, n], bar, buf)
            at = at.next()


# ---- consumers


@gluon.jit
def with_parts(
    blocks, parts_ptr, tickets_ptr, left, first, share, steps, PARTS, wg: gl.constexpr, ELEMENTS: gl.constexpr
):  # fmt: skip
    """Combine the partial sums of a shared tile.

    The program that began the tile adds the other programs' parts to its blocks. Any other program stores its part for it.
    """
    begin = left * steps // share
    ticket_ptr = tickets_ptr + left * 2 + wg
    tile_parts_ptr = parts_ptr + (left.to(gl.int64) * PARTS * 2 + wg) * ELEMENTS
    if first > 0:
        part = program_rank() - begin - 1
        leave_part(blocks, tile_parts_ptr + part * (2 * ELEMENTS), ticket_ptr)
    else:
        others = (left * steps + steps - 1) // share - begin
        blocks = add_parts(blocks, tile_parts_ptr, ticket_ptr, others, 2 * ELEMENTS)
    return blocks


@gluon.jit
def multiply_tiles(
    x_bufs, w_bufs, tile_bufs, ring, turns,
    y_desc, y_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
    M, F, K, tiles_m, tiles_n, steps, waves, share, PARTS, lead, x_stride, residual_stride, y_stride,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, X_MAJOR: gl.constexpr, W_MAJOR: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STREAM: gl.constexpr, CLASSES: gl.constexpr, ACTIVATION: gl.constexpr, VECTOR: gl.constexpr,
    PDL: gl.constexpr, SPAN: gl.constexpr, NARROW: gl.constexpr = False,
):  # fmt: skip
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    N_BOXES: gl.constexpr = w_bufs.shape[0] // STAGES
    ROWS: gl.constexpr = BLOCK_M // M_BOXES
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    M_BOX: gl.constexpr = wg if CONSUMERS == "m" else 0
    N_BOX: gl.constexpr = wg if CONSUMERS == "n" else 0
    TURNS: gl.constexpr = 2 if CONSUMERS == "tiles" else 1
    FIRST: gl.constexpr = wg if CONSUMERS == "tiles" else 0
    ROW_STEP: gl.constexpr = CLASSES if CLASSES else 1
    OWN: gl.constexpr = 1 if CONSUMERS == "n" else N_BOXES
    # If the registers have room for the residual beside the accumulators, it is loaded while the products are computed.
    EARLY: gl.constexpr = residual_ptr is not None and not STREAM and not CLASSES and HALVES * OWN * ROWS * COLS <= 64 * 128
    F = F // VECTOR * VECTOR  # does not change F, but tells the compiler that VECTOR divides it
    y_stride = y_stride // VECTOR * VECTOR
    if PDL:
        gdc_wait()  # in every group of warps that writes, or reads results of the preceding kernel: scales, y, parts, tickets
    passed = steps * FIRST  # stages that the producer filled before this piece, including those for the other consumer's tiles
    for i in range(FIRST, piece_count(tiles_m * tiles_n, waves, share, steps, STREAM), TURNS):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        first_row = row * BLOCK_M + M_BOX * ROWS
        shift = 0
        if CLASSES:
            kind, m, _ = _class_of(row, M, BLOCK_M, CLASSES)
            shift = (lead + kind * x_stride) % 8
            first_row = (m + M_BOX * ROWS) * CLASSES + kind
        held = residual_blocks(
            residual_ptr, first_row, (col * N_BOXES + N_BOX) * COLS, M, F, residual_stride, ROWS, tile_bufs.shape[2],
            OWN * COLS // tile_bufs.shape[2], 256 // x_bufs.dtype.primitive_bitwidth,
        ) if EARLY and HALVES == 1 else None  # fmt: skip
        if TURNS == 2:
            # Barrier parity distinguishes only two rounds: begin only when the other consumer has seen its whole tile arrive.
            mbarrier.wait(turns.index(wg), (i // 2 + 1 - wg) & 1)
        blocks = sum_piece(
            x_bufs, w_bufs, ring, turns, passed, first, end, shift, K, wg, CONSUMERS, X_MAJOR, W_MAJOR,
            ROWS, COLS, BLOCK_K, STAGES, CLASSES, COLS // tile_bufs.shape[2], SPAN, NARROW,
        )  # fmt: skip
        passed += (end - first) * TURNS
        if STREAM:
            if end - first < steps:
                left = tile - waves * gl.num_programs(0)
                blocks = with_parts(blocks, parts_ptr, tickets_ptr, left, first, share, steps, PARTS, wg, ROWS * COLS)
        if first == 0:
            first_col = (col * N_BOXES + N_BOX) * (COLS // HALVES)
            finish_tile(
                blocks, tile_bufs, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
                first_row, first_col, M, F, residual_stride, wg, ACTIVATION, HALVES, ROW_STEP, VECTOR, y_stride, y_scale_ptr,
                held,
            )  # fmt: skip
    if y_desc is not None:
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M", "F", "K", "steps", "waves", "share", "PARTS", "lead", "x_stride", "y_stride"])
def sm90_kernel(
    x_desc, x_low_desc, w_desc, y_desc, y_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, residual_ptr,
    parts_ptr, tickets_ptr, M, F, K, steps, waves, share, PARTS, lead, x_stride, residual_stride, y_stride,
    CONSUMERS: gl.constexpr, X_MAJOR: gl.constexpr, W_MAJOR: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EPILOGUE_N: gl.constexpr, EPILOGUE_BUFS: gl.constexpr, TILE_LAYOUT: gl.constexpr, SPAN: gl.constexpr,
    STREAM: gl.constexpr, CLASSES: gl.constexpr, ACTIVATION: gl.constexpr, VECTOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Launch with at most one program per SM and num_warps=4 (warp specialisation adds the producer and one consumer).

    With CLASSES: x_desc and x_low_desc describe every CLASSES-th row of x, x_low_desc for the classes that have one row less
    than the first ones. `lead` is the number of elements from the descriptors' base to x, x_stride from row to row.
    With STREAM: `waves` is the number of whole tiles per program, `share` the steps of K per program in the remaining tiles,
    and PARTS the largest number of programs that add to a tile begun by another program.
    The rows of y are y_stride apart. If y_desc is None, y is written by ordinary stores of VECTOR elements. SPAN: see
    sm90_mainloop.py. PDL: wait for the preceding launch (launch/pdl.py).
    """
    M_BOXES: gl.constexpr = 2 if CONSUMERS == "m" else 1
    N_BOXES: gl.constexpr = 2 if CONSUMERS == "n" else 3 if BLOCK_N % 3 == 0 else 1
    ROWS: gl.constexpr = BLOCK_M // M_BOXES
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    x_rows: gl.constexpr = ROWS if X_MAJOR == "k" else BLOCK_K
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * M_BOXES, x_rows, BLOCK_K + ROWS - x_rows], x_desc.layout)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * N_BOXES * HALVES] + w_desc.block_type.shape, w_desc.layout)
    w_bufs = w_boxes
    if HALVES == 2:
        w_rows: gl.constexpr = COLS if W_MAJOR == "k" else BLOCK_K
        w_shape: gl.constexpr = [STAGES * N_BOXES, w_rows, BLOCK_K + COLS - w_rows]
        w_layout: gl.constexpr = w_desc.layout
        w_bufs = viewed(w_boxes, w_boxes.dtype, w_shape, w_layout)
    tile_bufs = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [2 * EPILOGUE_BUFS, ROWS, EPILOGUE_N], TILE_LAYOUT)
    ring = new_ring(STAGES, 1 if CONSUMERS == "tiles" else 2)
    turns = barriers(2, 1)
    tiles_m = _tile_rows(M, BLOCK_M, CLASSES if CLASSES else 1)
    tiles_n = gl.cdiv(F * HALVES, BLOCK_N)
    gl.warp_specialize([
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, ring, turns,
            y_desc, y_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
            M, F, K, tiles_m, tiles_n, steps, waves, share, PARTS, lead, x_stride, residual_stride, y_stride,
            0, CONSUMERS, X_MAJOR, W_MAJOR, HALVES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            STREAM, CLASSES, ACTIVATION, VECTOR, PDL, SPAN,
        )),
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, ring, turns,
            y_desc, y_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
            M, F, K, tiles_m, tiles_n, steps, waves, share, PARTS, lead, x_stride, residual_stride, y_stride,
            1, CONSUMERS, X_MAJOR, W_MAJOR, HALVES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            STREAM, CLASSES, ACTIVATION, VECTOR, PDL, SPAN,
        )),
        (load_tiles, (
            x_desc, x_low_desc, w_desc, x_bufs, w_boxes, ring,
            M, F, tiles_m, tiles_n, steps, waves, share, lead, x_stride,
            X_MAJOR, W_MAJOR, HALVES, N_BOXES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, CLASSES, PDL,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
