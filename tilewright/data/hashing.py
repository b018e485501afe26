"""64-bit hashes of strings and of windows of strings. They are the same on every machine and in every process."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["hashed", "mixed", "order_key", "windows"]

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the constant of Fibonacci hashing (Knuth 6.4)


@lru_cache(1 << 18)
def hashed(text: str) -> int:
    """The first 64 bits of a text's BLAKE2b hash. Frequent strings, such as words, are cached."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mixes each 64-bit number so that every bit depends on all (the finaliser of MurmurHash3, Appleby), elementwise."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values


def windows(hashes: Sequence[int] | NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """A hash for every run of `size` successive hashes: `len(hashes) - size + 1` numbers, or none if there are fewer hashes.

    A polynomial in an odd constant modulo 2**64, computed by doubling: log2(size) passes instead of `size`.
    """
    values = np.asarray(hashes, np.uint64)
    if len(values) < size:
        return np.zeros(0, np.uint64)
    count = len(values) - size + 1
    power, length, result, done = values, 1, None, 0
    while length <= size:
        if size & length:
            part = power[done : done + count]
            # Appending n hashes on the right multiplies the hash of the left part by the constant to the power of n.
            result = part if result is None else result * _power(length) + part
            done += length
        power = power[: len(power) - length] * _power(length) + power[length:] if len(power) > length else power[:0]
        length *= 2
    assert result is not None
    return mixed(result.copy())


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_ODD), exponent, 2**64))


def order_key(seed: int, name: str) -> int:
    """A number that determines a document's place in a shuffled order."""
    return int.from_bytes(blake2b(f"{seed}\n{name}".encode("utf-8", "replace"), digest_size=8).digest(), "big")
