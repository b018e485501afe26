"""Layer norm that keeps each row's mean and reciprocal deviation: the forward pass of a training step.

    y = layer_norm(x, weight, bias, eps);     stats[0, t] = mean of x[t, :],   stats[1, t] = 1 / sqrt(variance of x[t, :] + eps)

    x, y: [..., D] of bf16, fp16 or fp32; weight, bias: [D], the bias may be missing; stats: [2, T] of float32, T rows.

With them backward.py needs one round of sums a row instead of two. The kernels are layer_norm's (layer_norm.py,
cooperative.py), which write 8 bytes a row more: y is the same arithmetic in the same order. To the compiler it is another
program, where it may round a product before it is added and not in the other: on a card y may be the neighbour of layer_norm's
in its dtype (seen on an H100: float16, 16900 columns far from zero). A call that keeps nothing is `layer_norm`.

Limited by bytes: D elements in, D out. Not supported: what layer_norm does not support.
"""

import torch
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.row_space import row_problem, row_space
from tilewright.kernels.launch.shapes import check_last_dim, rows_of, rows_ready
from tilewright.kernels.norm.cooperative import LAYER_STATS_SPLIT, split_first
from tilewright.kernels.norm.inputs import layer_norm_arguments
from tilewright.kernels.norm.layer_norm import EXAMPLES as LAYER_EXAMPLES
from tilewright.kernels.norm.layer_norm import default_config, launch_rows
from tilewright.kernels.norm.work import layer_norm_work
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["layer_norm_stats", "layer_norm_stats_op"]

# ---- reference


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * scale * weight.to(wide.dtype)
    y = y if bias is None else y + bias.to(wide.dtype)
    return y.to(x.dtype), torch.stack((mean.flatten(), scale.flatten()))


# ---- cost


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Cost:
    vectors = (1 + (bias is not None)) * weight.nbytes
    return Cost(flops=7 * x.numel(), bytes=2 * x.nbytes + vectors + 2 * 4 * rows_of(x)[0])


# ---- space and examples


SPACE = row_space(
    default_config,
    BLOCK_T=(1, 2, 4, 8, 16),
    BLOCK_D=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    HELD=(1, 2, 3),
    num_warps=(4, 8, 16, 32),
)


def _no_rows(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None, float]:
    return inputs.randn(0, 8, dtype=torch.bfloat16), inputs.randn(8, dtype=torch.bfloat16), None, 1e-5


# ---- launcher and op


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    stats = torch.empty(2, rows_of(x)[0], dtype=torch.float32, device=x.device)
    return launch_rows(config, x, weight, bias, eps, stats), stats


layer_norm_stats_op = Op(
    name="layer_norm_stats",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=(*LAYER_EXAMPLES, Example("no rows", _no_rows)),
    make=layer_norm_arguments,
    first=split_first,
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True, work=layer_norm_work),
        LAYER_STATS_SPLIT,
    ),
)


# ---- public function


def layer_norm_stats(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(layer_norm, stats) without gradients; `ops.layer_norm` says what it takes."""
    vectors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    check_last_dim("layer_norm", x, **vectors)
    return layer_norm_stats_op(rows_ready(x), weight, bias, eps)
