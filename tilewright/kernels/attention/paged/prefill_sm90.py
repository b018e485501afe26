"""The host side of prefill_sm90_kernel.py; exports the Impls `varlen_sm90` and, with one config for all, `invariant_sm90`.

Refuses: dtypes other than bf16 and fp16; caches of codes; head dims other than 64 and 128; pages of other than 16, 32, 64 or a
multiple of 128 tokens.

The bits of a row depend only on its own keys and on the config: in a sequence, blocks of keys begin at the same positions for
every tile, and a block that the row does not see leaves the row unchanged.
"""

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention.paged.configs import Problem, room_of
from tilewright.kernels.attention.paged.decode_sm90 import sm90_refusal
from tilewright.kernels.attention.paged.prefill_sm90_kernel import paged_varlen_sm90_kernel
from tilewright.kernels.attention.paged.work import varlen_work
from tilewright.kernels.attention.problem import LOG2_E, addressable
from tilewright.kernels.attention.sm90_schedule import SLOT
from tilewright.kernels.hopper.descriptors import card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.op import Impl
from tilewright.tune.model import Work
from tilewright.tune.space import Config, Space

__all__ = ["INVARIANT_SM90", "VARLEN_SM90"]

_ROWS = 64  # query rows per consumer
_CONSUMERS = 2
_REGISTERS = 128  # per thread at the start of a program with one consumer, so that two fit an SM; the consumer then gets more
_BLOCK_N = 128
_PANEL = 64  # columns of a TMA box


def _refuse(device: Device, problem: Problem) -> str | None:
    return sm90_refusal(device, problem, _BLOCK_N)


def _default(device: Device, problem: Problem) -> Config:
    if problem.queries == 1:  # H200, 256 x 320 keys, 16/8 heads of 128: 74 us; with OVERLAP 79, with two consumers 116
        return {"OVERLAP": 0, "CONSUMERS": 1}
    return {"OVERLAP": int(problem.head_dim == 128), "CONSUMERS": _CONSUMERS}


def _config_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    return "CONSUMERS 1 is for one query per sequence only" if config["CONSUMERS"] == 1 and problem.queries != 1 else None


def _pack(group: int) -> int:
    """Heads packed into a tile: a power of two, like the height of a tile."""
    return min(group & -group, _ROWS)


def _launch(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    (tokens, heads, dim), (_, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return o
    if not k_cache.numel():  # TMA does not support empty matrices
        return o.zero_()
    if not addressable(q):
        q = q.contiguous()
    device = card_of(q)
    pack = _pack(heads // kv_heads)
    single = max_q_len == 1 and tokens == batch
    one = single and config["CONSUMERS"] == 1
    per_sm = 2 if one else 1  # with one consumer there is room for two programs, whose waits overlap
    units, tiles = heads // pack, batch if single else tokens * pack // (_CONSUMERS * _ROWS) + batch
    programs = min(units * tiles, per_sm * device.sms)
    box = [min(page_size, _BLOCK_N), _PANEL]
    paged_varlen_sm90_kernel[(programs,)](
        descriptor(q, [_ROWS // pack, pack, _PANEL]), *(descriptor(t.view(-1, dim), box) for t in (k_cache, v_cache)),
        descriptor(o, [_ROWS // pack, pack, _PANEL]), o, sinks, block_table, kv_lens, cu_q,
        tickets(q.device, 1), torch.empty(2 * SLOT.value * programs, dtype=torch.int32, device=q.device),
        tiles, units, int(single), batch, tokens, room_of(k_cache, block_table), 0 if window is None else window - 1,
        block_table.stride(0), scale * LOG2_E,
        G=kv_heads, GROUP=heads // kv_heads, PACK=pack, D=dim, S=page_size, BLOCK_N=_BLOCK_N,
        STAGES=256 // dim // per_sm, OVERLAP=bool(config["OVERLAP"]), LEFT=window is not None,
        CONSUMERS=1 if one else _CONSUMERS, num_warps=4, **({"maxnreg": _REGISTERS} if one else {}),
    )  # fmt: skip
    return o


def _work(device: Device, config: Config, q: Tensor, *args: object) -> Work:
    """The work of `varlen`, with this config translated to its names."""
    tile = {"BLOCK_M": _CONSUMERS * _ROWS, "BLOCK_N": _BLOCK_N, "num_stages": 2, "num_warps": 8}
    return varlen_work(device, tile, q, *args)  # pyright: ignore[reportArgumentType] (the op's own arguments)


VARLEN_SM90 = Impl(
    name="varlen_sm90",
    launch=_launch,
    space=Space(default=_default, axes={"OVERLAP": (1, 0), "CONSUMERS": (2, 1)}, refusal=_config_refusal),
    written_for=90,
    refuse=_refuse,
    work=_work,
)
INVARIANT_SM90 = Impl(
    name="invariant_sm90",
    launch=_launch,
    space=Space(default=_default, axes={}),
    written_for=90,
    refuse=_refuse,
    batch_invariant=True,
    work=_work,
)
