"""`attention` through torch's scaled_dot_product_attention: the implementation `vendor` (cuDNN, FlashAttention-2; torch picks).

Refuses what that call does not support: packed sequences of different lengths, the log-sum-exp, masks that are not causal, and
options that change scores. It also refuses causal masks with different numbers of queries and keys, because that call aligns
the first key with the first query, not the last with the last; but a single query, which sees all keys, is supported. The bits
of a row may depend on the batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention.problem import Problem, lacks
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["VENDOR"]


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.varlen:
        return "supports sequences of equal length only, not packed ones"
    if problem.lse:
        return "does not return the log-sum-exp"
    if problem.causal and not problem.square and problem.max_q > 1:
        return "aligns a causal mask with the first key, not the last, so it needs as many queries as keys"
    if not problem.has_keys:
        return "needs at least one key"
    return lacks(problem)


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    scale: float, causal: bool, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        is_causal=causal and max_q > 1, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), q.new_empty(0, dtype=torch.float32)


VENDOR = Impl(name="vendor", library=True, launch=_launch, refuse=_refuse)
