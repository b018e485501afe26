"""Measures the difference between the outputs of two models."""

import numpy as np

from tilewright.host.tensors import DATATYPES, Wire

__all__ = ["array_of", "differs"]


def array_of(wire: Wire) -> np.ndarray:
    """A tensor as an array; BF16 becomes float32."""
    kind = DATATYPES[wire.datatype].numpy
    if kind is not None:
        return np.frombuffer(wire.raw, dtype=kind).reshape(wire.shape)
    halves = np.frombuffer(wire.raw, dtype=np.uint16).astype(np.uint32) << 16
    return halves.view(np.float32).reshape(wire.shape)


def differs(given: Wire, other: Wire) -> float:
    """The largest absolute difference, relative to the largest absolute value in `given`; inf if shape or datatype differ."""
    if given[:2] != other[:2]:
        return float("inf")
    one, two = (np.asarray(array_of(wire), dtype=np.float64) for wire in (given, other))
    if not one.size:
        return 0.0
    scale = float(np.max(np.abs(one), initial=0.0)) or 1.0
    found = float(np.max(np.abs(one - two)) / scale)
    return found if found == found else float("inf")
