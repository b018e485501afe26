"""The host side of sm90_kernel.py: supported problems, TMA descriptors, workspaces. Defines the Impls `sm90`, `sm90_invariant`.

The copy engine (TMA) cannot address operands whose rows do not start at multiples of 16 bytes, for example with a K of 4095 or
in an unaligned view. Such operands are handled here, in one of two ways (the config axis UNALIGNED):

    copy     one small launch copies each such operand into rows of a multiple of 128 bytes
    classes  x is read in place, in classes of rows (sm90_kernel.py). Only the weight is copied, into a layout that is dense
             along N. For an x of many rows this copies half as much

The launch that copies also computes the few rows and columns that lie beyond the last whole tile (pad_operands.py).

`sm90_invariant` never splits a tile between programs. So each element of y is a single sum in a fixed order, in whatever tile.
Whether it accepts a problem does not depend on x's layout. An x that TMA cannot address is copied first; otherwise the address
of x would decide which kernel runs, and so the bits of the result could differ.

Refuses: float32, batches, and empty matrices. `sm90_invariant` also refuses activations, and weights that are unaligned or not
dense along K. Operands must be dense along one of their dimensions, which is not checked here.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.pad_operands import Border, align, aligned_base, class_count, is_aligned
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, empty_output
from tilewright.kernels.gemm.quantized_operands import float8_span
from tilewright.kernels.gemm.sm90_configs import (
    BLOCK_K_BYTES,
    GROUP_M,
    INVARIANT_SPACE,
    SPACE,
    consumer_tile,
    epilogue_n,
    evened,
    left_over,
    ring,
    shares,
)
from tilewright.kernels.gemm.sm90_kernel import sm90_kernel
from tilewright.kernels.gemm.work import sm90_work
from tilewright.kernels.hopper.descriptors import box_layout, card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.pdl import launch_options
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch, pointer_kind
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["SM90", "SM90_INVARIANT", "box_rows", "launch_sm90", "pieces"]


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    if problem.batched:
        return "supports a single weight only, not a batch of weights"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    return None


def _refuse_invariant(device: Device, problem: Problem) -> str | None:
    if reason := _refuse(device, problem):
        return reason
    if problem.activation != "none":
        return "does not support activations: the compiler may fuse their products with sums in some tiles only"
    if not problem.w_aligned or problem.w_major != "k" or problem.k % 8 or problem.n % 8:
        return "needs a weight contiguous along K, rows that start at multiples of 16 bytes, and K and N multiples of 8"
    return None


# ---- launcher


def _classes(x: Tensor, box: list[int]) -> tuple[int, int, TensorDescriptor, TensorDescriptor]:
    """Describe x [M, K], dense along K, for reading in classes of rows.

    Returns:
        The number of classes, the elements from the aligned base to x, the descriptor of the classes with one row more, and the
        descriptor of the other classes.
    """
    m, k = x.shape
    stride = x.stride(0)
    classes = class_count(x)
    base, lead = aligned_base(x)
    longer = m % classes

    def of_rows(rows: int, last_class: int) -> TensorDescriptor:
        return descriptor(base, box, [max(rows, 1), lead + last_class * stride + k], [classes * stride, 1])

    low = of_rows(m // classes, classes - 1)
    return classes, lead, of_rows(m // classes + 1, longer - 1) if longer else low, low


def box_rows(rows: int, m: int) -> int:
    """The height of a TMA box for an x of m rows: no higher than needed, because rows outside of x also take copy time.

    The remaining rows of the tile multiply whatever is in shared memory; their results are never stored.
    """
    return min(rows, 1 << max(3, (m - 1).bit_length()))


class _Operands(NamedTuple):
    """x and the weight in the form in which the kernel accepts them."""

    x_desc: TensorDescriptor
    x_low_desc: TensorDescriptor | None
    w_desc: TensorDescriptor
    x_major: str
    w_major: str
    classes: int
    lead: int
    m: int
    width: int
    tiles_m: int
    steps: int
    copied: bool


def _border(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    classes: int,
) -> Border:  # fmt: skip
    """The rows and columns of y that are too few for a tile of their own."""
    rows, cols = left_over(y.shape[0], config["BLOCK_M"] * classes), left_over(y.shape[1], config["BLOCK_N"])
    return Border(x, weight, y, bias, residual, activation, rows, cols)


def _operands(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    rows: int, cols: int,
) -> _Operands:  # fmt: skip
    """TMA descriptors of x and the weight, or of copies where TMA cannot address them. `rows` and `cols` give the box sizes.

    If a copy is made and both operands are dense along K, without a gate, the same launch may also compute the last few rows
    and columns of y, beyond its whole tiles. The returned `m` and `width` then exclude these.
    """
    function, gated = ACTIVATIONS[activation]
    width, halves = y.shape[1], 1 + gated
    (m, k), block_k = x.shape, BLOCK_K_BYTES // x.element_size()
    x_major, x_matrix = ("k", x) if x.stride(1) == 1 else ("m", x.mT)
    w_major, w_matrix = ("k", weight) if weight.stride(1) == 1 else ("n", weight.mT)
    copy_x, copy_w = not is_aligned(x_matrix), not is_aligned(w_matrix)
    split_gate = (
        halves == 2 and width % 8 != 0
    )  # a box cannot begin with the first column of up where that is not 16 bytes aligned
    by_class = copy_x and x_major == "k" and config["UNALIGNED"] == "classes" and not split_gate
    turn_w = (by_class and w_major == "k") or (split_gate and w_major == "n")
    copy_x, copy_w = copy_x and not by_class, copy_w or turn_w
    if copy_x or copy_w:
        border = None
        if x_major == w_major == "k" and not gated:
            classes = class_count(x) if by_class else 1
            border = _border(config, y, x, weight, bias, function, residual, classes)
            m, width = m - border.rows, width - border.cols
        x_made, w_made = align(x_matrix if copy_x else None, w_matrix if copy_w else None, turn_w, border)
        x_matrix = x_matrix if x_made is None else x_made
        w_matrix = w_matrix if w_made is None else w_made
        w_major = w_major if not turn_w else "n" if by_class else "k"
    x_box = [rows if by_class else box_rows(rows, m), block_k] if x_major == "k" else [block_k, rows]
    w_box = [cols // halves, block_k] if w_major == "k" else [block_k, cols // halves]
    w_desc, block_m = descriptor(w_matrix, w_box), config["BLOCK_M"]
    if not by_class:
        x_desc = descriptor(x_matrix, x_box)
        tiles_m, steps = ceil_div(m, block_m), ceil_div(k, block_k)
        return _Operands(x_desc, None, w_desc, x_major, w_major, 0, 0, m, width, tiles_m, steps, copy_x or copy_w)
    classes, lead, x_desc, x_low_desc = _classes(x_matrix[:m], x_box)
    tiles_m = sum(ceil_div((m - j + classes - 1) // classes, block_m) for j in range(classes))
    steps = ceil_div(k + 7, block_k)
    return _Operands(x_desc, x_low_desc, w_desc, x_major, w_major, classes, lead, m, width, tiles_m, steps, copy_w)


def _overlaps(copied: bool, rows: int) -> bool:
    """Whether the product is launched while its operands are still being copied (launch/pdl.py).

    The answer is the same for all row counts in a bucket. The overlap saves 1 us. Large products become up to 10 % slower,
    because their programs then do not start in order.
    """
    return copied and rows <= 4096


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    y = empty_output(x, weight, ACTIVATIONS[activation][1])
    return launch_sm90(config, y, x, weight, bias, activation, residual) if y.numel() else y


class Pieces(NamedTuple):
    """How the tiles of a launch are divided among programs, and the workspace for programs that share a tile."""

    programs: int
    waves: int
    share: int
    parts: int
    scratch: Tensor | None
    counters: Tensor | None
    """Zeros: two counters per shared tile; from index `others` on, the additional counters that the caller requested."""
    others: int


def pieces(config: Config, device: Device, y: Tensor, tiles: int, steps: int, coded: bool, more: int = 0) -> Pieces:
    """Divide `tiles` tiles of `steps` steps of K each among the programs, and allocate the workspace on the device of y.

    `coded` states that the operands have 8 bits. `more` is the number of additional counters.
    """
    sms = evened(tiles, device.sms) if coded and config["SPLIT_K"] == 1 else device.sms
    programs, waves, share, parts = shares(tiles, steps, sms, config["SPLIT_K"])
    others, scratch = 0, None
    if config["SPLIT_K"] != 1:
        left, part = tiles - waves * programs, config["BLOCK_M"] * config["BLOCK_N"]
        scratch = torch.empty(max(1, left * (parts - 1) * part), dtype=torch.float32, device=y.device)
        others = -(-left * 2 // 4) * 4  # a multiple of 16 bytes: Triton specialises kernels on the alignment of pointers
    counters = tickets(y.device, others + more) if scratch is not None or more else None
    return Pieces(programs, waves, share, parts, scratch, counters, others)


def launch_sm90(
    config: Config,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    x_scales: Tensor | None = None,
    w_scales: Tensor | None = None,
    pdl: bool = False,
    y_scale: Tensor | None = None,
) -> Tensor:
    """Fill y [M, F], which must not be empty, and return it. K must not be 0.

    x_scales and w_scales, float32 [M] and [N], multiply the product. With y_scale, one float32, y is int8 or float8 and
    receives the result quantised with that scale. 8-bit operands must be dense along K, with rows that start at multiples of 16
    bytes.
    """
    call = _call(config, y, x, weight, bias, activation, residual, x_scales, w_scales, pdl, y_scale)
    sm90_kernel[(call.programs,)](*call.arguments, **call.constants)
    return y


class _Call(NamedTuple):
    """The grid size and the arguments of a kernel launch."""

    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def _call(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    x_scales: Tensor | None, w_scales: Tensor | None, pdl: bool, y_scale: Tensor | None,
) -> _Call:  # fmt: skip
    function, gated = ACTIVATIONS[activation]
    width, halves = y.shape[1], 1 + gated
    device = card_of(x)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], BLOCK_K_BYTES // x.element_size()
    rows, cols = consumer_tile(config)
    stages, buffers = ring(device, config)
    ready = _operands(config, y, x, weight, bias, activation, residual, rows, cols // (3 if cols % 3 == 0 else 1))
    y_box, y_stride = [rows, epilogue_n(cols, y.element_size())], y.stride(0)
    y_desc = descriptor(y, y_box) if y_stride * y.element_size() % 16 == 0 and not ready.classes else None
    tiles = ready.tiles_m * ceil_div(ready.width * halves, block_n)
    work = pieces(config, device, y, tiles, ready.steps, x.element_size() == 1)
    residual_stride = 0 if residual is None else residual.stride(0)
    arguments = (
        ready.x_desc, ready.x_low_desc, ready.w_desc, y_desc, y, x_scales, w_scales, y_scale, bias, residual,
        work.scratch, work.counters, ready.m, ready.width, x.shape[1], ready.steps, work.waves, work.share, work.parts - 1,
        ready.lead, x.stride(0), residual_stride, y_stride,
    )  # fmt: skip
    constants = {
        "CONSUMERS": config["CONSUMERS"], "X_MAJOR": ready.x_major, "W_MAJOR": ready.w_major, "HALVES": halves,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages, "GROUP_M": GROUP_M,
        "EPILOGUE_N": y_box[1], "EPILOGUE_BUFS": buffers, "TILE_LAYOUT": box_layout(y_box, y.dtype),
        "SPAN": float8_span(x.dtype, x.shape[1]) // block_k, "STREAM": config["SPLIT_K"] != 1, "CLASSES": ready.classes,
        "ACTIVATION": function, "VECTOR": next(v for v in (8, 4, 2, 1) if width % v == 0), "num_warps": 4,
        **launch_options(pdl or _overlaps(ready.copied, x.shape[0])),
    }  # fmt: skip
    return _Call(work.programs, arguments, constants)


SM90 = Impl(name="sm90", launch=_launch, space=SPACE, written_for=90, refuse=_refuse, work=sm90_work)


def _key(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Hashable:
    added = None if residual is None else (residual.stride(), *(pointer_kind(residual) or ()))
    places = x.get_device(), x.dtype, x.shape, x.stride(), weight.shape, weight.stride()
    return *places, pointer_kind(bias), added, *config.values()


def _first_launch(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Plan:  # fmt: skip
    call = _call(config, y, x, weight, bias, "none", residual, None, None, False, None)
    owners = (0, None, 1, 2, 2, None, None, None, 3, 4)  # for each argument, the index of the operand that it points into
    operands = (x, weight, y, bias, residual)
    return Plan(first_launch(sm90_kernel, (call.programs,), call.arguments, call.constants, owners, operands))


_PLANS = Planned(_key, _first_launch)


def _launch_invariant(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:  # fmt: skip
    """Launch through a stored plan (launch/plan.py), which is cheaper on the host.

    A training pass has hundreds of products, and launching them the ordinary way takes longer than computing them.
    """
    if x.stride(1) != 1 or not is_aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    y = empty_output(x, weight, gated=False)
    if y.numel():
        _PLANS.fill(config, y, (x, weight, bias, residual), (x, weight, y, bias, residual))
    return y


SM90_INVARIANT = Impl(
    name="sm90_invariant", launch=_launch_invariant, space=INVARIANT_SPACE, written_for=90, refuse=_refuse_invariant,
    batch_invariant=True, work=sm90_work,
)  # fmt: skip
