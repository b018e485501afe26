"""Max and average pooling of channels-last images, signals and volumes.

    y[n, o, c] = max or mean over the window of o of x[n, i, c]

    # N images, D H W depth, height and width, C channels

    x: [N, D, H, W, C] bf16, fp16 or fp32, contiguous; an image has D = 1, a signal D = H = 1. Along each axis the window of o
    consists of the positions o stride - padding + dilation k, k below kernel, that lie inside the image. With an empty `kernel`
    the window is adaptive, from floor(o in / out) to ceil((o + 1) in / out). y: [N, *out, C].
    Maximum: NaN is the largest value; among equal values the first is chosen. With `indices` its position (d H + h) W + w in
    the image is returned too, int32.
    Average: the sum is divided by the size of the window with its padding (`include_pad`; counted up to in + padding at most),
    by the number of its positions inside the image, or by `divisor`. Sums are float32. All of this agrees with torch.

Memory-bound: x is read once, y is written once; where windows overlap, x comes from L1 and L2. A program computes BLOCK_P
positions of BLOCK_C channels. If a window covers a whole large image, there is only one program per image and BLOCK_C channels.
Not supported: channels first (the public function copies), a mean over dilated windows (torch has none either), fractional
windows.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.kernels.spatial.inputs import avg_pool_arguments, max_pool_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = [
    "AVG_CASES",
    "COUNTS",
    "MAX_CASES",
    "NONE",
    "NUMBERS",
    "ONES",
    "SPACE",
    "Case",
    "Problem",
    "avg_pool_op",
    "count_of",
    "divisor_of",
    "dtype_problem",
    "max_pool_op",
    "place_of",
    "widest",
    "window_matrices",
    "window_sizes",
    "window_start",
    "window_stop",
]


def _max_reference(
    x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], indices: bool
) -> tuple[Tensor, Tensor]:
    taps, place, inside = x.to(torch.promote_types(x.dtype, torch.float32)), torch.zeros((), dtype=torch.int64), torch.ones(())
    # [N, D, H, W, C] becomes [N, out d, K d, out h, K h, out w, K w, C], one axis after the other.
    for axis, (size, o) in enumerate(zip(x.shape[1:4], out, strict=True)):
        start, stop, _ = windows(size, o, *([t[axis] for t in (kernel, stride, padding)] if kernel else (0, 0, 0)), cut=False)
        reach = torch.arange(kernel[axis] if kernel else int((stop - start).max())) * (dilation[axis] if kernel else 1)
        index = start[:, None] + reach
        valid = (index >= 0) & (index < (size if kernel else stop[:, None]))
        index = index.clamp(0, size - 1).to(x.device)
        taps = taps.index_select(2 * axis + 1, index.flatten()).unflatten(2 * axis + 1, index.shape)
        place = place.to(x.device)[..., None, None] * size + index
        inside = inside.to(x.device)[..., None, None] * valid.to(x.device)
    order = (0, 2, 4, 1, 3, 5)
    taps = taps.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4, 6)
    place, inside = (t.permute(order).flatten(3)[..., None] for t in (place, inside.bool()))
    y = taps.masked_fill(~inside, -torch.inf).amax(4)
    first = torch.where(inside & ((taps == y.unsqueeze(4)) | taps.isnan()), place, x.shape[1:4].numel()).amin(4)
    return y.to(x.dtype), first.to(torch.int32) if indices else first.new_empty(0, dtype=torch.int32)


def _avg_reference(
    x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], include_pad: bool, divisor: int | None
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    for axis, inside in enumerate(window_matrices(x.shape[1:4], out, kernel, stride, padding)):
        wide = (wide.movedim(axis + 1, -1) @ inside.to(wide).mT).movedim(-1, axis + 1)
    sizes = window_sizes(x.shape[1:4], out, kernel, stride, padding, include_pad, divisor)
    return (wide / sizes.to(wide)).to(x.dtype).contiguous()


def window_matrices(
    shape: Sequence[int], out: list[int], kernel: list[int], stride: list[int], padding: list[int]
) -> Iterator[Tensor]:
    """For each axis, bool [out, size]: whether a position (column) is in a window (row)."""
    for axis, (size, o) in enumerate(zip(shape, out, strict=True)):
        start, stop, _ = windows(size, o, *([t[axis] for t in (kernel, stride, padding)] if kernel else (0, 0, 0)))
        place = torch.arange(size)
        yield (place >= start[:, None]) & (place < stop[:, None])


def windows(size: int, out: int, kernel: int, stride: int, padding: int, cut: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(first, end, size with padding) of each window along an axis, int64 [out]. kernel 0: adaptive. `cut`: to the image."""
    o = torch.arange(out)
    if not kernel:
        start, stop = o * size // out, ((o + 1) * size + out - 1) // out
        return start, stop, stop - start
    start = o * stride - padding
    stop = (start + kernel).clamp(max=size + padding)
    return (start.clamp(min=0), stop.clamp(max=size), stop - start) if cut else (start, stop, stop - start)


