"""Named sets of matrix product shapes, so that a table of results is one command: `tilewright bench linear --set awkward`.

decode        the products of a layer of Llama-3.1-8B, Llama-3.1-70B and Qwen3-32B, at 1, 4 and 16 rows
projections   the same at 64 to 8192 rows
squares       512 to 16384
awkward       sizes that do not fit copy engines or tiles: primes, one above or below a round number, short K, a vocabulary's N,
              operands with unaligned starts
"""

from collections.abc import Mapping, Sequence

__all__ = ["PROJECTIONS", "ROWS", "SETS", "aligned"]

PROJECTIONS = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    *((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
)
"""(N, K) of the projections qkv, output, gate and up, and down."""
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_NEAR = (1791, 1793, 2047, 2049, 4095, 4097, 8191, 8193)
_AWKWARD = (
    *((n, n, n) for n in _NEAR),
    *((m, n, n) for m in (1, 16, 256) for n in (2049, 4095)),
    *((n, 4096, 4096) for n in (1793, 2049, 4095, 4097)),
    *((4096, n, 4096) for n in (1793, 2049, 4095, 4097)),
    *((4096, 4096, k) for k in (100, 1000, 4095, 4097)),
    *((m, n, k) for m in (16, 2048) for n, k in ((50257, 4096), (151936, 1024))),
    *((1009, 1013, 1019), (127, 4099, 2053), (3001, 5003, 1009), (64, 4095, 4095)),
)
_OFFSETS = (
    *((m, 4096, 4096, "x") for m in (16, 256, 4096)),
    *((m, 4096, 4096, "weight") for m in (16, 256, 4096)),
)


def _words(m: int, n: int, k: int) -> str:
    return f"M={m} N={n} K={k}"


SETS: Mapping[str, tuple[str, ...]] = {
    "decode": tuple(_words(m, n, k) for m in ROWS if m <= 16 for n, k in PROJECTIONS),
    "projections": tuple(_words(m, n, k) for m in ROWS if m > 16 for n, k in PROJECTIONS),
    "squares": tuple(_words(n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384)),
    "awkward": (
        *(_words(*shape) for shape in _AWKWARD),
        *(f"{_words(m, n, k)} offset={operand}" for m, n, k, operand in _OFFSETS),
    ),
}
"""Name of a set -> its dimensions, as written on a command line."""


def aligned(words: Sequence[str]) -> list[str]:
    """The next larger product whose rows start at multiples of 16 bytes, for 16-bit numbers.

    The same words if this is already the case.
    """
    pairs = [word.partition("=") for word in words]
    sizes = {key: -(-int(value) // 8) * 8 if key in ("N", "K") else value for key, _, value in pairs if key != "offset"}
    return [f"{key}={value}" for key, value in sizes.items()]
