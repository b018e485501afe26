"""The host side of decode_sm90_kernel.py and decode_sm90_kernel_8bit.py: configs and launch; exports the Impl `sm90`.

Refuses: queries other than bf16 and fp16; caches other than of the queries' dtype or codes; head dims other than 64 and 128;
pages of other than 16, 32, 64 or a multiple of 64 tokens; more than 64 rows (queries times heads that share keys) or 16 queries
per sequence. The refusals and the box size that `varlen_sm90` shares are also here.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import Device
from tilewright.kernels.attention.paged.configs import CODES, Problem, room_of, stream_refusal
from tilewright.kernels.attention.paged.decode_sm90_kernel import paged_sm90_kernel
from tilewright.kernels.attention.paged.decode_sm90_kernel_8bit import paged_sm90_codes_kernel
from tilewright.kernels.attention.paged.work import stream_work
from tilewright.kernels.hopper.descriptors import SIXTEEN_BITS, card_of, descriptor
from tilewright.kernels.hopper.early import early
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, token_stride
from tilewright.op import Impl
from tilewright.tune.model import Work
from tilewright.tune.space import Config, Space

__all__ = ["SM90", "sm90_refusal"]

_LOG2_E = 1.4426950408889634
_ROWS = 64  # of a tile: its number of keys, and the largest number of queries times heads that share them
_PANEL = 64  # columns of a TMA box


def sm90_refusal(device: Device, problem: Problem, block: int, *, coded: bool = False) -> str | None:
    """Why no Hopper kernel supports a problem, or None.

    block: keys per tile; larger pages must be whole tiles. coded: whether caches of codes are supported too.
    """
    if problem.dtype not in SIXTEEN_BITS or (problem.cache != problem.dtype and not (coded and problem.cache in CODES)):
        caches = "the same dtype or of 8-bit codes" if coded else "the same dtype"
        return f"supports queries of bf16 and fp16 with caches of {caches} only, not {problem.dtype} with {problem.cache}"
    if problem.head_dim not in (64, 128):
        return f"supports head dims of 64 and 128 only, not {problem.head_dim}"
    if problem.page_size not in (16, 32, 64) and problem.page_size % block:
        return f"supports pages of 16, 32, 64 or a multiple of {block} tokens only, not {problem.page_size}"
    return None


def _columns(problem_rows: int) -> int:
    """The N dimension of wgmma."""
    return max(8, next_pow2(problem_rows))


def _refuse(device: Device, problem: Problem) -> str | None:
    if reason := sm90_refusal(device, problem, _ROWS, coded=True) or stream_refusal(device, problem):
        return reason
    rows = problem.queries * problem.group
    return f"supports at most {_ROWS} rows (queries x heads that share keys), not {rows}" if rows > _ROWS else None


def _config_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    if config["BOX"] < _ROWS and (problem.page_size <= config["BOX"] or problem.cache in CODES):
        return "a smaller BOX is only for 16-bit caches whose pages are larger than BOX"
    columns = _columns(problem.queries * problem.group)
    if columns > 32 and problem.row_bytes == 128 and problem.cache in CODES and config["PER_SM"] > 1:
        return "two programs per SM leave too few registers for 64 columns of codes"
    own = columns * (2 * problem.head_dim + 2 * _ROWS + 16)  # queries, weights, maxima
    used = config["PER_SM"] * (2 * config["STAGES"] * _ROWS * (problem.row_bytes + 4) + own + 4096)
    return f"needs {used} bytes of shared memory, more than the device has" if used > device.smem_bytes else None


def _default(device: Device, problem: Problem) -> Config:
    # H100, 128 dims, docs/log.md#paged-decode: rows of 256 bytes are read faster by one program per SM with two stages, codes
    # by two programs per SM. 64 dims of 16 bits were not timed.
    if problem.cache in CODES:
        return {"PER_SM": 1 if problem.queries * problem.group > 32 else 2, "STAGES": 2, "LONGER": 6, "BOX": _ROWS}
    few = problem.row_bytes == 256
    # Two programs per SM are faster there too, by up to 1.6 %, if each program has (sequence, head) pairs of its own. With
    # fewer pairs than programs there are more parts to combine, and 16 sequences x 2000 tokens take 4 % longer.
    own = problem.queries == 1 and problem.batch * problem.kv_heads > 2 * device.sms
    # For 310 tokens, boxes of 8 load 312 tokens; boxes of 16, or of a page of 64, load 320.
    return {"PER_SM": 1 if few and not own else 2, "STAGES": 2 if few else 4, "LONGER": 6, "BOX": 8}


def _code_boxes(k_cache: Tensor, v_cache: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of keys and values in words of four codes.

    A box is a page, or 64 tokens of a larger one. Values in small pages are viewed as rows of 128 bytes.
    """
    dim, page_size = k_cache.shape[3], k_cache.shape[2]
    keys = descriptor(k_cache.view(-1, dim).view(torch.int32), [min(page_size, _ROWS), dim // 4])
    if page_size < _ROWS:
        return keys, descriptor(v_cache.view(-1, 128).view(torch.int32), [dim * page_size // 128, 32])
    return keys, descriptor(v_cache.view(-1, page_size).view(torch.int32), [dim, _ROWS // 4])


def _launch(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    (tokens, heads, dim), (pages, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return o
    group, queries = heads // kv_heads, 1 if max_q_len == 1 else 16
    block_r = next_pow2(queries * group)
    device = card_of(q)
    most = batch * kv_heads * ceil_div(block_table.shape[1] * page_size, _ROWS)
    grid = max(1, min(config["PER_SM"] * device.sms, most))
    part = torch.empty(2 * grid * queries * group * (dim + 2), dtype=torch.float32, device=q.device)
    out = (q, o, part, tickets(q.device, batch * kv_heads), q if sinks is None else sinks)
    lengths = (block_table, kv_lens, cu_q, batch, tokens, room_of(k_cache, block_table), window or 0)
    strides = (token_stride(q), block_table.stride(0), scale * _LOG2_E)
    constants: dict[str, Any] = {
        "G": kv_heads, "GROUP": group, "D": dim, "N": _columns(queries * group), "S": page_size, "QUERIES": queries,
        "HAS_WINDOW": window is not None, "HAS_SINKS": sinks is not None, "BLOCK_R": block_r,
        "AT_ONCE": max(1, min(16, 64 // block_r)), "STAGES": config["STAGES"], "LONGER": config["LONGER"],
        "RELEASES": early(q, tokens), "num_warps": 4, "maxnreg": 256 // config["PER_SM"],
    }  # fmt: skip
    if k_scale is None:
        heights = (min(page_size, _ROWS), min(page_size, config["BOX"]))
        descriptors = [descriptor(t.view(-1, dim), [high, _PANEL]) for high in heights for t in (k_cache, v_cache)]
        paged_sm90_kernel[(grid,)](*descriptors, *out, *lengths, *strides, **constants)
    else:
        format = "int8" if k_cache.dtype == torch.int8 else "e4m3"
        paged_sm90_codes_kernel[(grid,)](
            *_code_boxes(k_cache, v_cache), k_scale, v_scale, *out, *lengths, pages * kv_heads, *strides,
            FORMAT=format, HEAD_SCALES=k_scale.stride(1), **constants,
        )  # fmt: skip
    return o


def _work(device: Device, config: Config, *args: Any) -> Work:
    """The work of `stream`, with this config translated to its names."""
    return stream_work(device, {**config, "BLOCK_N": _ROWS, "num_stages": config["STAGES"], "num_warps": 4}, *args)


SPACE = Space(
    default=_default,
    axes={"PER_SM": (1, 2), "STAGES": (2, 3, 4), "LONGER": (1, 6), "BOX": (8, 16, 64)},
    refusal=_config_refusal,
)
"""BOX: tokens per TMA box in the last tile of a sequence, where the boxes after the last token are not loaded. In other tiles a
box is a page, or 64 tokens of one."""

SM90 = Impl(name="sm90", launch=_launch, space=SPACE, written_for=90, refuse=_refuse, work=_work)
