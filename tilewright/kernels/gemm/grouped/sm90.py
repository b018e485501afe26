"""The host side of sm90_kernel.py: supported problems, tile shapes and TMA descriptors. Exports the Impl `sm90`.

Gathered rows are first put in order by a separate launch, because the copy engine (TMA) reads only adjacent rows.

Refuses: float32, operands whose rows do not start at multiples of 16 bytes, experts' weights with gaps between them, a K that
is no multiple of a step if the weight is dense along N, and gpt-oss's activation, which the shared epilogue does not have.
"""

from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.experts.permute import permute_tokens_op
from tilewright.kernels.gemm.grouped.problem import GROUPED_ACTIVATIONS, GroupedProblem, empty_grouped, most_tiles
from tilewright.kernels.gemm.grouped.sm90_kernel import grouped_sm90_kernel
from tilewright.kernels.gemm.grouped.work import grouped_sm90_work
from tilewright.kernels.gemm.sm90_configs import BLOCK_K_BYTES, GROUP_M, consumer_tile, epilogue_n, ring
from tilewright.kernels.hopper.descriptors import box_layout, card_of, descriptor
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["GROUPED_SM90"]

# BLOCK_M, BLOCK_N, CONSUMERS
_TILES = (
    (128, 256, "m"),
    (256, 128, "m"),
    (128, 128, "m"),
    (128, 128, "tiles"),
    (64, 256, "n"),
    (64, 128, "n"),
)


def _refuse(device: Device, problem: GroupedProblem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    if not problem.aligned:
        return "needs rows that start at multiples of 16 bytes, for the copy engine (TMA)"
    if not problem.packed:
        return "needs the experts' weights stored one after another, without gaps"
    if problem.w_major == "n" and (problem.k * 2) % BLOCK_K_BYTES:
        return "with a weight contiguous along N, needs K to be a multiple of 64: a step must not reach the next expert"
    if problem.activation == "clamped_silu_mul":
        return "does not support the activation clamped_silu_mul"
    if problem.gated and problem.n % 16:
        return "with a gate, needs N to be a multiple of 16, so that both halves begin at a multiple of 8 columns"
    return None


# ---- space


def _tile_refusal(problem: GroupedProblem, block_m: int, block_n: int, consumers: str) -> str | None:
    if (block_m, block_n, consumers) not in _TILES:
        return "not a supported tile: others of this size load less from L2, or fit in the registers"
    cols = consumer_tile({"BLOCK_M": block_m, "BLOCK_N": block_n, "CONSUMERS": consumers})[1]
    if problem.gated and cols < 128:
        return "with a gate, a consumer's tile must be two epilogue blocks wide: one for the gate, one for the up half"
    if block_m > 64 and block_m >= 2 * problem.rows_each:
        return "BLOCK_M is at least twice the number of rows per expert"
    return None


def _default(device: Device, problem: GroupedProblem) -> Config:
    """The tile with the least estimated time. The constants are those of `linear`'s kernel; this one was not measured yet."""
    best, best_cycles = _TILES[-2], float("inf")
    for tile in _TILES:
        block_m, block_n, consumers = tile
        if _tile_refusal(problem, *tile):
            continue
        tiles = problem.experts * ceil_div(problem.rows_each, block_m) * ceil_div(problem.n, block_n)
        product = block_m * block_n * (1.02 if consumers == "tiles" else 1.2) / 2048
        whole = problem.k * max(product, (block_m + block_n) * 2 / 50)
        cycles = ceil_div(tiles, device.sms) * (whole + (360 if consumers == "tiles" else 1800))
        if cycles < best_cycles:
            best, best_cycles = tile, cycles
    return dict(zip(("BLOCK_M", "BLOCK_N", "CONSUMERS"), best, strict=True))


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (64, 128, 256), "BLOCK_N": (128, 256), "CONSUMERS": ("m", "n", "tiles")},
    refusal=lambda device, problem, c: _tile_refusal(problem, c["BLOCK_M"], c["BLOCK_N"], c["CONSUMERS"]),
)


def _launch(
    config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None,
    chosen: int, clear: bool = True,
) -> Tensor:  # fmt: skip
    function, gated = GROUPED_ACTIVATIONS[activation]
    y = empty_grouped(x, weight, activation, order)
    if not y.numel():
        return y
    if order is not None:
        x = permute_tokens_op.run(x.contiguous(), order, chosen, None)
    device = card_of(x)
    (experts, n, k), masked, halves = weight.shape, x.dim() == 3, 1 + gated
    each, x = x.shape[1] if masked else 0, x.flatten(0, -2)
    w_major = "k" if weight.stride(2) == 1 else "n"
    w_matrix = (weight if w_major == "k" else weight.mT).flatten(0, 1)
    rows, cols = consumer_tile(config)
    stages, buffers = ring(device, config)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], BLOCK_K_BYTES // x.element_size()
    w_box = [cols // halves, block_k] if w_major == "k" else [block_k, cols // halves]
    y_box = [rows, epilogue_n(cols)]
    high = experts * ceil_div(each, block_m) if masked else most_tiles(x.shape[0], experts, block_m)
    width = n // halves
    grouped_sm90_kernel[(min(high * ceil_div(n, block_n), device.sms),)](
        descriptor(x, [rows, block_k]), descriptor(w_matrix, w_box), bounds, y, bias, x.shape[0], experts, each, width, k,
        ceil_div(k, block_k),
        CONSUMERS=config["CONSUMERS"], W_MAJOR=w_major, HALVES=halves, MASKED=masked, CLEAR=clear,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, GROUP_M=GROUP_M,
        EPILOGUE_N=y_box[1], EPILOGUE_BUFS=buffers, TILE_LAYOUT=box_layout(y_box, y.dtype),
        ACTIVATION=function, VECTOR=next(v for v in (8, 4, 2, 1) if width % v == 0), num_warps=4,
    )  # fmt: skip
    return y


GROUPED_SM90 = Impl(name="sm90", launch=_launch, space=SPACE, written_for=90, refuse=_refuse, work=grouped_sm90_work)
