"""Launches that overlap the preceding launch on the stream (programmatic dependent launch, PDL; sm_90 and later).

A quantiser is launched in the ordinary way. Each of its programs calls `release` when it starts. A product that is launched
with PDL=1 may then start while the quantiser still runs. Each group of warps of the product that reads or writes memory calls
`gdc_wait` first. This wait ends when everything that the quantiser has written is visible. So the product is correct after any
kernel: only its launch, the initialisation of its barriers and its first instructions overlap with the quantiser. A CUDA graph
represents this dependency as a special type of edge.

Measurements (H100, int8 layers in CUDA graphs, docs/log.md#launches-that-overlap):

- After a kernel that does not call `release`, the wait costs 0.4 us. Therefore products have the argument `chained`, with which
  the caller states that the preceding launch was a quantiser. It is a hint and affects only speed.
- After a kernel that calls `release`, it saves 1 to 2 us. But the product's programs then start in the order in which the
  quantiser's programs leave the SMs. Tiles that are neighbours in the tile order, and load the same boxes from L2, then no
  longer run on neighbouring SMs. Products of many rows with a long K lose up to 25 % by that; `waits` excludes them.
- Loading the weight before the wait was no faster. It is also correct only if the preceding kernel does not write the weight.
  In products of one row it is faster (H100, 1 x 768 x 1000 after a norm and before a cast, caches empty: 9.9 us for all three
  launches, 11.3 without it).
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
    """Whether the card supports programmatic dependent launch."""
    return device.kind == "cuda" and device.arch >= 90


def waits(chained: bool, rows: int, cols: int) -> bool:
    """Whether a product [rows, cols] @ [cols, N] on sm_90 is launched with PDL; the same for all rows of a bucket."""
    return chained and (rows <= 128 or (rows <= 256 and cols <= 4096))


def launch_options(pdl: bool) -> dict[str, Any]:
    """The launch options, in addition to the kernel's own arguments, of a kernel that waits (pdl) or does not wait."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def release():
    """Let the next launch start early. First line of a kernel that products follow. No effect on cards without PDL."""
    if _COMPILED:
        if cuda_capability_geq(9, 0):
            gdc_launch_dependents()
