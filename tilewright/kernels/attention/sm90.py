"""The host side of sm90_kernel.py: refusals, configs, descriptors and launch; exports the Impls `sm90` and `sm90_invariant`.

Refuses: dtypes other than bf16 and fp16; head dims that are not in HEAD_DIMS; prefixes, soft caps and ALiBi. `sm90` also
refuses layouts in which the heads of a token are not adjacent (such as [heads, tokens, D]), and rows or heads that do not start
at multiples of 16 bytes.

The bits of a row depend only on its own keys and on the config: in a sequence, blocks of keys begin at the same positions for
every tile, and a block that the row does not see leaves the row unchanged. The default config of `sm90` depends on the lengths.
`sm90_invariant` has one config per head dim and kind of mask, so that a sequence has the same bits alone, in a batch, packed,
or in chunks. In the invariant scope it copies operands that TMA cannot address. Otherwise the strides would decide which kernel
runs, and so the bits of the result could differ.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import Device
from tilewright.kernels.attention.problem import LOG2_E, Problem, addressable, empty_outputs, lacks, packed
from tilewright.kernels.attention.sm90_kernel import attention_sm90_kernel
from tilewright.kernels.attention.sm90_schedule import SLOT
from tilewright.kernels.hopper.descriptors import SIXTEEN_BITS, card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch, pointer_kind
from tilewright.op import Impl, scope
from tilewright.tune.space import Config, Space

__all__ = ["SM90", "SM90_INVARIANT"]

HEAD_DIMS = ((64, 64), (128, 64), (128, 128), (192, 128), (256, 128), (256, 256))  # (keys, values)
_ROWS = 64  # query rows per consumer


def _refuse_any_layout(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in SIXTEEN_BITS:
        return f"supports bf16 and fp16 only, not {problem.dtype}"
    if (problem.head_dim, problem.value_dim) not in HEAD_DIMS:
        taken = ", ".join(f"{keys}/{values}" for keys, values in HEAD_DIMS)
        return f"supports head dims of keys and values {taken} only, not {problem.head_dim}/{problem.value_dim}"
    return lacks(problem, window=True, sinks=True)


def _refuse(device: Device, problem: Problem) -> str | None:
    if reason := _refuse_any_layout(device, problem):
        return reason
    if not problem.tma:
        return "needs the heads of a token next to each other in memory, and rows and heads that start at multiples of 16 bytes"
    return None


# ---- space


def _config(problem: Problem, long: bool) -> Config:
    # H100, docs/log.md#attention: with three consumers more rows share each block of keys. Only for D = 64 are there enough
    # registers. Three are slower with a causal mask, because the diagonal cuts more of a taller tile, and with few tiles.
    wide = problem.head_dim == 64 and not problem.causal and long
    # Overlapped products need more registers. They gain nothing until a tile has about 16 blocks, and nothing for D = 64 with a
    # causal mask, where most tiles are short.
    overlap = long if problem.head_dim == 128 else problem.head_dim != 64 or not problem.causal
    return {
        "CONSUMERS": 3 if wide else 2,
        "BLOCK_N": 64 if problem.head_dim > 128 else 128,
        "OVERLAP": int(overlap),
    }


def _default(device: Device, problem: Problem) -> Config:
    return _config(problem, problem.max_k >= 2048)


def _ring(device: Device, head_dim: int, value_dim: int, config: Config) -> tuple[int, int, bool]:
    """(stages, buffers for Q, whether the output goes through Q's memory).

    A second buffer of Q, which lets the next tile's first scores start without waiting, has priority over a third stage.
    """
    rows = config["CONSUMERS"] * _ROWS
    stage = 2 * config["BLOCK_N"] * (head_dim + value_dim)
    room = device.smem_bytes - 1024
    for buffers, share in ((2, False), (1, False), (1, True)):
        if share and head_dim != value_dim:
            break
        stages = min(4, (room - 2 * rows * (buffers * head_dim + (not share) * value_dim)) // stage)
        if stages >= 2:
            return stages, buffers, share
    return 0, 1, True


def _config_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    # Registers per thread: o, s and p of 64 rows.
    accumulators = problem.value_dim // 2 + config["BLOCK_N"] // 2 + config["BLOCK_N"] // 4
    if accumulators > (184 if config["CONSUMERS"] == 2 else 128):
        return "the accumulators need more registers than a thread has"
    if _ring(device, problem.head_dim, problem.value_dim, config)[0] < 2:
        return "two pipeline stages of keys and values do not fit in shared memory"
    return None


SPACE = Space(
    default=_default,
    axes={"CONSUMERS": (2, 3), "BLOCK_N": (64, 128), "OVERLAP": (1, 0)},
    refusal=_config_refusal,
)
"""OVERLAP: whether the product of a block's weights and values runs during the softmax of the next block."""

# ---- launcher


def _descriptor(t: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """[T, H, D] as a matrix whose rows contain adjacent heads. A box is `rows` by `cols` columns of one head."""
    width = (t.shape[1] - 1) * t.stride(1) + t.shape[2]
    return descriptor(t, [rows, cols], [t.shape[0], width], [t.stride(0), 1])


def _memory(device: torch.device, programs: int) -> tuple[Tensor, Tensor]:
    """The ticket counter, and the slots through which the warps of each program exchange the descriptions of tiles."""
    return tickets(device, 1), torch.empty(2 * SLOT.value * programs, dtype=torch.int32, device=device)


def _place(t: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return t.shape, t.stride(), t.data_ptr() % 16


def _key(
    config: Config, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    scale: float, causal: bool, want_lse: bool, left: int | None, right: int | None, sinks: Tensor | None,
) -> Hashable:  # fmt: skip
    return (
        q.get_device(), q.dtype, *map(_place, (q, k, v)), *map(pointer_kind, (cu_q, cu_k, sinks)),
        None if cu_q is None else cu_q.shape, max_q, max_k, scale, causal, want_lse, left, right, *config.values(),
    )  # fmt: skip


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    scale: float, causal: bool, want_lse: bool, left: int | None = None, right: int | None = None, prefix: int = 0,
    prefixes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    result, lse = empty_outputs(q, v, want_lse)
    if not q.numel():
        return result, lse
    if not k.numel():  # TMA does not support empty matrices
        return result.zero_(), lse.fill_(float("-inf")) if sinks is None or not want_lse else lse.copy_(sinks[:, None])
    seen = lse if want_lse else None
    args = (q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, want_lse, left, right, sinks)
    _PLANS.fill(config, (result, seen), args, (q, k, v, result, seen, cu_q, cu_k, sinks))
    return result, lse


def _first_launch(
    config: Config, results: tuple[Tensor, Tensor | None], q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, scale: float, causal: bool, want_lse: bool, left: int | None,
    right: int | None, sinks: Tensor | None,
) -> Plan:  # fmt: skip
    """Fill the result and, if requested, lse."""
    result, lse = results
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    q, k, v, out = packed(q), packed(k), packed(v), packed(result)
    device = card_of(q)
    total_q, heads, d = q.shape
    behind = 0 if causal else right
    consumers, block_n = config["CONSUMERS"], config["BLOCK_N"]
    dv = v.shape[2]
    main = 1 << d.bit_length() - 1  # the width of a tile is a power of two: 192 columns are 128 and 64
    tail = d - main
    stages, q_buffers, share_q = _ring(device, d, dv, config)
    blocks = -(-max_q // (_ROWS * consumers))
    group = heads // k.shape[1]
    # Heads computed at a time: enough to give each SM one tile (two under a mask, where tiles differ in length), so that memory
    # is read evenly and not in bursts; but their keys and values must fit in half of L2. Heads that share keys stay together.
    wanted = -(-device.sms * (1 if behind is None else 2) // (blocks * group))
    section = max(1, min(wanted, device.l2_bytes // 2 // max(1, max_k * 2 * (d + dv)))) * group
    programs = min(blocks * batch * heads, device.sms)
    counters, scratch = _memory(q.device, programs)
    operands = (q, k, v, out, lse, cu_q, cu_k, sinks, counters, scratch)
    arguments = (
        _descriptor(q, _ROWS, main), _descriptor(k, block_n, main), _descriptor(v, block_n, dv), _descriptor(out, _ROWS, dv),
        _descriptor(q, _ROWS, tail) if tail else None, _descriptor(k, block_n, tail) if tail else None,
        out, *operands[4:],
        blocks, batch * heads, min(section, batch * heads), heads, group, total_q, max_q, max_k, left or 0, behind or 0,
        q.stride(1), k.stride(1), v.stride(1), out.stride(0), out.stride(1), scale * LOG2_E,
    )  # fmt: skip
    constants = {
        "CONSUMERS": consumers, "BLOCK_N": block_n, "STAGES": stages, "D": main, "DV": dv, "TAIL": tail,
        "RIGHT": behind is not None, "LEFT": left is not None, "OVERLAP": bool(config["OVERLAP"]), "Q_BUFS": q_buffers,
        "SHARE_Q": share_q, "num_warps": 4,
    }  # fmt: skip
    owners = (0, 1, 2, 3, 0, 1, 3, *range(4, 10))  # which operand each argument points into
    launched = first_launch(attention_sm90_kernel, (programs,), arguments, constants, owners, operands)
    return Plan(launched, memory=lambda device: _memory(device, programs))


_PLANS = Planned(_key, _first_launch)


def _launch_any_layout(config: Config, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (t if addressable(t) else t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
    return _launch(config, q, k, v, *rest)


def _refuse_invariant(device: Device, problem: Problem) -> str | None:
    # Outside the invariant scope the portable kernel runs for other layouts. At 512 keys it is two and a half times as fast as
    # the copies.
    return _refuse_any_layout(device, problem) if scope().invariant else _refuse(device, problem)


SM90 = Impl(name="sm90", launch=_launch, space=SPACE, written_for=90, refuse=_refuse)
SM90_INVARIANT = Impl(
    name="sm90_invariant",
    launch=_launch_any_layout,
    space=Space(default=lambda device, problem: _config(problem, long=True), axes={}),
    written_for=90,
    refuse=_refuse_invariant,
    batch_invariant=True,
)
