"""`grouped_linear` for Hopper, scheduled by hand in Gluon: the kernel of `sm90`.

    y[r] = activation(x[r] @ weight[e]^T + bias[e])        for the rows r of expert e

A block has the same structure as in gemm/sm90_kernel.py: it is persistent, with one producer warp and two consumer warpgroups.
Only the schedule differs: the tiles are those of each expert's rows (hopper/groups.py). The weight is one tall matrix
[X * N, K], in which a tile's boxes start at the rows of its expert. The loop over K and the epilogue are those of `linear`.

    tensor                    written by    read by       synchronisation
    a stage of x and weight   the producer  consumers     `full` of the stage (bytes), `empty` (an arrival of each reader)
    tile_bufs                 a consumer    itself        its own block barrier in the epilogue

A tile's boxes of x may extend beyond its expert's rows, and those of the weight beyond its columns. The results for these are
computed but not stored. With CLEAR, rows that belong to no expert are set to zero at the end, by ordinary stores, row by row.

There is no deadlock. The producer waits only for `empty` of a stage. A consumer waits for `full` of a stage and, if consumers
alternate tiles, for its turn. All of them process the same tiles in the same order, each tile has the same number of steps, and
stages are filled in the order in which they are read. So the stage that a consumer waits for is either filled, or the producer
fills it next, as soon as the stage STAGES before it is released; and that one was read earlier. A consumer passes the turn on
when it has seen its whole tile arrive, for which it waits only for the producer; the consumer whose turn it is waits for no
other. A consumer without further tiles ends without passing the turn on. The other consumer then has no tile left at its next
turn either, because the tiles of a program alternate between them.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# X experts, R rows, M rows of an expert in the masked layout, N rows of an expert's weight, K the shared dimension,
# F columns of the output

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.kernels.gemm.sm90_kernel import place_of
from tilewright.kernels.gemm.sm90_mainloop import sum_piece
from tilewright.kernels.hopper.epilogue import finish_tile
from tilewright.kernels.hopper.groups import Groups
from tilewright.kernels.hopper.primitives import load_box, viewed
from tilewright.kernels.hopper.ring import barriers, new_ring

__all__ = ["clear_unused", "grouped_sm90_kernel", "load_groups"]


@gluon.jit
def load_groups(
    x_desc, w_desc, x_bufs, w_boxes, ring, groups, F, K, steps,
    W_MAJOR: gl.constexpr, HALVES: gl.constexpr, N_BOXES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The producer: loads the boxes of every step of every tile."""
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    BOX_M: gl.constexpr = BLOCK_M // M_BOXES
    BOX_N: gl.constexpr = BLOCK_N // (N_BOXES * HALVES)
    SIZE: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * x_desc.dtype.primitive_bitwidth // 8
    stage = ring.to_fill()
    tile = gl.program_id(0)
    at = groups.first().seek(tile)
    while at.is_tile():
        row, col = place_of(tile - at.before, at.high(), groups.across, GROUP_M)
        m = at.first + row * BLOCK_M
        for step in range(steps):
            bar = stage.fill(SIZE)
            k = step * BLOCK_K
            for b in gl.static_range(M_BOXES):
                load_box(x_desc, [m + b * BOX_M, k], bar, x_bufs.index(stage.stage * M_BOXES + b))
            for b in gl.static_range(N_BOXES):
                for half in gl.static_range(HALVES):
                    n = (col * N_BOXES + b) * BOX_N + half * F
                    buf = w_boxes.index((stage.stage * N_BOXES + b) * HALVES + half)
                    if W_MAJOR == "k":
                        load_box(w_desc, [at.group * (F * HALVES) + n, k], bar, buf)
                    else:
                        load_box(w_desc, [at.group * K + k, n], bar, buf)
            stage = stage.next()
        tile += gl.num_programs(0)
        at = at.seek(tile)


@gluon.jit
def clear_unused(y_ptr, groups, F, VECTOR: gl.constexpr):
    """Set the rows that belong to no expert to zero. The rows are distributed to the programs."""
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [4], [0])
    cols = gl.arange(0, 128 * VECTOR, layout=layout)
    zeros = gl.zeros([128 * VECTOR], y_ptr.dtype.element_ty, layout)
    for group in range(0 if groups.MASKED else groups.X - 1, groups.X):
        first, end = groups.unused(group)
        for row in range(first + gl.program_id(0), end, gl.num_programs(0)):
            for col in range(0, F, 128 * VECTOR):
                gl.store(y_ptr + row.to(gl.int64) * F + col + cols, zeros, mask=col + cols < F)