def window_sizes(
    shape: Sequence[int], out: list[int], kernel: list[int], stride: list[int], padding: list[int], include_pad: bool,
    divisor: int | None,
) -> Tensor:  # fmt: skip
    """The divisor of each position of the result: [D, H, W, 1]."""
    sizes = torch.ones(())
    for axis, (size, o) in enumerate(zip(shape, out, strict=True)):
        start, stop, padded = windows(size, o, *([t[axis] for t in (kernel, stride, padding)] if kernel else (0, 0, 0)))
        sizes = sizes[..., None] * (padded if include_pad else stop - start)
    return (sizes if divisor is None else torch.full_like(sizes, divisor))[..., None]


def _max_fake(
    x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], indices: bool
) -> tuple[Tensor, Tensor]:
    y = x.new_empty((x.shape[0], *out, x.shape[4]))
    return y, y.new_empty(y.shape if indices else (0,), dtype=torch.int32)


def _avg_fake(x: Tensor, out: list[int], *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], *out, x.shape[4]))


def _cost(x: Tensor, out: list[int], kernel: list[int], *more: Any) -> Cost:
    places = x.shape[0] * out[0] * out[1] * out[2] * x.shape[4]
    taps = kernel[0] * kernel[1] * kernel[2] if kernel else 1
    indices = 4 if more[-1] is True else 0
    return Cost(flops=places * taps, bytes=x.nbytes + places * (x.element_size() + indices))


# ---- space and examples


class Problem(NamedTuple):
    """The properties that a layer fixes. The number and the size of the images are not part of it."""

    dtype: torch.dtype
    channels: int
    kernel: tuple[int, ...]


def dtype_problem(x: Tensor, kernel: list[int]) -> Problem:
    """The problem of a tensor whose last dimension is its channels."""
    return Problem(x.dtype, x.shape[-1], tuple(kernel))


