"""The mean and the variance of each channel of a batch, and the running ones moved towards them: batch norm's first half.

    # N images, S places of an image (height x width, or time), C channels; n = N S values a channel
    mean[c] = sum x[:, :, c] / n,   variance[c] = sum (x[:, :, c] - mean[c])^2 / n
    running_mean += momentum (mean - running_mean),   running_var += momentum (n / (n - 1) variance - running_var)

    x: [N, S, C] of bf16, fp16 or fp32, dense in memory as [N, S, C] (channels last) or as [N, C, S].
    mean, variance: [C] float32; running_mean, running_var: [C] of bf16, fp16 or fp32, or None, both.

Two launches (Ioffe and Szegedy, "Batch Normalization", 2015, the statistics alone): programs sum their places, of x minus its
first value, which keeps a variance from being the difference of two large sums; then the parts are added in the order of their
numbers, the same bits every time.

Limited by bytes: x is read once. Not supported: one value a channel, running_mean without running_var, other layouts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.autograd import dense
from tilewright.kernels.launch.replay import Held, Prepared, launch, pointer_kind
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.kernels.norm.channel.inputs import batch_statistics_arguments
from tilewright.kernels.norm.channel.sums_and_affine import (
    CHANNEL_SPACE,
    channel_problem,
    channels_last,
    parts_kernel,
    places_at_once,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["JOIN", "Again", "batch_statistics_op", "join_rows", "launched", "part_grid"]


def _reference(x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float) -> tuple[Tensor, Tensor]:
    """(mean, variance)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mean = x.to(wide).mean((0, 1))
    variance = (x.to(wide) - mean).square().mean((0, 1))
    if running_mean is not None and running_var is not None:
        count = x.shape[0] * x.shape[1]
        for running, now in ((running_mean, mean), (running_var, variance * (count / max(count - 1, 1)))):
            running.copy_(running.to(wide) + momentum * (now - running.to(wide)))
    return mean, variance


# ---- cost, examples


def _cost(x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float) -> Cost:
    vectors = 8 * x.shape[2] + 2 * sum(t.nbytes for t in (running_mean, running_var) if t is not None)
    return Cost(flops=3 * x.numel(), bytes=x.nbytes + vectors)


@Example.of
def _example(
    inputs: Inputs, n: int, s: int, c: int, dtype: torch.dtype, vectors: torch.dtype = torch.float32, *, last: bool = True,
    running: bool = True, mean: float = 0.0,
) -> tuple[object, ...]:  # fmt: skip
    x, first, second, momentum = batch_statistics_arguments(inputs, B=n, M=s, N=c, dtype=dtype, first=not last)
    kept = (first.to(vectors), second.to(vectors)) if running else (None, None)
    return x + mean if mean else x, *kept, momentum


EXAMPLES = (
    # The error of a mean is that of values, which are some units, so it is not near zero.
    _example("channels last", 1, 300, 48, torch.bfloat16, mean=3.0),
    _example("channels first", 3, 70, 5, torch.float16, torch.float16, last=False, mean=-2.0),
    _example("far from zero", 2, 65, 40, torch.float32, mean=20.0),
    _example("none running", 1, 9, 300, torch.float16, running=False, mean=1.0),
    _example("two values", 2, 1, 16, torch.float32, last=False),
)