@gluon.jit
def _multiply_groups(
    x_bufs, w_bufs, tile_bufs, ring, turns, groups, y_ptr, bias_ptr, F, K, steps,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, W_MAJOR: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    ACTIVATION: gl.constexpr, VECTOR: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """A consumer: computes its part of every tile, or every second tile."""
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    N_BOXES: gl.constexpr = w_bufs.shape[0] // STAGES
    ROWS: gl.constexpr = BLOCK_M // M_BOXES
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    M_BOX: gl.constexpr = wg if CONSUMERS == "m" else 0
    N_BOX: gl.constexpr = wg if CONSUMERS == "n" else 0
    TURNS: gl.constexpr = 2 if CONSUMERS == "tiles" else 1
    FIRST: gl.constexpr = wg if CONSUMERS == "tiles" else 0
    F = F // VECTOR * VECTOR  # does not change F, but tells the compiler that VECTOR divides it
    passed = steps * FIRST  # stages that the producer filled before this tile, including those for the other consumer's tiles
    i = steps * 0
    tile = gl.program_id(0) + FIRST * gl.num_programs(0)
    at = groups.first().seek(tile)
    while at.is_tile():
        row, col = place_of(tile - at.before, at.high(), groups.across, GROUP_M)
        if TURNS == 2:
            # Barrier parity distinguishes only two rounds: begin only when the other consumer has seen its whole tile arrive.
            mbarrier.wait(turns.index(wg), (i + 1 - wg) & 1)
        blocks = sum_piece(
            x_bufs, w_bufs, ring, turns, passed, 0, steps, 0, K, wg, CONSUMERS, "k", W_MAJOR,
            ROWS, COLS, BLOCK_K, STAGES, 0, COLS // tile_bufs.shape[2], 0,
        )  # fmt: skip
        passed += steps * TURNS
        own_bias_ptr = bias_ptr
        if bias_ptr is not None:
            own_bias_ptr = bias_ptr + at.group.to(gl.int64) * (F * HALVES)
        finish_tile(
            blocks, tile_bufs, None, y_ptr, None, None, own_bias_ptr, None,
            at.first + row * BLOCK_M + M_BOX * ROWS, (col * N_BOXES + N_BOX) * (COLS // HALVES), at.end, F, 0,
            wg, ACTIVATION, HALVES, 1, VECTOR,
        )  # fmt: skip
        i += 1
        tile += TURNS * gl.num_programs(0)
        at = at.seek(tile)
    if wg == 0 and CLEAR:
        clear_unused(y_ptr, groups, F, VECTOR)


@gluon.jit(do_not_specialize=["R", "X", "M", "F", "K", "steps"])
def grouped_sm90_kernel(
    x_desc, w_desc, bounds_ptr, y_ptr, bias_ptr, R, X, M, F, K, steps,
    CONSUMERS: gl.constexpr, W_MAJOR: gl.constexpr, HALVES: gl.constexpr, MASKED: gl.constexpr,
    CLEAR: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, EPILOGUE_N: gl.constexpr, EPILOGUE_BUFS: gl.constexpr, TILE_LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Launch with at most one program per SM and num_warps=4 (warp specialisation adds the producer and one consumer).

    x_desc: [R, K], in boxes of a consumer's rows. w_desc: [X * N, K], or [X * K, N] if the weight is dense along N. steps: the
    steps of K, at least one. VECTOR divides F.
    """
    M_BOXES: gl.constexpr = 2 if CONSUMERS == "m" else 1
    N_BOXES: gl.constexpr = 2 if CONSUMERS == "n" else 1
    ROWS: gl.constexpr = BLOCK_M // M_BOXES
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * M_BOXES, ROWS, BLOCK_K], x_desc.layout)
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
    groups = Groups(bounds_ptr, X, R, M, gl.cdiv(F * HALVES, BLOCK_N), BLOCK_M, MASKED)
    gl.warp_specialize([
        (_multiply_groups, (
            x_bufs, w_bufs, tile_bufs, ring, turns, groups, y_ptr, bias_ptr, F, K, steps,
            0, CONSUMERS, W_MAJOR, HALVES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, ACTIVATION, VECTOR, CLEAR,
        )),
        (_multiply_groups, (
            x_bufs, w_bufs, tile_bufs, ring, turns, groups, y_ptr, bias_ptr, F, K, steps,
            1, CONSUMERS, W_MAJOR, HALVES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, ACTIVATION, VECTOR, CLEAR,
        )),
        (load_groups, (
            x_desc, w_desc, x_bufs, w_boxes, ring, groups, F, K, steps,
            W_MAJOR, HALVES, N_BOXES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
