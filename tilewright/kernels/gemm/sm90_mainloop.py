"""The sums of sm90_kernel.py: what a consumer multiplies of a piece of work, in one sum or in spans.

The tensor cores of sm_90 keep some 14 bits of a sum of float8 products; what is lost of it grows with the number of terms.
With SPAN a sum of so many steps ends in float32 and is added to a total in registers. Where these hold three times what a
consumer sums, up to 64 x 128 numbers, two sums take turns: while the tensor cores form one, the other is added, which costs
nothing every two steps (6 % every step). Sums of 64 x 192 are three boxes, each added just before its next one begins.
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
    """Zero what a window of x that starts at column k holds of other rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    cols = k + gl.expand_dims(gl.arange(0, buf.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    x = buf.load(layout)
    buf.store(gl.where((cols >= 0) & (cols < K), x, 0.0).to(x.dtype))
    fence_async_shared()


@gluon.jit
def _waited(pendings: gl.constexpr, accs):
    """The tuple, when no more than so many products are in flight."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(pendings, deps=accs),)
    else:
        return warpgroup_mma_wait(pendings, deps=accs)


@gluon.jit
def _zeros(dtype: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, OWN: gl.constexpr, NARROW: gl.constexpr = False):
    """OWN sums of nothing, of operands of `dtype`."""
    # An instruction takes 32 bytes of K. Triton knows those of int8 up to 224 columns.
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
    """What one consumer multiplies of a stage of x."""
    return x_bufs.index(stage * (x_bufs.shape[0] // STAGES) + (wg if CONSUMERS == "m" else 0))


@gluon.jit
def _start_products(
    x, w_bufs, stage, accs, use_acc, wg: gl.constexpr, CONSUMERS: gl.constexpr, W_MAJOR: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Begin the products of x with one consumer's boxes of a stage of the weight, a sum in the registers of accs for each."""
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
    """One consumer's product over the steps [first, end), a tuple of [ROWS, COLS]; gives the stages back as it goes."""
    # Boxes of the weight that this consumer multiplies by.
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
        # One step's products stay in flight. Those before are over: the producer may overwrite what they read.
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
    """The sums of so many steps, in the registers of `room`, and the totals with `before` added to them."""
    OWN: gl.constexpr = len(room)
    at.wait()
    added = ()
    for b in gl.static_range(OWN):
        added += (totals[b] + before[b],)
    x = _own_rows(x_bufs, at.stage, wg, CONSUMERS, STAGES)
    started = _start_products(x, w_bufs, at.stage, room, False, wg, CONSUMERS, "k", STAGES)
    # Named in the wait, the additions are not put off until after it.
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
    """The sums of steps, two at least, in spans of at most SPAN + 1 that float32 adds; passed: stages filled before.

    A span is added while the tensor cores form the next, where the registers hold both; else as much of it as lets them begin.
    The second consumer's spans end half a span before the first one's.
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
    """One consumer's product over the steps [first, end) of a piece, as COUNT blocks of columns of each box, in float32.

    SPAN: 0, or of how many steps one sum is made; then x and the weight are dense along K, and consumers share a tile. NARROW:
    instructions of 128 columns at most; of 256 they take more registers than programs of 512 threads are launched with.
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