@triton.jit
def join_rows(first_ptr, second_ptr, rows, C, c, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sums of two [rows, C] over their rows, of channels c [COLS]."""
    row = tl.arange(0, ROWS)
    first = tl.zeros([ROWS, COLS], tl.float32)
    second = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, rows, ROWS):
        mask = (start + row < rows)[:, None] & (c < C)[None, :]
        at = (start + row).to(tl.int64)[:, None] * C + c[None, :]
        first += tl.load(first_ptr + at, mask=mask, other=0.0)
        second += tl.load(second_ptr + at, mask=mask, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _move(running_ptr, now, momentum, c, mask):
    before = tl.load(running_ptr + c, mask=mask, other=0.0).to(tl.float32)
    after = before + momentum * (now - before)
    tl.store(running_ptr + c, after.to(running_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "C", "step", "count"])
def _join_kernel(
    x_ptr, first_ptr, second_ptr, running_mean_ptr, running_var_ptr, mean_ptr, variance_ptr, rows, C, step, count, momentum,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`step`: elements of x from channel to channel."""
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mask = c < C
    first, second = join_rows(first_ptr, second_ptr, rows, C, c, ROWS, COLS)
    gap = first / count
    mean = tl.load(x_ptr + c.to(tl.int64) * step, mask=mask, other=0.0).to(tl.float32) + gap
    variance = second / count - gap * gap
    tl.store(mean_ptr + c, mean, mask=mask)
    tl.store(variance_ptr + c, variance, mask=mask)
    if running_mean_ptr is not None:
        _move(running_mean_ptr, mean, momentum, c, mask)
        _move(running_var_ptr, variance * (count.to(tl.float32) / (count - 1)), momentum, c, mask)


# ---- launcher and op

JOIN = {"ROWS": 128, "COLS": 16}
"""A tile of parts: a row of 16 numbers is a sector of 64 bytes, and few programs wait long for many rows."""


def part_grid(config: Config, x: Tensor) -> tuple[tuple[int, int, int], int]:
    """(grid of `parts_kernel` for x [N, S, C], blocks of places a program): four programs an SM where there are places enough.

    Parts are [grid[2] * N, C].
    """
    n, s, c = x.shape
    groups, blocks = ceil_div(c, config["BLOCK_C"]), ceil_div(s, config["BLOCK_S"])
    share = ceil_div(blocks, min(blocks, ceil_div(4 * device_of(x.get_device()).sms, n * groups)))
    return (n, groups, ceil_div(blocks, share)), share


class Again(NamedTuple):
    """The launches of one call, to be made again on other memory."""

    parts: Prepared
    join: Prepared
    rows: int
    """Of parts."""
    channels: int

    def launch(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
    ) -> tuple[Tensor, Tensor]:
        """(mean, variance). Only addresses are read of the tensors: the rest is as in the first call."""
        c, options = self.channels, {"dtype": torch.float32, "device": x.device}
        sums, mean, variance = torch.empty(2 * self.rows * c, **options), torch.empty(c, **options), torch.empty(c, **options)
        at, first = x.data_ptr(), sums.data_ptr()
        second = first + 4 * self.rows * c
        self.parts((at, at, at, at, at, first, second))
        running = (0, 0) if running_mean is None or running_var is None else (running_mean.data_ptr(), running_var.data_ptr())
        self.join((at, first, second, *running, mean.data_ptr(), variance.data_ptr(), float(momentum)))
        return mean, variance


_HELD = Held()


def _key(config: Config, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None) -> Any:
    kinds = (pointer_kind(t) for t in (x, running_mean, running_var))
    return (x.get_device(), x.shape, x.stride(), *kinds, *config.values())


def launched(*args: Any) -> Again | None:
    """What makes the launches of a call of `batch_statistics_op` again, by any momentum; None where it launched nothing."""
    return _HELD.get(_key(batch_statistics_op.chosen(*args).config, *args[:3]))


def _launch(
    config: Config, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    kept = dense(running_mean), dense(running_var)
    if running_mean is not None and running_var is not None and (kept[0] is not running_mean or kept[1] is not running_var):
        found = _launch(config, x, *kept, momentum)
        running_mean.copy_(kept[0])
        running_var.copy_(kept[1])
        return found
    key = _key(config, x, running_mean, running_var)
    held: Again | None = _HELD.get(key)
    if held is not None:
        return held.launch(x, running_mean, running_var, momentum)
    n, s, c = x.shape
    mean, variance = (torch.empty(c, dtype=torch.float32, device=x.device) for _ in range(2))
    if not x.numel():
        return mean.fill_(float("nan")), variance.fill_(float("nan"))
    grid, share = part_grid(config, x)
    rows, vector, last = grid[2] * n, places_at_once(x), channels_last(x)
    sums = torch.empty(2, rows, c, dtype=torch.float32, device=x.device)
    layout = {"C": c, "VECTOR": vector, "LAST": last}
    constants = {**layout, "SHIFT": "first", "HAS_DY": False, "RELU": False, **config}
    parts = launch(parts_kernel, grid, (x, x, x, x, x, *sums.unbind(0)), (s // vector, n, 0, share), constants)
    operands = (x, *sums.unbind(0), running_mean, running_var, mean, variance)
    numbers = (rows, c, 1 if last else s, n * s)
    join = launch(_join_kernel, (ceil_div(c, JOIN["COLS"]),), operands, numbers, JOIN, (float(momentum),))
    if parts is not None and join is not None:
        _HELD.keep(key, Again(parts, join, rows, c))
    return mean, variance


batch_statistics_op = Op(
    name="batch_statistics",
    reference=_reference,
    problem=channel_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=batch_statistics_arguments,
    mutates=("running_mean", "running_var"),
    impls=(Impl(name="triton", launch=_launch, space=CHANNEL_SPACE),),
)
