"""`grouped_block_scaled_linear` for Hopper, scheduled by hand in Gluon: the kernel of `sm90`.

    y[r] = activation(the sum over blocks b of K of (x[r, b] . weight[e, :, b]) * x_scales[r, b] * w_scales[e, :, b] + bias[e])

The producer and the schedule of groups are those of sm90_kernel.py. Its argument that there is no deadlock holds here as well;
here the consumers share every tile. The sum of the products of 128 columns is that of quantized/block_scaled_sm90_kernel.py.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# X experts, R rows, M rows of an expert in the masked layout, N rows of an expert's weight, K the shared dimension,
# F columns of the output

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.gemm.grouped.sm90_kernel import clear_unused, load_groups
from tilewright.kernels.gemm.quantized.block_scaled_sm90_kernel import _sum_piece
from tilewright.kernels.gemm.sm90_kernel import place_of
from tilewright.kernels.hopper.epilogue import column_blocks, finish_tile
from tilewright.kernels.hopper.groups import Groups
from tilewright.kernels.hopper.primitives import viewed
from tilewright.kernels.hopper.ring import new_ring

__all__ = ["grouped_block_sm90_kernel"]


@gluon.jit
def _multiply_groups(
    x_bufs, w_bufs, tile_bufs, ring, groups, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, F, steps,
    x_m_stride, x_k_stride, w_x_stride, w_n_stride, w_k_stride,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, PART_N: gl.constexpr, OVERLAP: gl.constexpr, ACTIVATION: gl.constexpr,
    VECTOR: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """A consumer: computes its half of every tile."""
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    N_BOXES: gl.constexpr = w_bufs.shape[0] // STAGES
    ROWS: gl.constexpr = BLOCK_M // M_BOXES
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    M_BOX: gl.constexpr = wg if CONSUMERS == "m" else 0
    N_BOX: gl.constexpr = wg if CONSUMERS == "n" else 0
    COUNT: gl.constexpr = ROWS // 64 * (COLS // PART_N)
    PARTS: gl.constexpr = COLS // tile_bufs.shape[2]
    F = F // VECTOR * VECTOR  # does not change F, but tells the compiler that VECTOR divides it
    passed = steps * 0
    tile = gl.program_id(0)
    at = groups.first().seek(tile)
    while at.is_tile():
        row, col = place_of(tile - at.before, at.high(), groups.across, GROUP_M)
        first_row = at.first + row * BLOCK_M + M_BOX * ROWS
        first_col = (col * N_BOXES + N_BOX) * (COLS // HALVES)
        accs = _sum_piece(
            x_bufs, w_bufs, ring, passed, 0, steps, first_row, first_col, at.end, F,
            x_scale_ptr, w_scale_ptr + at.group.to(gl.int64) * w_x_stride, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
            wg, CONSUMERS, HALVES, ROWS, COLS, STAGES, PART_N, OVERLAP, COUNT,
        )  # fmt: skip
        passed += steps
        own_bias_ptr = bias_ptr
        if bias_ptr is not None:
            own_bias_ptr = bias_ptr + at.group.to(gl.int64) * (F * HALVES)
        blocks = ()
        for p in gl.static_range(COUNT):
            blocks += column_blocks(accs[p], PART_N // tile_bufs.shape[2])
        for r in gl.static_range(ROWS // 64):
            row_blocks = ()
            for j in gl.static_range(PARTS):
                row_blocks += (blocks[r * PARTS + j],)
            finish_tile(
                row_blocks, tile_bufs, None, y_ptr, None, None, own_bias_ptr, None,
                first_row + r * 64, first_col, at.end, F, 0, wg, ACTIVATION, HALVES, 1, VECTOR,
            )  # fmt: skip
        tile += gl.num_programs(0)
        at = at.seek(tile)
    if wg == 0 and CLEAR:
        clear_unused(y_ptr, groups, F, VECTOR)


@gluon.jit(do_not_specialize=["R", "X", "M", "F", "K", "steps", "x_m_stride", "x_k_stride"])
def grouped_block_sm90_kernel(
    x_desc, w_desc, bounds_ptr, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, R, X, M, F, K, steps,
    x_m_stride, x_k_stride, w_x_stride, w_n_stride, w_k_stride,
    CONSUMERS: gl.constexpr, HALVES: gl.constexpr, MASKED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, PART_N: gl.constexpr, OVERLAP: gl.constexpr,
    EPILOGUE_N: gl.constexpr, EPILOGUE_BUFS: gl.constexpr, TILE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr,
    VECTOR: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """Launch with at most one program per SM and num_warps=4 (warp specialisation adds the producer and one consumer).

    x_desc: [R, K], w_desc: [X * N, K]. steps: the steps of K, at least one. VECTOR divides F. OVERLAP: see
    quantized/block_scaled_sm90_kernel.py.
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
    groups = Groups(bounds_ptr, X, R, M, gl.cdiv(F * HALVES, BLOCK_N), BLOCK_M, MASKED)
    gl.warp_specialize([
        (_multiply_groups, (
            x_bufs, w_bufs, tile_bufs, ring, groups, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, F, steps,
            x_m_stride, x_k_stride, w_x_stride, w_n_stride, w_k_stride,
            0, CONSUMERS, HALVES, BLOCK_M, BLOCK_N, STAGES, GROUP_M, PART_N, OVERLAP, ACTIVATION, VECTOR, CLEAR,
        )),
        (_multiply_groups, (
            x_bufs, w_bufs, tile_bufs, ring, groups, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, F, steps,
            x_m_stride, x_k_stride, w_x_stride, w_n_stride, w_k_stride,
            1, CONSUMERS, HALVES, BLOCK_M, BLOCK_N, STAGES, GROUP_M, PART_N, OVERLAP, ACTIVATION, VECTOR, CLEAR,
        )),
        (load_groups, (
            x_desc, w_desc, x_bufs, w_boxes, ring, groups, F, K, steps,
            "k", HALVES, N_BOXES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
