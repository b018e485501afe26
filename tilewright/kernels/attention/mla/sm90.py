"""The host side of sm90_kernel.py: refusals, configs, descriptors and launch; exports the Impls `sm90` and `sm90_invariant`.

Refuses: dtypes other than bf16 and fp16, latents other than 512 + 64, pages that are not a multiple of 64 tokens.
"""

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import Device
from tilewright.kernels.attention.mla.problem import Problem
from tilewright.kernels.attention.mla.sm90_kernel import mla_sm90_kernel
from tilewright.kernels.attention.mla.tile import combine_splits
from tilewright.kernels.attention.paged.configs import room_of
from tilewright.kernels.hopper.descriptors import SIXTEEN_BITS, descriptor
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["SM90", "SM90_INVARIANT"]

_LOG2_E = 1.4426950408889634
_ROWS = 64  # heads per program, keys per tile
_RANK, _ROTATED = 512, 64
_SPLITS = (1, 2, 4, 8, 16, 32, 64)
# The time of a program outside its tiles and combining, in tiles: barriers, Q, filling the pipeline, the result.
_OVERHEAD_TILES = 4
_COMBINED_TILES = 0.05  # the time to combine one more range, in tiles: 64 ranges of 2 tiles are 3 % faster than 32 of 4


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in SIXTEEN_BITS:
        return f"supports bf16 and fp16 only, not {problem.dtype}"
    if (problem.rank, problem.rotated) != (_RANK, _ROTATED):
        return f"supports latents of {_RANK} + {_ROTATED} numbers only, not {problem.rank} + {problem.rotated}"
    if problem.page_size % _ROWS:
        return f"needs a page size that is a multiple of {_ROWS} tokens, not {problem.page_size}"
    return None


def _default(device: Device, problem: Problem) -> Config:
    """The number of ranges of keys that should finish first, from waves of programs (one per SM), tiles per program,
    combining."""
    if not problem.queries:
        return {"SPLITS": 1}
    programs = problem.batch * -(-problem.heads // _ROWS)
    tiles = max(1, problem.keys // _ROWS)

    def duration(splits: int) -> float:
        waves = -(-programs * splits // max(device.sms, 1))
        return waves * (tiles / splits + _OVERHEAD_TILES) + (splits > 1) * splits * _COMBINED_TILES

    return {"SPLITS": min((splits for splits in _SPLITS if splits <= tiles), key=duration)}


def _boxes(t: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """A matrix of rows of 576 numbers, in boxes of 64 rows by 256, and by 64."""
    rows = t.view(-1, _RANK + _ROTATED)
    made = [descriptor(rows, [_ROWS, width]) for width in (_RANK // 2, _ROTATED)]
    return made[0], made[1]


def _launch(
    config: Config, q: Tensor, cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q_len: int, rank: int,
    scale: float,
) -> Tensor:  # fmt: skip
    (tokens, heads, _), page_size, splits = q.shape, cache.shape[1], config["SPLITS"]
    o = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
    if not tokens:
        return o
    part, scales, lse = o, o, o
    if splits > 1:
        part = torch.empty((tokens, heads, splits, rank), dtype=torch.float16, device=q.device)
        scales = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=q.device)
        lse = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
    mla_sm90_kernel[(tokens * -(-heads // _ROWS), splits)](
        *_boxes(q), *_boxes(cache), o, part, scales, lse, block_table, kv_lens, cu_q,
        kv_lens.shape[0], heads, room_of(cache, block_table), block_table.stride(0), scale * _LOG2_E,
        S=page_size, ONE=max_q_len == 1, SPLIT=splits > 1, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        combine_splits(part, lse, o, scales)
    return o


SPACE = Space(default=_default, axes={"SPLITS": _SPLITS})
# One pass over all keys, in tiles that contain a single token's heads: the bits depend on nothing else.
_INVARIANT_SPACE = Space(default=lambda device, problem: {"SPLITS": 1}, axes={})

SM90 = Impl(name="sm90", launch=_launch, space=SPACE, written_for=90, refuse=_refuse)
SM90_INVARIANT = Impl(
    name="sm90_invariant", launch=_launch, space=_INVARIANT_SPACE, written_for=90, refuse=_refuse, batch_invariant=True,
)  # fmt: skip
