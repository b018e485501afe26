"""Gated activations: the elementwise middle of a feed-forward layer.

    silu_mul: y = gate * sigmoid(gate) * up
    gelu_mul: y = gate * Phi(gate) * up, with erf, or the tanh approximation (Hendrycks and Gimpel, "GELUs", 2016)
    gated_mul: y = sigmoid(gate) * up (Dauphin et al., "Gated Convolutional Networks", 2017), or relu(gate) * up (Shazeer,
        "GLU Variants Improve Transformer", 2020)

    gate, up, y: [..., F] of bf16, fp16 or fp32. gate and up are usually the two halves of one merged [..., 2F] projection, so
    rows may be strided. The last dimension may not. The whole expression is computed in float32 and rounded once.

Memory-bound: two elements in, one out.
The gradients are in glu_backward.py. Not supported: a last dimension with a stride other than 1 (the public functions copy such
a tensor first).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import gelu, gelu_tanh, silu
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.elementwise.inputs import gated_arguments, gated_mul_arguments, gelu_arguments
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.row_space import Rows, row_problem
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of, rows_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["GATES", "gated_mul", "gated_mul_op", "gelu_mul", "gelu_mul_op", "silu_mul", "silu_mul_op"]

GATES = ("relu", "sigmoid")
"""The gates of `gated_mul`. silu and gelu have ops of their own, which are fused with products and quantisers."""


def _silu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return _gated_by(F.silu, gate, up)


def _gelu_reference(gate: Tensor, up: Tensor, approximate: bool) -> Tensor:
    return _gated_by(partial(F.gelu, approximate="tanh" if approximate else "none"), gate, up)


def _gated_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _gated_by(torch.sigmoid if kind == "sigmoid" else torch.relu, gate, up)


def _gated_by(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (act(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _cost(gate: Tensor, up: Tensor, *_: Any) -> Cost:
    return Cost(flops=5 * gate.numel(), bytes=3 * gate.nbytes)


def _gelu_cost(gate: Tensor, up: Tensor, approximate: bool) -> Cost:
    return Cost(flops=10 * gate.numel(), bytes=3 * gate.nbytes)


# ---- space and examples


def _default(device: Device, problem: Rows) -> Config:
    # The widest block that wastes less than an eighth of the lanes at the end of a row; up to 16 elements of each input per
    # thread.
    fitting = [b for b in (2048, 1024, 512, 256) if -problem.cols % b * 8 < problem.cols]
    block_f = min(fitting[0] if fitting else 256, next_pow2(problem.cols))
    return {"BLOCK_T": max(1, 1024 // block_f), "BLOCK_F": block_f, "num_warps": 4}


SPACE = Space(
    default=_default,
    axes={"BLOCK_T": (1, 2, 4, 8, 16), "BLOCK_F": (64, 128, 256, 512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
    refusal=lambda device, problem, c: (
        "tile over 4096 elements"
        if c["BLOCK_T"] * c["BLOCK_F"] > 4096
        else "tile under 512 elements"
        if c["BLOCK_T"] * c["BLOCK_F"] < 512
        else "BLOCK_F wider than the row needs"
        if c["BLOCK_F"] >= 2 * problem.cols and c["BLOCK_F"] > 64
        else None
    ),
)


@Example.of
def _example(
    inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype, merged: bool, *kind: bool | str
) -> tuple[Tensor | bool | str, ...]:
    """gate and up as two tensors, or as the halves of one projection (`merged`); then the options of the activation."""
    if not merged:
        return inputs.randn(*shape, dtype=dtype), inputs.randn(*shape, dtype=dtype), *kind
    both = inputs.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)
    return both[..., : shape[-1]], both[..., shape[-1] :], *kind


_CASES = (
    ("merged", (3, 256), torch.bfloat16, True),
    ("ragged", (2, 3, 100), torch.bfloat16, True),
    ("separate", (5, 64), torch.float16, False),
    ("one", (1, 1), torch.float32, False),
    ("wide", (2, 2500), torch.float32, True),
)
SILU_EXAMPLES = tuple(_example(*case) for case in _CASES)
GELU_EXAMPLES = tuple(
    _example(f"{label} {form}".strip(), *case, bool(form)) for form in ("", "tanh") for label, *case in _CASES
)
GATED_EXAMPLES = tuple(_example(f"{kind} {label}", *case, kind) for kind in GATES for label, *case in _CASES)


@triton.jit(do_not_specialize=["n_rows", "gate_row_stride", "up_row_stride"])
def _gated_kernel(
    gate_ptr, up_ptr, y_ptr, n_rows, gate_row_stride, up_row_stride,
    F: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    rows = ((tl.program_id(0) // TILES) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    cols = (tl.program_id(0) % TILES) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask = (rows < n_rows) & (cols < F)
    gate = tl.load(gate_ptr + row_start(rows, gate_row_stride, F) + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row_start(rows, up_row_stride, F) + cols, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = silu(gate) * up
    elif ACTIVATION == "gelu":
        y = gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        y = gelu_tanh(gate) * up
    elif ACTIVATION == "sigmoid":
        y = up / (1.0 + tl.exp(-gate))
    else:
        y = tl.where(gate < 0, 0.0, gate) * up
    tl.store(y_ptr + rows * F + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# ---- launchers and ops


def _gated(config: Config, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    cols = gate.shape[-1]
    rows, gate_row_stride = rows_of(gate)
    if rows:
        grid = (ceil_div(rows, config["BLOCK_T"]) * ceil_div(cols, config["BLOCK_F"]),)
        numbers = (rows, gate_row_stride, rows_of(up)[1])
        launch(_gated_kernel, grid, (gate, up, y), numbers, {"F": cols, "ACTIVATION": activation, **config})
    return y


def _impl(space: Space, kind: Callable[..., str]) -> Impl:
    """kind: returns the name of the activation, from the op's arguments after gate and up."""

    def launch(config: Config, gate: Tensor, up: Tensor, *rest: Any) -> Tensor:
        return _gated(config, gate, up, kind(*rest))

    return Impl(name="triton", launch=launch, space=space, batch_invariant=True)


