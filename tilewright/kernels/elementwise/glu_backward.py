"""The gradients of y = f(gate) * up, both in one pass: dgate = dy up f'(gate), dup = dy f(gate).

    dy, gate, up: [..., F] of bf16, fp16 or fp32. Their rows may be strided, like the rows of the halves of one [..., 2 F]
    projection. f: silu, gelu (erf), gelu_tanh, sigmoid or relu. The result is one [..., 2 F] tensor, as the gradient of that
    projection needs it: dgate then dup, or dup then dgate (torch's `glu` has the gate in the second half). Computed in float32,
    rounded once.

Memory-bound: three elements in, two out. f(gate) is computed again; the forward pass saves nothing for it.
Not supported: a gradient of the gradient.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import gelu, gelu_tanh, sigmoid, silu
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.elementwise.activation_backward import gelu_slope, gelu_tanh_slope, silu_slope
from tilewright.kernels.elementwise.glu import SPACE
from tilewright.kernels.elementwise.inputs import gated_backward_arguments
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.row_space import Rows, row_problem
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["gated_backward_op"]


def _reference(dy: Tensor, gate: Tensor, up: Tensor, kind: str, gate_first: bool) -> Tensor:
    aten, wide = torch.ops.aten, torch.promote_types(gate.dtype, torch.float32)
    g, z, u = dy.to(wide), gate.to(wide), up.to(wide)
    if kind == "silu":
        act, dgate = F.silu(z), aten.silu_backward(g * u, z)
    elif kind in ("gelu", "gelu_tanh"):
        form = "tanh" if kind == "gelu_tanh" else "none"
        act, dgate = F.gelu(z, approximate=form), aten.gelu_backward(g * u, z, approximate=form)
    elif kind == "sigmoid":
        act = z.sigmoid()
        dgate = aten.sigmoid_backward(g * u, act)
    else:
        act, dgate = z.relu(), aten.threshold_backward(g * u, z, 0.0)
    both = (dgate, g * act) if gate_first else (g * act, dgate)
    return torch.cat(both, -1).to(gate.dtype)


def _cost(dy: Tensor, gate: Tensor, up: Tensor, kind: str, gate_first: bool) -> Cost:
    return Cost(flops=15 * gate.numel(), bytes=5 * gate.nbytes)


# ---- space and examples


def _default(device: Device, problem: Rows) -> Config:
    # As in the forward pass: the widest block that wastes less than an eighth of the lanes at the end of a row.
    fitting = [b for b in (1024, 256) if -problem.cols % b * 8 < problem.cols]
    block_f = min(fitting[0] if fitting else 256, next_pow2(problem.cols))
    return {"BLOCK_T": max(1, 1024 // block_f), "BLOCK_F": block_f, "num_warps": 4}


_SPACE = Space(
    default=_default,
    axes={"BLOCK_T": (1, 2, 4, 8, 16), "BLOCK_F": (64, 256, 1024, 2048), "num_warps": (4,)},
    refusal=lambda device, problem, c: (
        "tile over 2048 elements" if c["BLOCK_T"] * c["BLOCK_F"] > 2048 else SPACE.refusal(device, problem, c)
    ),
)


@Example.of
def _example(
    inputs: Inputs, kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16, merged: bool = True, gate_first: bool = True
) -> tuple[Tensor, Tensor, Tensor, str, bool]:
    dy, cols = inputs.randn(*shape, dtype=dtype), shape[-1]
    if not merged:
        return dy, inputs.randn(*shape, dtype=dtype), inputs.randn(*shape, dtype=dtype), kind, gate_first
    both = inputs.randn(*shape[:-1], 2 * cols, dtype=dtype)
    return dy, both[..., :cols], both[..., cols:], kind, gate_first


EXAMPLES = (
    _example("merged", "silu", 3, 256),
    _example("ragged", "gelu", 2, 3, 100),
    _example("tanh", "gelu_tanh", 5, 64, dtype=torch.float16, merged=False),
    _example("glu", "sigmoid", 4, 72, dtype=torch.float32, gate_first=False),
    _example("reglu", "relu", 4, 80),
    _example("one", "silu", 1, 1, dtype=torch.float32),
    _example("wide", "gelu", 2, 2100, dtype=torch.float32),
)


@triton.jit(do_not_specialize=["n_rows", "dy_row_stride", "gate_row_stride", "up_row_stride"])
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, d_ptr, n_rows, dy_row_stride, gate_row_stride, up_row_stride,
    F: tl.constexpr, ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    rows = ((tl.program_id(0) // TILES) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    cols = (tl.program_id(0) % TILES) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask = (rows < n_rows) & (cols < F)
    dy = tl.load(dy_ptr + row_start(rows, dy_row_stride, F) + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row_start(rows, gate_row_stride, F) + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row_start(rows, up_row_stride, F) + cols, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        act, slope = silu(gate), silu_slope(gate)
    elif ACTIVATION == "gelu":
        act, slope = gelu(gate), gelu_slope(gate)
    elif ACTIVATION == "gelu_tanh":
        act, slope = gelu_tanh(gate), gelu_tanh_slope(gate)
    elif ACTIVATION == "sigmoid":
        act = sigmoid(gate)
        slope = act * (1.0 - act)
    else:
        act, slope = tl.where(gate < 0, 0.0, gate), tl.where(gate <= 0, 0.0, 1.0)
    d_row_ptr = d_ptr + rows * (2 * F) + cols
    dtype = d_ptr.dtype.element_ty
    tl.store(d_row_ptr + (0 if GATE_FIRST else F), (dy * up * slope).to(dtype), mask=mask)
    tl.store(d_row_ptr + (F if GATE_FIRST else 0), (dy * act).to(dtype), mask=mask)


def _launch(config: Config, dy: Tensor, gate: Tensor, up: Tensor, kind: str, gate_first: bool) -> Tensor:
    cols = gate.shape[-1]
    d = torch.empty((*gate.shape[:-1], 2 * cols), dtype=gate.dtype, device=gate.device)
    rows, dy_row_stride = rows_of(dy)
    if rows:
        grid = (ceil_div(rows, config["BLOCK_T"]) * ceil_div(cols, config["BLOCK_F"]),)
        launch(
            _gated_backward_kernel, grid, (dy, gate, up, d), (rows, dy_row_stride, rows_of(gate)[1], rows_of(up)[1]),
            {"F": cols, "ACTIVATION": kind, "GATE_FIRST": gate_first, **config},
        )  # fmt: skip
    return d


gated_backward_op = Op(
    name="gated_backward",
    reference=_reference,
    problem=lambda dy, gate, *_: row_problem(gate),
    cost=_cost,
    examples=EXAMPLES,
    make=gated_backward_arguments,
    impls=(Impl(name="triton", launch=_launch, space=_SPACE, batch_invariant=True),),
)
