"""The host side of paged_turned_sm90.py: its configs and its launch; exports the Impl `turned`.

Refuses what `sm90` refuses: dtypes other than bf16 and fp16, caches of codes, head dims other than 64 and 128, pages of other
than 16, 32, 64 or a multiple of 64 tokens, and more than 64 rows (queries times heads that share keys) or 16 queries each.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from tilewright.hw.device import CARD_OF_ARCH, Device, device_of
from tilewright.kernels.paged_sm90_common import boxes, few_queries_refusal
from tilewright.kernels.paged_space import Problem, room_of
from tilewright.kernels.paged_turned_sm90 import paged_turned_sm90_kernel
from tilewright.kernels.shapes import next_pow2
from tilewright.kernels.work import stream_work
from tilewright.kernels.workspace import tickets
from tilewright.op import Impl, scope
from tilewright.tune.model import Work
from tilewright.tune.space import Config, Space

__all__ = ["TURNED"]

_LOG2_E = 1.4426950408889634
_ROWS = 64  # keys of a tile
_PANEL = 64  # columns of a box


def _columns(problem_rows: int) -> int:
    """wgmma's narrow side."""
    return max(8, next_pow2(problem_rows))


def _smem_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    own = _columns(problem.queries * problem.group) * (2 * problem.head_dim + 2 * _ROWS + 16)  # queries, weights, maxima
    used = config["PER_SM"] * (2 * config["STAGES"] * _ROWS * problem.row_bytes + own + 4096)
    return f"needs {used} bytes of shared memory" if used > device.smem_bytes else None


def _default(device: Device, problem: Problem) -> Config:
    return {"PER_SM": 2, "STAGES": 2 if problem.head_dim == 128 else 4, "LONGER": 6}


def _launch(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    (tokens, heads, dim), (_, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return o
    group, queries = heads // kv_heads, 1 if max_q_len == 1 else 16
    block_r = next_pow2(queries * group)
    # Meta tensors: compiled for a card that is not here.
    device = scope().card or CARD_OF_ARCH[90] if q.is_meta else device_of(q.get_device())
    most = batch * kv_heads * triton.cdiv(block_table.shape[1] * page_size, _ROWS)
    grid = max(1, min(config["PER_SM"] * device.sms, most))
    part = torch.empty(2 * grid * queries * group * (dim + 2), dtype=torch.float32, device=q.device)
    paged_turned_sm90_kernel[(grid,)](
        *(boxes(t.view(-1, dim), [min(page_size, _ROWS), _PANEL]) for t in (k_cache, v_cache)),
        q, o, part, tickets(q.device, batch * kv_heads), q if sinks is None else sinks,
        block_table, kv_lens, cu_q, batch, tokens, room_of(k_cache, block_table), window or 0,
        q.stride(0), block_table.stride(0), scale * _LOG2_E,
        G=kv_heads, GROUP=group, D=dim, N=_columns(queries * group), S=page_size, QUERIES=queries,
        HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, BLOCK_R=block_r,
        AT_ONCE=max(1, min(16, 64 // block_r)), STAGES=config["STAGES"], LONGER=config["LONGER"],
        num_warps=4, maxnreg=256 // config["PER_SM"],
    )  # fmt: skip
    return o


def _work(device: Device, config: Config, *args: Any) -> Work:
    """As `stream`, with the names that its config has."""
    return stream_work(device, {**config, "BLOCK_N": _ROWS, "num_stages": config["STAGES"], "num_warps": 4}, *args)


SPACE = Space(default=_default, axes={"PER_SM": (1, 2), "STAGES": (2, 3, 4), "LONGER": (1, 6)}, refusal=_smem_refusal)

TURNED = Impl(
    name="turned", launch=_launch, space=SPACE, min_arch=90, refuse=few_queries_refusal, interpretable=False, work=_work
)  # fmt: skip
