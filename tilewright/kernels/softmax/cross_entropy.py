"""Cross-entropy of rows of logits with one target class per row: the losses, and in the same pass the gradient of the logits.

    p[t, j]    = exp(x[t, j] - lse[t]),     lse[t] = log(sum_j exp(x[t, j]))
    loss[t]    = lse[t] - (1 - s) x[t, id] - s mean_j x[t, j] + z lse[t]^2                      s: label smoothing, z: z-loss
    grad[t, j] = scale[t] (p[t, j] (1 + 2 z lse[t]) - s / V - (1 - s) [j = id])

    x: [T, V] of bf16, fp16 or fp32; targets: [T] int64; loss: [T] float32; scale: [T] float32; grad: [T, V] of x's dtype

A row whose target is `ignore_index` has loss and gradient 0. A target outside of [0, V) gives NaN, and reads nothing outside of
the row. All arithmetic is float32; no float32 copy of the logits is made.

**Why the gradient comes with the loss.** The gradient is the softmax with two corrections. The kernel that has a row on chip
for its loss can write the gradient at once. So a training step reads the logits once and writes once (Hsu et al., "Liger
Kernel", 2024), whereas separate forward and backward passes read twice. The gradient that arrives from later operations is a
single factor if losses are summed or averaged, and nearly always 1. There are three ops: `cross_entropy` computes only the
losses, `cross_entropy_gradient` both, and `cross_entropy_gradient_in_place` both, with the gradient in the memory of the
logits.

Limited by bytes: V elements in, and with the gradient V out. A row that does not fit into registers is read again from L1 and
L2, and each thread keeps a running maximum (explained in softmax.py and device/multi_pass_rows.py). Rows may be strided, but
the last dimension may not. With gradients, on GPUs that support it, several programs share a wide row
(cross_entropy_cooperative.py) and read it once. Not supported: targets that are probabilities. Class weights are not an
argument; callers can include them in the rows' scales.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.cooperative_rows import SPLIT_SPACE
from tilewright.kernels.device.multi_pass_rows import columns, load_block, store_block
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import ceil_div, rows_of
from tilewright.kernels.softmax.cross_entropy_cooperative import launch_split, refuse_split, row_ends
from tilewright.kernels.softmax.inputs import cross_entropy_arguments, cross_entropy_gradient_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["cross_entropy_gradient_in_place_op", "cross_entropy_gradient_op", "cross_entropy_op"]

# ---- reference


def _row_losses(wide: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float) -> Tensor:
    """The losses of rows in float32 or wider; NaN if a target is out of range."""
    inside = (targets >= 0) & (targets < wide.shape[1])
    lse = wide.logsumexp(1)
    loss = lse + z_loss * lse.square()
    if wide.shape[1]:
        chosen = wide.gather(1, targets.where(inside, 0)[:, None])[:, 0]
        loss = loss - (1 - smoothing) * chosen
    if smoothing:
        loss = loss - smoothing * wide.mean(1)
    return loss.masked_fill(~inside, torch.nan).masked_fill(targets == ignore_index, 0.0)


def _reference(logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _row_losses(wide, targets, ignore_index, smoothing, z_loss)


def _gradient_reference(
    logits: Tensor, targets: Tensor, scale: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = _row_losses(wide, targets, ignore_index, smoothing, z_loss)
    vocab = wide.shape[1]
    lse = wide.logsumexp(1, keepdim=True)
    hit = torch.arange(vocab, device=logits.device) == targets[:, None]
    grad = (wide - lse).exp() * (1 + 2 * z_loss * lse) - smoothing / max(vocab, 1) - (1 - smoothing) * hit.to(wide.dtype)
    grad = (grad * scale[:, None]).masked_fill(loss.isnan()[:, None], torch.nan)
    return loss, grad.masked_fill((targets == ignore_index)[:, None], 0.0).to(logits.dtype)


def _in_place_reference(
    logits: Tensor, targets: Tensor, scale: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    loss, grad = _gradient_reference(logits, targets, scale, ignore_index, smoothing, z_loss)
    logits.copy_(grad)
    return loss


def _cost(logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float) -> Cost:
    return Cost(flops=5 * logits.numel(), bytes=logits.nbytes + 16 * targets.numel())


def _gradient_cost(logits: Tensor, targets: Tensor, *_: Any) -> Cost:
    return Cost(flops=10 * logits.numel(), bytes=2 * logits.nbytes + 16 * targets.numel())


# ---- space and examples


class Problem(NamedTuple):
    """All properties that a config may depend on; not the number of rows."""

    dtype: torch.dtype
    vocab: int
    gradient: bool


def _default(device: Device, problem: Problem) -> Config:
    # The choices of softmax.py, whose memory accesses are the same.
    widest = 32768 // problem.dtype.itemsize
    held = 2 if problem.gradient else 1  # H100, 4096 x 131072 bf16: 802 us, with three held 815 (a copy: 711)
    if problem.vocab > widest:
        # Rows that do not start at multiples of 16 bytes are loaded element by element. Small blocks keep more loads in flight.
        odd = problem.vocab * problem.dtype.itemsize % 16
        return {"BLOCK_V": 2048 if odd else widest, "HELD": held, "num_warps": 32}
    block_v = next(width for width in SPACE.axes["BLOCK_V"] if width >= problem.vocab)
    return {"BLOCK_V": block_v, "HELD": 1, "num_warps": 4 if block_v <= 2048 else 8 if block_v == 4096 else 16}


def _refusal(device: Device, problem: Problem, c: Config) -> str | None:
    block_v, warps = c["BLOCK_V"], c["num_warps"]
    if problem.vocab > block_v:
        if block_v not in (2048, 8192, 16384) or warps < (32 if block_v == 2048 else 16):
            return "rows wider than BLOCK_V need larger blocks or more warps, to keep more loads in flight"
        return "over 32 elements per thread" if block_v > 1024 * warps else None
    if c["HELD"] > 1:
        return "HELD must be 1 if one block holds the whole row"
    if block_v > next((width for width in SPACE.axes["BLOCK_V"] if width >= problem.vocab), block_v):
        return "BLOCK_V wider than the row needs"
    if not 16 <= max(block_v, 1024) // (8 * warps) <= 128:
        return "under 4 or over 32 elements per thread"
    return None


_BLOCKS: dict[str, tuple[int, ...]] = {"BLOCK_V": (64, 512, 1024, 2048, 4096, 8192, 16384), "num_warps": (4, 8, 16, 32)}
SPACE = Space(default=_default, axes={**_BLOCKS, "HELD": (1, 2, 3)}, refusal=_refusal)
LOSS_SPACE = Space(default=_default, axes={**_BLOCKS, "HELD": (1,)}, refusal=_refusal)


@Example.of
def _example(
    inputs: Inputs, rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16, *, smoothing: float = 0.0, z_loss: float = 0.0,
    row_stride: int = 0, ids: tuple[int, ...] = (), masked: int = 0,
) -> tuple[Tensor, Tensor, int, float, float]:  # fmt: skip
    """`ids` replaces the first targets; -100 is ignored. `masked`: the number of last logits that are -inf."""
    logits = inputs.randn(rows, row_stride or vocab, dtype=dtype, scale=3.0)[:, :vocab]
    logits[:, vocab - masked :] = -torch.inf
    targets = inputs.randint(0, vocab - masked, rows)
    targets[: len(ids)] = inputs.tensor(ids, torch.int64)
    return logits, targets, -100, smoothing, z_loss


EXAMPLES = (
    _example("rows", 4, 1000, ids=(999, -100)),
    _example("smoothed", 3, 333, torch.float16, smoothing=0.1, z_loss=1e-3, ids=(0,)),
    _example("strided", 5, 40, torch.float32, row_stride=48, ids=(-100, 40, -1)),
    _example("classes", 20, 10, z_loss=1e-2, ids=(3, 10)),
    _example("one", 1, 1, torch.float32),
    _example("wide", 2, 16500, ids=(16499, -100), masked=7),
    _example("many blocks", 2, 40001, torch.float32, smoothing=0.2, z_loss=1e-4, ids=(40000, 2)),
    _example("no rows", 0, 7),
)


def _with_scale(inputs: Inputs, logits: Tensor, *rest: Any) -> tuple[Any, ...]:
    targets, *options = rest
    return logits, targets, inputs.randn(logits.shape[0]).abs() + 0.1, *options


# ---- kernel

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _take(top, mass, total, x, block, V: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr, SMOOTHED: tl.constexpr):
    """Add a block's columns to a thread's maximum, to its sum of exponentials relative to that, and to its plain sum."""
    x = x.to(tl.float32)
    higher = tl.maximum(top, tl.max(x, axis=1))
    mass = mass * tl.exp2((top - higher) * _LOG2E) + tl.sum(tl.exp2((x - higher[:, None]) * _LOG2E), axis=1)
    if SMOOTHED:
        total += tl.sum(tl.where(columns(block, BLOCK_V) < V, x, 0.0) if MASKED else x, axis=1)
    return higher, mass, total


@triton.jit
def _gradient(x, cols, top, rate, target, ignored, scale, smoothing, V: tl.constexpr):
    """scale (rate exp(x - top) - smoothing / V - (1 - smoothing) [column = target]), 0 where ignored."""
    y = tl.exp2((x.to(tl.float32) - top) * _LOG2E) * rate - smoothing / V
    y = tl.where(cols == target, y - (1.0 - smoothing), y) * scale
    return tl.where(ignored, 0.0, y)


@triton.jit
def _wide_row(
    x_ptr, y_ptr, loss_ptr, target, scale, ignore_index, smoothing, z_loss,
    V: tl.constexpr, GRADIENT: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK_V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Process one row that is wider than a block; the pointers point to its start. The last HELD blocks stay in registers."""
    LAST: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V - 1
    FIRST_HELD: tl.constexpr = LAST + 1 - min(HELD, LAST)
    RAGGED: tl.constexpr = V % BLOCK_V != 0
    inside = (target >= 0) & (target < V)
    chosen = tl.load(x_ptr + target, mask=inside, other=0.0).to(tl.float32)
    # If a thread has seen only -inf, it must not subtract -inf from -inf. So its maximum starts at the lowest finite float.
    top = tl.full([BLOCK_V // 8], _LOWEST, tl.float32)
    mass = tl.zeros([BLOCK_V // 8], tl.float32)
    total = tl.zeros([BLOCK_V // 8], tl.float32)
    for i in range(FIRST_HELD):
        x = load_block(x_ptr, i, V, BLOCK_V, False, "again" if GRADIENT else "last time", float("-inf"))
        top, mass, total = _take(top, mass, total, x, i, V, BLOCK_V, False, SMOOTHED)
    held = ()
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        held = held + (load_block(x_ptr, block, V, BLOCK_V, RAGGED and block == LAST, "once", float("-inf")),)
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        x = held[block - FIRST_HELD]
        top, mass, total = _take(top, mass, total, x, block, V, BLOCK_V, RAGGED and block == LAST, SMOOTHED)
    row_top = tl.max(top, axis=0)
    row_mass = tl.sum(mass * tl.exp2((top - row_top) * _LOG2E), axis=0)
    loss, lse = row_ends(row_top, row_mass, tl.sum(total, axis=0), chosen, target, ignore_index, smoothing, z_loss, V)
    tl.store(loss_ptr, loss)
    if GRADIENT:
        ignored = target == ignore_index
        rate = tl.where(inside, (1.0 + 2.0 * z_loss * lse) / row_mass, float("nan"))
        for block in tl.static_range(LAST, FIRST_HELD - 1, -1):
            cols = columns(block, BLOCK_V)
            y = _gradient(held[block - FIRST_HELD], cols, row_top, rate, target, ignored, scale, smoothing, V)
            store_block(y_ptr, block, y, V, BLOCK_V, RAGGED and block == LAST)
        for i in range(FIRST_HELD):
            j = FIRST_HELD - 1 - i
            x = load_block(x_ptr, j, V, BLOCK_V, False, "last time", float("-inf"))
            y = _gradient(x, columns(j, BLOCK_V), row_top, rate, target, ignored, scale, smoothing, V)
            store_block(y_ptr, j, y, V, BLOCK_V, False)


@triton.jit(
    do_not_specialize=["n_rows", "x_row_stride", "y_row_stride", "scale_stride", "ignore_index"],
    do_not_specialize_on_alignment=["targets_ptr", "scale_ptr"],
)
def _cross_entropy_kernel(
    x_ptr, targets_ptr, scale_ptr, loss_ptr, y_ptr,
    n_rows, x_row_stride, y_row_stride, scale_stride, ignore_index, smoothing, z_loss,
    V: tl.constexpr, GRADIENT: tl.constexpr, SMOOTHED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    if V <= BLOCK_V:
        rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        cols = tl.arange(0, BLOCK_V)[None, :]
        mask = (rows < n_rows) & (cols < V)
        target = tl.load(targets_ptr + rows, mask=rows < n_rows, other=0)
        x = tl.load(x_ptr + row_start(rows, x_row_stride, V) + cols, mask=mask, other=float("-inf")).to(tl.float32)
        top = tl.max(x, axis=1, keep_dims=True)
        mass = tl.sum(tl.exp2((x - top) * _LOG2E), axis=1, keep_dims=True)
        # Taken from registers: in memory the gradient may already have overwritten it.
        chosen = tl.sum(tl.where(cols == target, x, 0.0), axis=1, keep_dims=True)
        total = tl.sum(tl.where(cols < V, x, 0.0), axis=1, keep_dims=True) if SMOOTHED else mass * 0.0
        loss, lse = row_ends(top, mass, total, chosen, target, ignore_index, smoothing, z_loss, V)
        tl.store(loss_ptr + rows, loss, mask=rows < n_rows)
        if GRADIENT:
            scale = tl.load(scale_ptr + rows * scale_stride, mask=rows < n_rows, other=0.0)
            inside = (target >= 0) & (target < V)
            rate = tl.where(inside, (1.0 + 2.0 * z_loss * lse) / mass, float("nan"))
            y = _gradient(x, cols, top, rate, target, target == ignore_index, scale, smoothing, V)
            tl.store(y_ptr + row_start(rows, y_row_stride, V) + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets_ptr + row)
        scale = tl.load(scale_ptr + row * scale_stride) if GRADIENT else 1.0
        _wide_row(
            x_ptr + row_start(row, x_row_stride, V), y_ptr + row_start(row, y_row_stride, V), loss_ptr + row, target, scale,
            ignore_index, smoothing, z_loss, V, GRADIENT, SMOOTHED, BLOCK_V, HELD,
        )  # fmt: skip


# ---- launchers and ops


def _run(
    config: Config, logits: Tensor, targets: Tensor, scale: Tensor | None, grad: Tensor | None,
    ignore_index: int, smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    rows, vocab = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block_t = max(1, min(16, 2048 // config["BLOCK_V"]))
    if rows:
        _cross_entropy_kernel[(ceil_div(rows, block_t),)](
            logits, targets, loss if scale is None else scale, loss, logits if grad is None else grad,
            rows, rows_of(logits)[1], vocab if grad is None else rows_of(grad)[1], 0 if scale is None else scale.stride(0),
            ignore_index, smoothing, z_loss,
            V=vocab, GRADIENT=grad is not None, SMOOTHED=smoothing != 0, BLOCK_T=block_t, **config,
        )  # fmt: skip
    return loss


def _launch(config: Config, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float) -> Tensor:
    return _run(config, logits, targets, None, None, ignore_index, smoothing, z_loss)


def _impls(in_place: bool) -> tuple[Impl, ...]:
    """The implementations of losses with gradient. The gradient has memory of its own, or overwrites the logits."""

    def launch(run: Callable[..., Tensor], config: Config, logits: Tensor, targets: Tensor, scale: Tensor, *rest: Any) -> Any:
        grad = logits if in_place else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        loss = run(config, logits, targets, scale, grad, *rest)
        return loss if in_place else (loss, grad)

    return (
        Impl(
            name="split", launch=lambda *args: launch(launch_split, *args), space=SPLIT_SPACE, refuse=refuse_split,
            batch_invariant=True, interpretable=False,
        ),
        Impl(name="triton", launch=lambda *args: launch(_run, *args), space=SPACE, batch_invariant=True),
    )  # fmt: skip


cross_entropy_op = Op(
    name="cross_entropy",
    reference=_reference,
    problem=lambda logits, *_: Problem(logits.dtype, logits.shape[1], False),
    cost=_cost,
    examples=EXAMPLES,
    make=cross_entropy_arguments,
    impls=(Impl(name="triton", launch=_launch, space=LOSS_SPACE, batch_invariant=True),),
)

cross_entropy_gradient_op = Op(
    name="cross_entropy_gradient",
    reference=_gradient_reference,
    problem=lambda logits, *_: Problem(logits.dtype, logits.shape[1], True),
    cost=_gradient_cost,
    examples=tuple(example.then(_with_scale) for example in EXAMPLES),
    make=cross_entropy_gradient_arguments,
    impls=_impls(False),
)

cross_entropy_gradient_in_place_op = Op(
    name="cross_entropy_gradient_in_place",
    reference=_in_place_reference,
    problem=lambda logits, *_: Problem(logits.dtype, logits.shape[1], True),
    cost=_gradient_cost,
    examples=tuple(example.then(_with_scale) for example in EXAMPLES),
    make=cross_entropy_gradient_arguments,
    mutates=("logits",),
    impls=_impls(True),
)
