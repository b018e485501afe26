"""Launches that overlap the one before them on the stream (programmatic dependent launch, sm_90 and later).

A quantiser is launched in the ordinary way and says `release` as each of its programs starts. A product that is launched with
PDL=1 may then start while the quantiser runs. It waits before it touches memory at all, `gdc_wait` in each group of warps that
reads or writes, and the wait lasts until all that the quantiser has written can be read. So it is right behind any kernel: only
the launch, the set-up of barriers and the first instructions are hidden. A CUDA graph keeps this as an edge of its own kind.

What was measured (H100, int8 layers in CUDA graphs, docs/log.md#launches-that-overlap):

- Waiting behind a kernel that does not release costs 0.4 us. Hence `chained`, the products' argument by which a caller says
  that the launch before was a quantiser. It is a hint, and decides nothing but speed.
- Behind one that releases it saves 1 to 2 us, but programs then start in the order in which the quantiser leaves the SMs:
  neighbours in the order of tiles, which ask L2 for the same boxes, are no longer neighbours on the card. Products of many rows
  and a long K lose up to 25 % by that: `waits` knows which.
- Asking for the weight before the wait, which is right only behind kernels that are known not to write it, was no faster. It is
  in products of one row (H100, 1 x 768 x 1000 behind a norm, before a cast, caches empty: 9.9 us for the three, 11.3 without).
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.target_info import cuda_capability_geq

from tilewright.hw import env
from tilewright.hw.device import Device

__all__ = ["launch_options", "overlaps", "release", "waits"]

_COMPILED = tl.constexpr(not env.interpreting())


def overlaps(device: Device) -> bool:
    """Whether the card has such launches."""
    return device.kind == "cuda" and device.arch >= 90


def waits(chained: bool, rows: int, cols: int) -> bool:
    """Whether a product [rows, cols] @ [cols, N] on sm_90 is launched with PDL; the same within a bucket of rows."""
    return chained and (rows <= 128 or (rows <= 256 and cols <= 4096))


def launch_options(pdl: bool) -> dict[str, Any]:
    """What a launch of a kernel that waits or not is given beside the kernel's own arguments."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def release():
    """The first line of a kernel behind which products are launched early; nothing where the card has no such launches."""
    if _COMPILED:
        if cuda_capability_geq(9, 0):
            gdc_launch_dependents()