silu_mul_op = Op(
    name="silu_mul",
    reference=_silu_reference,
    problem=row_problem,
    cost=_cost,
    examples=SILU_EXAMPLES,
    make=gated_arguments,
    impls=(_impl(SPACE, lambda: "silu"),),
)

gelu_mul_op = Op(
    name="gelu_mul",
    reference=_gelu_reference,
    problem=row_problem,
    cost=_gelu_cost,
    examples=GELU_EXAMPLES,
    make=gelu_arguments,
    impls=(_impl(SPACE, lambda approximate: "gelu_tanh" if approximate else "gelu"),),
)

# A small space, because no tuned model spends much time in these two gates.
_GATED_SPACE = Space(
    default=_default,
    axes={"BLOCK_T": (1, 4, 16), "BLOCK_F": (64, 256, 1024), "num_warps": (4,)},
    refusal=SPACE.refusal,
)

gated_mul_op = Op(
    name="gated_mul",
    reference=_gated_reference,
    problem=row_problem,
    cost=_cost,
    examples=GATED_EXAMPLES,
    make=gated_mul_arguments,
    impls=(_impl(_GATED_SPACE, lambda kind: kind),),
)


# ---- public functions


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up without gradients. `ops.silu_mul` describes the arguments."""
    _check("silu_mul", gate, up)
    return silu_mul_op(rows_ready(gate), rows_ready(up))


def gelu_mul(gate: Tensor, up: Tensor, approximate: bool = False) -> Tensor:
    """gelu(gate) * up without gradients. `ops.gelu_mul` describes the arguments."""
    _check("gelu_mul", gate, up)
    return gelu_mul_op(rows_ready(gate), rows_ready(up), approximate)


def gated_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """f(gate) * up, f one of `GATES`, without gradients. `ops.gated_mul` describes the arguments."""
    if kind not in GATES:
        raise ValueError(f"gated_mul: kind is {kind!r}, wanted one of {', '.join(GATES)}")
    _check("gated_mul", gate, up)
    return gated_mul_op(rows_ready(gate), rows_ready(up), kind)


def _check(op: str, gate: Tensor, up: Tensor) -> None:
    if gate.dim() == 0 or up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            f"{op}: gate and up must have one shape and dtype, and a last dimension; got {tuple(gate.shape)} {gate.dtype}, "
            f"{tuple(up.shape)} {up.dtype}"
        )
