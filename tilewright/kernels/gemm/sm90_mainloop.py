"""The main loop of sm90_kernel.py: the products of a consumer for one piece of work, as a single sum or in spans.

The tensor cores of sm_90 keep some 14 bits of a sum of float8 products, and the error grows with the number of terms. With
SPAN, the tensor cores sum only SPAN steps at a time; each such sum is then added in float32 to a total in registers. For
accumulators of up to 64 x 128 elements the registers have room for three of them. Then two accumulators alternate: while the
tensor cores compute one, the other is added to the total. This costs nothing with a span of two steps, and 6 % with one step.
Accumulators of 64 x 192 consist of three boxes; each box is added to the total just before its next products begin.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.hopper.epilogue import column_blocks
from tilewright.kernels.hopper.primitives import release

__all__ = ["sum_piece"]


@gluon.jit
def _clear_outside(buf, k, K):
    """Set to zero the elements of other rows in a window of x that starts at column k."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    cols = k + gl.expand_dims(gl.arange(0, buf.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    x = buf.load(layout)
    buf.store(gl.where((cols >= 0) & (cols < K), x, 0.0).to(x.dtype))
    fence_async_shared()


@gluon.jit
def _waited(pendings: gl.constexpr, accs):
    """Wait until at most `pendings` products are in flight, and return the tuple."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(pendings, deps=accs),)
    else:
        return warpgroup_mma_wait(pendings, deps=accs)


@gluon.jit
def _zeros(dtype: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, OWN: gl.constexpr, NARROW: gl.constexpr = False):
    """A tuple of OWN zero accumulators for operands of `dtype`."""
    # One instruction consumes 32 bytes of K. For int8, Triton supports instructions of up to 224 columns.
    INTEGERS: gl.constexpr = dtype == gl.int8
    N: gl.constexpr = 128 if (INTEGERS or NARROW) and COLS > 128 else COLS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 256 // dtype.primitive_bitwidth]
    )
    accs = ()
    for _ in gl.static_range(OWN):
        accs += (gl.zeros([ROWS, COLS], gl.int32 if INTEGERS else gl.float32, layout),)
    return accs


@gluon.jit
def _own_rows(x_bufs, stage, wg: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """The part of a stage of x that one consumer multiplies."""
    return x_bufs.index(stage * (x_bufs.shape[0] // STAGES) + (wg if CONSUMERS == "m" else 0))


@gluon.jit
def _start_products(
    x, w_bufs, stage, accs, use_acc, wg: gl.constexpr, CONSUMERS: gl.constexpr, W_MAJOR: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Start the products of x with one consumer's weight boxes of a stage. Each box accumulates into its entry of accs."""
    started = ()
    for b in gl.static_range(len(accs)):
        w = w_bufs.index(stage * (w_bufs.shape[0] // STAGES) + (wg if CONSUMERS == "n" else b))
        if W_MAJOR == "k":
            w = w.permute((1, 0))
        started += (warpgroup_mma(x, w, accs[b], use_acc=use_acc, is_async=True),)
    return started


@gluon.jit
def _sum_steps(
    x_bufs, w_bufs, at, turns, first, end, shift, K,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, X_MAJOR: gl.constexpr, W_MAJOR: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CLASSES: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    """One consumer's product over the steps [first, end), a tuple of [ROWS, COLS]. Stages are released as they are consumed."""
    # The number of weight boxes that this consumer multiplies by.
    OWN: gl.constexpr = 1 if CONSUMERS == "n" else w_bufs.shape[0] // STAGES
    accs = _zeros(x_bufs.dtype, ROWS, COLS, OWN, NARROW)
    for step in range(first, end):
        at.wait()
        x = _own_rows(x_bufs, at.stage, wg, CONSUMERS, STAGES)
        if CLASSES:
            k = step * BLOCK_K - shift
            if (k < 0) | (k + BLOCK_K > K):
                _clear_outside(x, k, K)
        if X_MAJOR != "k":
            x = x.permute((1, 0))
        started = _start_products(x, w_bufs, at.stage, accs, step > first, wg, CONSUMERS, W_MAJOR, STAGES)
        # One step's products stay in flight. Earlier ones are complete: the producer may overwrite the stages they read.
        accs = _waited(OWN, started)
        at.give_back_last(pred=step > first)
        at = at.next()
    if CONSUMERS == "tiles":
        release(turns.index(1 - wg))
    accs = _waited(0, accs)
    at.give_back_last()
    return accs


@gluon.jit
def _sum_span(
    x_bufs, w_bufs, at, steps, room, before, totals,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(the sums of `steps` steps, in the registers of `room`; `totals` + `before`)."""
    OWN: gl.constexpr = len(room)
    at.wait()
    added = ()
    for b in gl.static_range(OWN):
        added += (totals[b] + before[b],)
    x = _own_rows(x_bufs, at.stage, wg, CONSUMERS, STAGES)
    started = _start_products(x, w_bufs, at.stage, room, False, wg, CONSUMERS, "k", STAGES)
    # As arguments of the wait, the additions cannot be moved behind it by the compiler.
    waited = warpgroup_mma_wait(OWN, deps=started + added)
    accs = ()
    totals = ()
    for b in gl.static_range(OWN):
        accs += (waited[b],)
        totals += (waited[OWN + b],)
    for _ in range(1, steps):
        at = at.next()
        at.wait()
        x = _own_rows(x_bufs, at.stage, wg, CONSUMERS, STAGES)
        accs = _waited(OWN, _start_products(x, w_bufs, at.stage, accs, True, wg, CONSUMERS, "k", STAGES))
        at.give_back_last()
    accs = _waited(0, accs)
    at.give_back()
    return accs, totals


@gluon.jit
def _sum_spans(
    x_bufs, w_bufs, ring, passed, steps,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """The sums of at least two steps, in spans of at most SPAN + 1 steps that are added in float32.

    `passed` is the number of stages filled before. If the registers have room for two accumulators, a span is added to the
    total while the tensor cores compute the next one. Otherwise each box is added just before its next products begin. The
    second consumer's spans end half a span before those of the first.
    """
    OWN: gl.constexpr = 1 if CONSUMERS == "n" else w_bufs.shape[0] // STAGES
    BOTH: gl.constexpr = OWN * ROWS * COLS <= 64 * 128
    EARLIER: gl.constexpr = SPAN // 2 * wg
    even = _zeros(x_bufs.dtype, ROWS, COLS, OWN)
    odd = _zeros(x_bufs.dtype, ROWS, COLS, OWN)
    totals = _zeros(x_bufs.dtype, ROWS, COLS, OWN)
    pairs = gl.cdiv(steps + EARLIER - 1, 2 * SPAN)
    start = 0
    for pair in range(pairs):
        middle = gl.minimum((2 * pair + 1) * SPAN - EARLIER, steps - 1)
        end = gl.where(pair == pairs - 1, steps, (2 * pair + 2) * SPAN - EARLIER)
        even, totals = _sum_span(
            x_bufs, w_bufs, ring.after(passed + start), middle - start, even if BOTH else odd, odd, totals,
            wg, CONSUMERS, STAGES,
        )  # fmt: skip
        odd, totals = _sum_span(
            x_bufs, w_bufs, ring.after(passed + middle), end - middle, odd if BOTH else even, even, totals,
            wg, CONSUMERS, STAGES,
        )  # fmt: skip
        start = end
    sums = ()
    for b in gl.static_range(OWN):
        sums += (totals[b] + odd[b],)
    return sums


@gluon.jit
def sum_piece(
    x_bufs, w_bufs, ring, turns, passed, first, end, shift, K,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, X_MAJOR: gl.constexpr, W_MAJOR: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CLASSES: gl.constexpr,
    COUNT: gl.constexpr, SPAN: gl.constexpr, NARROW: gl.constexpr = False,
):  # fmt: skip
    """One consumer's product over the steps [first, end) of a piece: for each box, COUNT blocks of columns in float32.

    SPAN: the number of steps in one sum, or 0 for a single sum. With spans, x and the weight must be dense along K, and both
    consumers must work on the same tile. NARROW: use instructions of at most 128 columns. Instructions of 256 columns need more
    registers than programs of 512 threads are launched with.
    """
    if SPAN:
        gl.static_assert(CONSUMERS != "tiles", "consumers that take turns at tiles would wait for each other for ever")
        gl.static_assert(X_MAJOR == "k" and W_MAJOR == "k" and not CLASSES, "codes are dense along K")
        if end - first > SPAN:
            accs = _sum_spans(x_bufs, w_bufs, ring, passed, end - first, wg, CONSUMERS, ROWS, COLS, STAGES, SPAN)
        else:
            accs = _sum_steps(
                x_bufs, w_bufs, ring.after(passed), turns, first, end, shift, K,
                wg, CONSUMERS, X_MAJOR, W_MAJOR, ROWS, COLS, BLOCK_K, STAGES, CLASSES, NARROW,
            )  # fmt: skip
    else:
        accs = _sum_steps(
            x_bufs, w_bufs, ring.after(passed), turns, first, end, shift, K,
            wg, CONSUMERS, X_MAJOR, W_MAJOR, ROWS, COLS, BLOCK_K, STAGES, CLASSES, NARROW,
        )  # fmt: skip
    blocks = ()
    for b in gl.static_range(len(accs)):
        blocks += column_blocks(accs[b], COUNT)
    return blocks
