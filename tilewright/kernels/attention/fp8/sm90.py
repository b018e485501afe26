"""The host side of sm90_kernel.py: refusals, descriptors and launch; exports the Impl `sm90`.

Refuses: values that are not float8 codes (the format int8), queries in float32, head dims that are not in HEAD_DIMS, and
queries that TMA cannot address.
"""

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention.fp8.layout import Problem
from tilewright.kernels.attention.fp8.sm90_kernel import scaled_attention_sm90_kernel
from tilewright.kernels.attention.fp8.sm90_schedule import CONSUMERS, KEYS, ROWS, SLOT
from tilewright.kernels.attention.problem import LOG2_E, packed
from tilewright.kernels.hopper.descriptors import card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["SM90"]

HEAD_DIMS = (64, 128)


def _refuse(device: Device, problem: Problem) -> str | None:
    if not problem.coded_values:
        return "supports only queries, keys and values that are all float8 codes (the format fp8)"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"supports bf16 and fp16 only, not {problem.dtype}"
    if problem.head_dim not in HEAD_DIMS:
        return f"supports head dims {' and '.join(map(str, HEAD_DIMS))} only, not {problem.head_dim}"
    if not problem.tma:
        return "needs the heads of a query next to each other in memory, and rows and heads that start at multiples of 16 bytes"
    return None


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor | None, keys: int, scale: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    assert v_scale is not None
    batch, queries, heads, d = q.shape
    groups, padded_k = k.shape[1], k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if not keys:  # TMA does not support empty matrices
        return out.zero_()
    device = card_of(q)
    rows, block, consumers = ROWS.value, KEYS.value, CONSUMERS.value
    blocks = -(-queries // (consumers * rows))
    shared = heads // groups
    # Heads computed at a time: enough to give each SM one tile (two under a mask, where tiles differ in length), but their keys
    # and values must fit in half of L2. Heads that share keys stay together.
    wanted = -(-device.sms * (2 if causal else 1) // (blocks * shared))
    section = max(1, min(wanted, device.l2_bytes // 2 // (2 * padded_k * d))) * shared
    programs = min(blocks * batch * heads, device.sms)
    # Besides the ring, shared memory contains the tile's queries in 16 bits and as codes, and its result.
    stages = min(6, (device.smem_bytes - 2048 - consumers * rows * d * (2 * q.itemsize + 1)) // (2 * block * d))
    of_q = packed(q)
    width = (heads - 1) * of_q.stride(1) + d
    q_matrix = of_q.as_strided((batch * queries, width), (of_q.stride(0), 1))
    scaled_attention_sm90_kernel[(programs,)](
        descriptor(q_matrix, [rows, d]), descriptor(k.view(-1, d), [block, d]), descriptor(v.view(-1, padded_k), [d, block]),
        descriptor(out.view(batch * queries, heads * d), [rows, d]), out, k_scale, v_scale,
        tickets(q.device, 1), torch.empty(2 * SLOT.value * programs, dtype=torch.int32, device=q.device),
        blocks, batch * heads, min(section, batch * heads), heads, shared, queries, keys, padded_k, of_q.stride(1),
        scale * LOG2_E,
        STAGES=stages, D=d, CAUSAL=causal, num_warps=4,
    )  # fmt: skip
    return out


SM90 = Impl(name="sm90", launch=_launch, written_for=90, refuse=_refuse)
