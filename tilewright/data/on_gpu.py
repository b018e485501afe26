"""Near duplicates on a GPU: signatures and band keys with the ops of kernels/dedup, bitwise the same as with numpy."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.data.near import Sorted
from tilewright.ops import band_keys, minhash

__all__ = ["signatures_on", "sorted_on"]


def _checked(device: str) -> str:
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"near-duplicates: device is {device!r}, but this machine has no GPU; leave device out to use the CPU")
    return device


def signatures_on(
    device: str,
) -> Callable[[Sequence[NDArray[np.uint32]], NDArray[np.uint64], NDArray[np.uint64]], NDArray[np.int32]]:
    """`minhash.signatures` on a device; raises ValueError if the device does not exist."""
    _checked(device)

    def sign(sets: Sequence[NDArray[np.uint32]], a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.int32]:
        flat = torch.from_numpy(np.concatenate([*sets, np.zeros(0, np.uint32)]).view(np.int32)).to(device)
        ends = torch.from_numpy(np.cumsum([len(part) for part in sets], dtype=np.int64)).to(device)
        factors, summands = (torch.from_numpy(numbers.view(np.int64)).to(device) for numbers in (a, b))
        return minhash(flat, ends, factors, summands).cpu().numpy()

    return sign


def sorted_on(device: str) -> Callable[[NDArray[np.int32]], Sorted]:
    """`near.sorted_here` on a device. The buckets are the same, but their order differs."""
    _checked(device)

    def sort(part: NDArray[np.int32]) -> Sorted:
        keys, order = torch.sort(band_keys(torch.from_numpy(part).to(device), 1)[:, 0], stable=True)
        return order.cpu().numpy(), keys.cpu().numpy().view(np.uint64)

    return sort