def _default(device: Device, problem: Problem) -> Config:
    # A thread loads 16 bytes of a position at a time, and 16 to 32 bytes in total.
    block_c = max(16, min(128, next_pow2(problem.channels)))
    return {"BLOCK_P": max(4, min(64, 1024 // block_c)), "BLOCK_C": block_c, "num_warps": 4}


SPACE = Space(
    default=_default,
    axes={"BLOCK_P": (4, 16, 64), "BLOCK_C": (16, 64, 128), "num_warps": (4,)},
    refusal=lambda device, problem, c: (
        "tile over 2048 elements"
        if c["BLOCK_P"] * c["BLOCK_C"] > 2048
        else "tile under 256 elements"
        if c["BLOCK_P"] * c["BLOCK_C"] < 256
        else None
    ),
)


class Case(NamedTuple):
    """An example of pooling: x's shape, the output's size, the window."""

    label: str
    shape: tuple[int, ...]
    out: list[int]
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    dtype: torch.dtype = torch.bfloat16


ONES, NONE = [1, 1, 1], [0, 0, 0]
MAX_CASES = (
    Case("image", (2, 1, 4, 3, 24), [1, 2, 2], [1, 3, 3], [1, 2, 2], [0, 1, 1], ONES),
    Case("volume", (1, 4, 5, 3, 8), [2, 2, 2], [2, 2, 2], [2, 2, 2], NONE, ONES, torch.float16),
    Case("dilated", (1, 1, 1, 17, 5), [1, 1, 7], [1, 1, 3], [1, 1, 2], [0, 0, 1], [1, 1, 3], torch.float32),
    Case("adaptive", (1, 1, 5, 4, 20), [1, 3, 2], [], [], [], []),
    Case("wide", (1, 1, 2, 2, 130), [1, 2, 2], [1, 3, 3], ONES, [0, 1, 1], ONES),
    Case("one", (1, 1, 1, 1, 1), ONES, ONES, ONES, NONE, ONES, torch.float32),
)
AVG_CASES = (*(case for case in MAX_CASES if case.label != "dilated"),)
# (include_pad, divisor) of each of AVG_CASES
COUNTS: tuple[tuple[bool, int | None], ...] = ((True, None), (False, 3), (False, None), (False, None), (True, None))


@Example.of
def _max_example(inputs: Inputs, case: Case) -> tuple[Any, ...]:
    # Rounded numbers, so that some are equal.
    x = inputs.randn(*case.shape, scale=2.0).round().to(case.dtype)
    return x, case.out, case.kernel, case.stride, case.padding, case.dilation, case.label != "volume"


@Example.of
def _avg_example(inputs: Inputs, case: Case, include_pad: bool, divisor: int | None) -> tuple[Any, ...]:
    x = inputs.randn(*case.shape, dtype=case.dtype)
    return x, case.out, case.kernel, case.stride, case.padding, include_pad, divisor


# ---- kernels


@triton.jit
def place_of(rows, depth, height, width):
    """(image, d, h, w) of row indices of [N, D, H, W]."""
    w = rows % width
    rest = rows // width
    h = rest % height
    rest = rest // height
    return rest // depth, rest % depth, h, w


@triton.jit
def window_start(o, size, out, stride, padding, ADAPTIVE: tl.constexpr):
    """The first position of a window along an axis. Negative if it lies in the padding."""
    if ADAPTIVE:
        return o * size // out
    else:
        return o * stride - padding


@triton.jit
def window_stop(o, size, out, stride, padding, KERNEL: tl.constexpr, ADAPTIVE: tl.constexpr):
    """The end of a window along an axis (the position after its last one), at most the end of the padding."""
    if ADAPTIVE:
        return ((o + 1) * size + out - 1) // out
    else:
        return tl.minimum(o * stride - padding + KERNEL, size + padding)


@triton.jit
def _extent(start, stop, size, COUNT: tl.constexpr):
    if COUNT == "window":
        return stop - start
    else:
        return tl.minimum(stop, size) - tl.maximum(start, 0)


@triton.jit
def divisor_of(
    d, h, w, depth, height, width, out_d, out_h, out_w, stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, divisor,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ADAPTIVE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The divisor of the mean over the window of (d, h, w), float32."""
    if COUNT == "fixed":
        return divisor.to(tl.float32)
    else:
        first_d = window_start(d, depth, out_d, stride_d, pad_d, ADAPTIVE)
        first_h = window_start(h, height, out_h, stride_h, pad_h, ADAPTIVE)
        first_w = window_start(w, width, out_w, stride_w, pad_w, ADAPTIVE)
        in_d = _extent(first_d, window_stop(d, depth, out_d, stride_d, pad_d, KD, ADAPTIVE), depth, COUNT)
        in_h = _extent(first_h, window_stop(h, height, out_h, stride_h, pad_h, KH, ADAPTIVE), height, COUNT)
        in_w = _extent(first_w, window_stop(w, width, out_w, stride_w, pad_w, KW, ADAPTIVE), width, COUNT)
        return (in_d * in_h * in_w).to(tl.float32)


# Arguments that vary from image to image, or cost only a multiplication. They are not worth a separate binary each.
NUMBERS = ["n_rows", "depth", "height", "width", "out_d", "out_h", "out_w"]
NUMBERS += [f"{what}_{axis}" for what in ("stride", "pad", "dil") for axis in "dhw"] + ["divisor"]


@triton.jit(do_not_specialize=NUMBERS)
def _max_kernel(
    x_ptr, y_ptr, place_ptr, n_rows, depth, height, width, out_d, out_h, out_w,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
    C: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ADAPTIVE: tl.constexpr, INDICES: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """AT_ONCE taps of a row of the window are loaded before any of them is used."""
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    PARTS: tl.constexpr = (KW + AT_ONCE - 1) // AT_ONCE
    rows = (tl.program_id(0) // TILES) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = (tl.program_id(0) % TILES) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    n, d, h, w = place_of(rows, out_d, out_h, out_w)
    first_d = window_start(d, depth, out_d, stride_d, pad_d, ADAPTIVE)
    first_h = window_start(h, height, out_h, stride_h, pad_h, ADAPTIVE)
    first_w = window_start(w, width, out_w, stride_w, pad_w, ADAPTIVE)
    # An adaptive window has an end of its own. Any other window ends with its last tap, and is cut at the border of the image.
    stop_d = window_stop(d, depth, out_d, stride_d, pad_d, KD, True) if ADAPTIVE else d * 0 + depth
    stop_h = window_stop(h, height, out_h, stride_h, pad_h, KH, True) if ADAPTIVE else h * 0 + height
    stop_w = window_stop(w, width, out_w, stride_w, pad_w, KW, True) if ADAPTIVE else w * 0 + width
    image_ptr = x_ptr + (n.to(tl.int64) * (depth * height * width) * C)[:, None] + cols
    live = (rows < n_rows)[:, None] & (cols < C)
    best = tl.full([BLOCK_P, BLOCK_C], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK_P, BLOCK_C], -1, tl.int32)
    for step in range(KD * KH * PARTS):
        in_d = first_d + step // (KH * PARTS) * dil_d
        in_h = first_h + step // PARTS % KH * dil_h
        row_in = (in_d >= 0) & (in_d < stop_d) & (in_h >= 0) & (in_h < stop_h)
        for i in tl.static_range(AT_ONCE):
            tap = step % PARTS * AT_ONCE + i
            in_w = first_w + tap * dil_w
            inside = (row_in & (tap < KW) & (in_w >= 0) & (in_w < stop_w))[:, None] & live
            place = ((in_d * height + in_h) * width + in_w)[:, None]
            x = tl.load(image_ptr + place.to(tl.int64) * C, mask=inside, other=float("-inf")).to(tl.float32)
            if INDICES:
                better = inside & ((x > best) | (chosen < 0) | ((x != x) & (best == best)))
                chosen = tl.where(better, place, chosen)
                best = tl.where(better, x, best)
            else:
                best = tl.maximum(best, x, tl.PropagateNan.ALL)
    offsets = rows.to(tl.int64)[:, None] * C + cols
    tl.store(y_ptr + offsets, best.to(y_ptr.dtype.element_ty), mask=live)
    if INDICES:
        tl.store(place_ptr + offsets, chosen, mask=live)


@triton.jit(do_not_specialize=NUMBERS)
def _avg_kernel(
    x_ptr, y_ptr, n_rows, depth, height, width, out_d, out_h, out_w,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, divisor,
    C: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ADAPTIVE: tl.constexpr, COUNT: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    PARTS: tl.constexpr = (KW + AT_ONCE - 1) // AT_ONCE
    rows = (tl.program_id(0) // TILES) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = (tl.program_id(0) % TILES) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    n, d, h, w = place_of(rows, out_d, out_h, out_w)
    first_d = window_start(d, depth, out_d, stride_d, pad_d, ADAPTIVE)
    first_h = window_start(h, height, out_h, stride_h, pad_h, ADAPTIVE)
    first_w = window_start(w, width, out_w, stride_w, pad_w, ADAPTIVE)
    stop_d = tl.minimum(window_stop(d, depth, out_d, stride_d, pad_d, KD, ADAPTIVE), depth)
    stop_h = tl.minimum(window_stop(h, height, out_h, stride_h, pad_h, KH, ADAPTIVE), height)
    stop_w = tl.minimum(window_stop(w, width, out_w, stride_w, pad_w, KW, ADAPTIVE), width)
    image_ptr = x_ptr + (n.to(tl.int64) * (depth * height * width) * C)[:, None] + cols
    live = (rows < n_rows)[:, None] & (cols < C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for step in range(KD * KH * PARTS):
        in_d = first_d + step // (KH * PARTS)
        in_h = first_h + step // PARTS % KH
        row_in = (in_d >= 0) & (in_d < stop_d) & (in_h >= 0) & (in_h < stop_h)
        for i in tl.static_range(AT_ONCE):
            tap = step % PARTS * AT_ONCE + i
            in_w = first_w + tap
            inside = (row_in & (tap < KW) & (in_w >= 0) & (in_w < stop_w))[:, None] & live
            place = ((in_d * height + in_h) * width + in_w).to(tl.int64)[:, None]
            total += tl.load(image_ptr + place * C, mask=inside, other=0.0).to(tl.float32)
    share = divisor_of(
        d, h, w, depth, height, width, out_d, out_h, out_w, stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, divisor,
        KD, KH, KW, ADAPTIVE, COUNT,
    )  # fmt: skip
    y = total / (tl.zeros([BLOCK_P], tl.float32) + share)[:, None]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * C + cols, y.to(y_ptr.dtype.element_ty), mask=live)


# ---- launchers and ops


def _at_once(width: int) -> int:
    """The number of taps of a row of a window that a kernel loads together."""
    return min(width, 4)


def widest(size: Sequence[int], out: Sequence[int]) -> list[int]:
    """The largest adaptive window along each axis."""
    return [max((-(-(o + 1) * n // m) - o * n // m) for o in range(m)) for n, m in zip(size, out, strict=True)]


def count_of(kernel: list[int], include_pad: bool, divisor: int | None) -> str:
    """COUNT, which tells the kernels what a mean is divided by."""
    return "fixed" if divisor is not None else "window" if include_pad and kernel else "inside"


def _max_launch(
    config: Config, x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int],
    indices: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, place = _max_fake(x, out, kernel, stride, padding, dilation, indices)
    sizes, channels = list(x.shape[1:4]), x.shape[4]
    rows = y.numel() // channels if channels else 0
    depth, height, width = kernel or widest(sizes, out)
    if rows:
        grid = (ceil_div(rows, config["BLOCK_P"]) * ceil_div(channels, config["BLOCK_C"]),)
        numbers = (rows, *sizes, *out, *(stride or ONES), *(padding or NONE), *(dilation or ONES))
        constants = {"C": channels, "KD": depth, "KH": height, "KW": width, "ADAPTIVE": not kernel, "INDICES": indices}
        launch(_max_kernel, grid, (x, y, place), numbers, {**constants, "AT_ONCE": _at_once(width), **config})
    return y, place


def _avg_launch(
    config: Config, x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], include_pad: bool,
    divisor: int | None,
) -> Tensor:  # fmt: skip
    y = _avg_fake(x, out, kernel, stride, padding, include_pad, divisor)
    sizes, channels = list(x.shape[1:4]), x.shape[4]
    rows = y.numel() // channels if channels else 0
    depth, height, width = kernel or widest(sizes, out)
    if rows:
        grid = (ceil_div(rows, config["BLOCK_P"]) * ceil_div(channels, config["BLOCK_C"]),)
        _avg_kernel[grid](
            x, y, rows, *sizes, *out, *(stride or ONES), *(padding or NONE), divisor or 1,
            C=channels, KD=depth, KH=height, KW=width, ADAPTIVE=not kernel, COUNT=count_of(kernel, include_pad, divisor),
            AT_ONCE=_at_once(width), **config,
        )  # fmt: skip
    return y


max_pool_op = Op(
    name="max_pool",
    reference=_max_reference,
    problem=lambda x, out, kernel, *more: dtype_problem(x, kernel),
    cost=_cost,
    examples=tuple(_max_example(case.label, case) for case in MAX_CASES),
    make=max_pool_arguments,
    fake=_max_fake,
    impls=(Impl(name="triton", launch=_max_launch, space=SPACE, batch_invariant=True),),
)

avg_pool_op = Op(
    name="avg_pool",
    reference=_avg_reference,
    problem=lambda x, out, kernel, *more: dtype_problem(x, kernel),
    cost=_cost,
    examples=tuple(_avg_example(case.label, case, *count) for case, count in zip(AVG_CASES, COUNTS, strict=True)),
    make=avg_pool_arguments,
    fake=_avg_fake,
    impls=(Impl(name="triton", launch=_avg_launch, space=SPACE, batch_invariant=True),),
)
