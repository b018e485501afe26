"""Random numbers that are a function of their position: Philox4x32-10, and the noise that sampling draws from it.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a counter of four
32-bit words and a key of two to four random words. There is no state: a number depends on its counter and key, not on
the order of the calls, the batch, or the machine.

Sampling noise: the key is the seed, as words (low, high). The counter is (c, 0, position low, position high). The four words
of a counter belong to four tokens that are LANES apart:

    token t  <->  word (t // LANES) % 4 of counter  c = t // (4 LANES) * LANES + t % LANES

So a tile of 4 LANES tokens needs LANES calls, no number moves between threads, and no number is discarded.

A word r becomes a standard Gumbel number -log(E), where E = -log(1 - v) is exponentially distributed and v = (r + 1/2) / 2^32.
The largest Gumbel numbers decide which token is sampled, and they come from the smallest v. For small v, E is computed as a
series, because 1 - v would round v's digits away. (A plain 24-bit uniform number cuts the tail at 17, this one at 22.8.) No
number is infinite.

Not here: tensors of uniform or normal numbers (torch has them).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw import env

__all__ = ["LANES", "gumbel", "gumbel_reference", "philox4x32_reference"]

LANES = 1024
"""The distance in tokens between the uses of a counter's four words. Part of the definition: it affects the samples."""

# ---- reference

_LOW = 0xFFFFFFFF
_ROWS = 32
"""Rows that are processed at a time, so that the intermediate tensors fit in a core's cache. On one core with a cache of 2 MB,
64 rows of 4,096 tokens take 5.4 ms this way, and 8.2 ms all at once; both were timed alternately in one process."""


def philox4x32_reference(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each counter. All words are int64 tensors in [0, 2^32) and broadcast against each other."""
    # The two halves of a round do the same, so they are stacked in one tensor. This halves the number of torch operations,
    # which determines the time on a CPU.
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = torch.broadcast_tensors(*key)
    even, odd, keys = torch.stack((c0, c2)), torch.stack((c1, c3)), torch.stack((k0, k1))
    steps = torch.tensor((0x9E3779B9, 0xBB67AE85), device=c0.device).view((2, *(1,) * k0.dim()))
    product = torch.empty_like(even)
    for _ in range(10):
        # The products overflow as signed numbers, but their upper words are still correct after the shift and the mask.
        torch.mul(even[0], 0xD2511F53, out=product[1])
        torch.mul(even[1], 0xCD9E8D57, out=product[0])
        torch.bitwise_right_shift(product, 32, out=even)
        even.bitwise_and_(_LOW).bitwise_xor_(odd).bitwise_xor_(keys)
        torch.bitwise_and(product, _LOW, out=odd)
        keys = (keys + steps).bitwise_and_(_LOW)
    return even[0], odd[0], even[1], odd[1]


def gumbel_reference(seed: Tensor, position: Tensor, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gumbel noise [B, vocab] for seed [B] and position [B] int64: the definition above, its logarithms taken in `dtype`."""
    if len(seed) > _ROWS:
        parts = zip(seed.split(_ROWS), position.split(_ROWS), strict=True)
        return torch.cat([gumbel_reference(*part, vocab, dtype) for part in parts])
    blocks = -(-vocab // (4 * LANES))
    # If the vocabulary is smaller than LANES, only the first word of each counter is used, and `vocab` counters suffice.
    lanes = min(LANES, vocab)
    counter = torch.arange(blocks * lanes, device=seed.device)[None, :]
    seed, position = seed[:, None], position[:, None]
    position_words = (position & _LOW, position >> 32 & _LOW)
    words = philox4x32_reference((counter, torch.zeros_like(seed), *position_words), (seed & _LOW, seed >> 32 & _LOW))
    bits = torch.stack([w.unflatten(1, (blocks, lanes)) for w in words], dim=2).flatten(1)[:, :vocab]
    v = bits.to(torch.float32) * 2.0**-32 + 2.0**-33
    rest = (1.0 - v).clamp_min(2.0**-25).to(dtype)
    v = v.to(dtype)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v / 6)))))
    return -torch.where(v < 2.0**-4, series, -rest.log()).log()


# ---- device functions

_INTERPRETED = tl.constexpr(env.interpreting())


@triton.jit
def _log(x):
    """The hardware's logarithm, within 2^-22 (absolute near 1, relative elsewhere), in 2 instructions; tl.log needs 20."""
    if _INTERPRETED:
        return tl.log(x)
    log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return log2 * 0.6931471805599453


@triton.jit
def _gumbel_of(bits):
    v = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    rest = tl.maximum(1.0 - v, 2.9802322387695312e-08)
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return -_log(tl.where(v < 0.0625, series, -_log(rest)))


@triton.jit
def gumbel(seed, position, counter):
    """The noise of the four tokens of each counter: four blocks with the shape of `counter`, a block of int32 values c.

    seed, position: int64 scalars.
    """
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, counter.to(tl.uint32), tl.zeros_like(low), low, high)
    return _gumbel_of(r0), _gumbel_of(r1), _gumbel_of(r2), _gumbel_of(r3)
