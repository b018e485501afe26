"""The second product of low-rank adapters in a gated feed-forward layer, with the layer's activation.

    # T tokens, F features, S loaded adapters, R rank, C chunks; y = [gate | up] [T, 2 F]
    out = silu(gate') * up',   where [gate' | up'] is what `lora_expand_add` makes of y, rounded to y's dtype

y [T, 2 F], b [S, 2 F, R], out [T, F]: of the same dtype, bf16, fp16 or fp32. h [C, T, 2 R] float32, scales [S, 2] float32 and
adapters [4, T] int32 as for `lora_expand_add`, for two equal parts. The results have the bits of `lora_expand_add` followed by
`silu_mul`, except that zeros of tokens without an adapter may lose their sign. y keeps its values. The activation is applied to
tokens without an adapter, too.

Limited by memory bandwidth. `lora_expand_add` would write y, and `silu_mul` would read it again.

| implementation | how                                                                                                |
|----------------|----------------------------------------------------------------------------------------------------|
| direct         | one launch; a program has the same columns of both halves, in the order of `expand_direct.py`      |
| separate       | `lora_expand_add` on a copy of y, then `silu_mul`, for everything that `direct` does not accept    |

`direct` accepts bf16 and fp16, ranks of 16 and 32, and F in whole blocks of 64.

Not supported: gradients, other activations, quantised adapters.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import silu
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.elementwise.glu import silu_mul_op
from tilewright.kernels.gemm.lora.expand import arguments, check, lora_expand_add_op
from tilewright.kernels.gemm.lora.expand_direct import COLUMNS, offsets_b, offsets_y, product, scaled_sum
from tilewright.kernels.gemm.lora.problem import Problem, along, tile_at, tiles_of, wait
from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import launch_options, overlaps
from tilewright.kernels.launch.shapes import rows_of
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["lora_expand_silu_mul", "lora_expand_silu_mul_op"]

# ---- reference


def _reference(y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, chained: bool) -> Tensor:
    total, half = y.clone(), y.shape[1] // 2
    lora_expand_add_op.reference(total, h, b, scales, adapters, half, 2 * half, chained)
    gate, up = total.to(h.dtype).chunk(2, -1)
    return (F.silu(gate) * up).to(y.dtype)


def _cost(y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, chained: bool) -> Cost:
    held = min(b.shape[0], y.shape[0])
    return Cost(flops=2 * y.numel() * b.shape[2] + 3 * y.numel(), bytes=3 * y.nbytes // 2 + h.nbytes + held * b[:1].nbytes)


# ---- space and examples


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return "only bf16 and fp16 have these products on tensor cores"
    if problem.rank not in (16, 32):
        return "the rank is neither 16 nor 32"
    if problem.wide // 2 % COLUMNS:
        return f"a half does not consist of blocks of {COLUMNS} columns"
    return None


def _default(device: Device, problem: Problem) -> Config:
    for steps, warps in ((2, 1), (1, 1)):
        if problem.wide // 2 % (COLUMNS * steps * warps) == 0:
            return {"STEPS": steps, "num_warps": warps}
    return {"STEPS": 1, "num_warps": 1}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    if problem.wide // 2 % (COLUMNS * c["STEPS"] * c["num_warps"]):
        return "a half does not consist of whole programs"
    return None


SPACE = Space(default=_default, axes={"STEPS": (1, 2, 4), "num_warps": (1, 2)}, refusal=_config_refusal)


def _arguments(
    inputs: Inputs, *, M: int, N: int, R: int = 16, K: int = 4096, adapters: int = 8, dtype: torch.dtype = torch.bfloat16,
    one: bool = False, row_stride: int = 0, chained: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool]:  # fmt: skip
    """M tokens. N: the columns of both halves. K, one: as for `lora_expand_add`."""
    y, h, b, scales, order, *_ = arguments(
        inputs, M=M, N=N, R=R, K=K, first=N // 2, adapters=adapters, dtype=dtype, one=one, row_stride=row_stride
    )
    return y, h, b, scales, order, chained


EXAMPLES = (
    Example("rows", lambda inputs: _arguments(inputs, M=20, N=512, adapters=3)),
    Example("ragged", lambda inputs: _arguments(inputs, M=37, N=300, R=5, K=600, adapters=5, dtype=torch.float16)),
    Example("strided", lambda inputs: _arguments(inputs, M=5, N=128, K=64, adapters=2, dtype=torch.float16, row_stride=192)),
    Example("float32", lambda inputs: _arguments(inputs, M=5, N=40, R=80, K=64, adapters=2, dtype=torch.float32)),
    Example("one adapter", lambda inputs: _arguments(inputs, M=33, N=384, K=1100, adapters=4, one=True)),
    Example("one", lambda inputs: _arguments(inputs, M=1, N=2, R=1, K=1, adapters=1, dtype=torch.float32, one=True)),
    Example("chained", lambda inputs: _arguments(inputs, M=21, N=768, K=1024, adapters=2, chained=True)),
    Example("rank of 32", lambda inputs: _arguments(inputs, M=19, N=256, R=32, K=64, adapters=2, dtype=torch.float16)),
    Example("no rows", lambda inputs: _arguments(inputs, M=0, N=128)),
)

# ---- kernel


@triton.jit(do_not_specialize=["n_tokens", "y_row_stride"])
def _expand_silu_mul_kernel(
    y_ptr, h_ptr, b_ptr, scales_ptr, adapters_ptr, out_ptr, n_tokens, y_row_stride,
    HALF: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = 64 * WARPS
    first, end, adapter = tile_at(adapters_ptr, tl.program_id(1), n_tokens)
    if end > first:
        begin = tl.program_id(0) * (BLOCK_N * STEPS)
        index = tl.maximum(adapter - 1, 0).to(tl.int64)
        b_at = b_ptr + index * (2 * HALF * R) + begin * R + offsets_b(R, WARPS)
        some = tl.full(b_at.shape, adapter, tl.int32) > 0
        gate_scale = tl.load(scales_ptr + index * 2, mask=adapter > 0, other=0.0)
        up_scale = tl.load(scales_ptr + index * 2 + 1, mask=adapter > 0, other=0.0)
        for start in tl.range(first, end, 8, num_stages=1):
            gate_b = tl.load(b_at, mask=some, other=0.0)
            up_b = tl.load(b_at + HALF * R, mask=some, other=0.0)
            place = start + along(tl.arange(0, 4) * 2, 0, 5) + along(tl.arange(0, 2), 3, 5)
            held = place < end
            tokens = tl.load(adapters_ptr + place, mask=held, other=0).to(tl.int64)
            y_at = y_ptr + row_start(tokens, y_row_stride, 2 * HALF) + begin + offsets_y(WARPS)
            out_at = out_ptr + tokens * HALF + begin + offsets_y(WARPS)
            # h: q, token, ranks
            place = start + along(tl.arange(0, 8), 1, 3)
            mine = (place < end) & (adapter > 0)
            tokens = tl.load(adapters_ptr + place, mask=mine, other=0).to(tl.int64)
            h_at = h_ptr + tokens * (2 * R) + along(tl.arange(0, 4) * (R // 4), 0, 3) + along(tl.arange(0, R // 4), 2, 3)
            if PDL:
                wait()
            stride = n_tokens.to(tl.int64) * (2 * R)
            gate_low = scaled_sum(h_at, stride, mine, gate_scale, gate_b.dtype, R, CHUNKS)
            up_low = scaled_sum(h_at + R, stride, mine, up_scale, up_b.dtype, R, CHUNKS)
            gate_y = tl.load(y_at, mask=held, other=0.0)
            up_y = tl.load(y_at + HALF, mask=held, other=0.0)
            for step in tl.static_range(STEPS):
                next_gate_b, next_up_b, next_gate_y, next_up_y = gate_b, up_b, gate_y, up_y
                if step + 1 < STEPS:
                    next_gate_b = tl.load(b_at + (step + 1) * (BLOCK_N * R), mask=some, other=0.0)
                    next_up_b = tl.load(b_at + HALF * R + (step + 1) * (BLOCK_N * R), mask=some, other=0.0)
                    next_gate_y = tl.load(y_at + (step + 1) * BLOCK_N, mask=held, other=0.0)
                    next_up_y = tl.load(y_at + HALF + (step + 1) * BLOCK_N, mask=held, other=0.0)
                gate = (gate_y.to(tl.float32) + product(gate_b, gate_low, R, WARPS)).to(gate_y.dtype)
                up = (up_y.to(tl.float32) + product(up_b, up_low, R, WARPS)).to(up_y.dtype)
                out = silu(gate.to(tl.float32)) * up.to(tl.float32)
                tl.store(out_at + step * BLOCK_N, out.to(gate_y.dtype), mask=held)
                gate_b = next_gate_b
                up_b = next_up_b
                gate_y = next_gate_y
                up_y = next_up_y
    elif PDL:
        # Otherwise a launch without tokens might end before the one that it follows.
        if tl.program_id(1) == 0:
            wait()


def _launch(
    config: Config, y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, chained: bool
) -> Tensor:  # fmt: skip
    tokens, row_stride = rows_of(y)
    held, n, rank = b.shape
    out = _result(y)
    if y.numel():
        grid = (n // (2 * COLUMNS * config["STEPS"] * config["num_warps"]), tiles_of(tokens, held))
        _expand_silu_mul_kernel[grid](
            y, h, b, scales, adapters, out, tokens, row_stride, HALF=n // 2, R=rank, CHUNKS=h.shape[0],
            WARPS=config["num_warps"], **config, maxnreg=128 if rank == 16 else 255,
            **launch_options(chained and overlaps(card_of(y))),
        )  # fmt: skip
    return out


def _separate(
    config: Config, y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, chained: bool
) -> Tensor:  # fmt: skip
    half = y.shape[1] // 2
    total = y.clone()
    lora_expand_add_op.run(total, h, b, scales, adapters, half, 2 * half, False)  # it follows the copy, not `lora_shrink`
    return silu_mul_op.run(*total.chunk(2, -1))


def _result(y: Tensor) -> Tensor:
    return y.new_empty(y.shape[0], y.shape[1] // 2)


lora_expand_silu_mul_op = Op(
    name="lora_expand_silu_mul",
    reference=_reference,
    fake=lambda y, *_: _result(y),
    problem=lambda y, h, b, scales, adapters, chained: Problem(y.dtype, y.shape[1], b.shape[2], (h.shape[0],)),
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    roundings=3,
    impls=(
        Impl(name="direct", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True),
        Impl(name="separate", launch=_separate, batch_invariant=True),
    ),
)


def lora_expand_silu_mul(
    y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, *, chained: bool = False
) -> Tensor:  # fmt: skip
    """Add scale B h of each token's adapter to y = [gate | up] [T, 2 F], and return silu(gate) * up [T, F].

    Args:
        y: bf16, fp16 or fp32, dense along its rows. It is not changed.
        h: [C, T, 2 R] float32, the result of `lora_shrink`.
        b: [S, 2 F, R] of y's dtype, contiguous.
        scales: [S, 2] float32, contiguous.
        adapters: [4, T] int32, as `adapter_order` returns it. Numbers above S cause reads out of bounds.
        chained: as for `lora_expand_add`.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    half = y.shape[-1] // 2
    check("lora_expand_silu_mul", y, h, b, scales, adapters, (half, half))
    return lora_expand_silu_mul_op(y, h, b, scales, adapters, chained)
