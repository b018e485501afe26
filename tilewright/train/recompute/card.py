"""Predicts the time of a call on a GPU that need not be present: the roofline of its work, but at least the time of a launch.

Real kernels reach 60 to 95 % of their roofline, and this share differs between kernels. So a plan that is made from these times
is only approximate. A profile on the GPU itself measures the times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost, roof
from tilewright.ops import ALL
from tilewright.train.recompute.profile import SecondsOf

__all__ = ["seconds_on"]

_LAUNCH_S = 3e-6
"""Seconds for a launch that follows another launch on the same stream, on an H100."""
_UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32", torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


def seconds_on(card: Device) -> SecondsOf:
    """A function that predicts the seconds of a call on this GPU, for `profile`.

    Raises:
        ValueError: no data are known for this GPU.
    """
    found = ceilings(card)
    ops = {f"tilewright::{op.name}": op for op in ALL}

    def seconds(func: Any, args: tuple[Any, ...], out: Any) -> float:
        given = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        taken = {t.untyped_storage()._cdata for t in given}
        if all(t.untyped_storage()._cdata in taken for t in made) and not func._schema.is_mutable:
            return 0.0  # a view
        op = ops.get(func._schema.name)
        if op is not None:
            cost = op.cost(*args)
        else:
            count = flop_registry.get(func.overloadpacket)
            flops = int(count(*args, out_val=out)) if count else sum(t.numel() for t in made)
            cost = Cost(flops=flops, bytes=sum(t.nbytes for t in (*given, *made)))
        unit = next((_UNITS[t.dtype] for t in given if t.dtype in _UNITS), "bf16")
        return max(_LAUNCH_S, roof(cost, found, unit if unit in found.flops else "bf16").seconds)

    return seconds
