"""MinHash signatures of sets of 32-bit shingles (Broder 1997), in integers: every device gives the same bits.

    out[d, p] = min over shingles x of document d of (a[p] x + b[p] mod 2**64) >> 33        2**31 - 1 where d has none

    shingles: [S] int32, the bits of unsigned numbers, documents one after the other; ends: [D] int64, where each document ends,
    not decreasing, the last one S. a, b: [P] int64, the bits of unsigned numbers. Result: [D, P] int32.

The hash is multiply-shift (Dietzfelbinger et al. 1997) of 31 bits. The minimum is taken over the upper 32 bits, because the
last shift keeps the order. Each shingle and place then needs a multiply-add of 32 x 32 to 64 bits, a 32-bit multiply-add, and a
minimum. Limited by integer arithmetic. A long document is divided among programs, which combine their results by an atomic
minimum, whose order does not matter. Not checked: that `ends` does not decrease, because the host would have to wait.
Not supported: more than 2**31 programs, backward.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["minhash", "minhash_op"]

# S shingles, D documents, P places of a signature

_EMPTY = 2**31 - 1
_SPLIT = 4096  # shingles of a document per program, so that long documents use the whole GPU


def _reference(shingles: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x = (shingles.long() & 0xFFFFFFFF)[:, None]
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    document = torch.repeat_interleave(torch.arange(len(ends), device=ends.device), lengths, output_size=len(shingles))
    out = torch.full((len(ends), len(a)), _EMPTY, dtype=torch.int64, device=shingles.device)
    for at in range(0, len(a), 8):  # [S, 8] int64 at a time
        hashes = ((x * a[at : at + 8] + b[at : at + 8]) >> 33) & _EMPTY
        out[:, at : at + 8] = out[:, at : at + 8].scatter_reduce(0, document[:, None].expand_as(hashes), hashes, "amin")
    return out.to(torch.int32)


def _cost(shingles: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> Cost:
    hashes = len(shingles) * len(a)
    return Cost(flops=5 * hashes, bytes=shingles.nbytes + ends.nbytes + 4 * len(ends) * len(a))


# ---- space and examples


class Problem(NamedTuple):
    """The properties that a recipe fixes; not the number of documents."""

    places: int


SPACE = Space(
    default=lambda device, problem: {"BLOCK_S": 16, "BLOCK_P": 128 if problem.places > 64 else 64, "num_warps": 4},
    axes={"BLOCK_S": (8, 16, 32), "BLOCK_P": (64, 128), "num_warps": (2, 4, 8)},
    refusal=lambda device, problem, c: (
        "over 32 minima per thread" if c["BLOCK_S"] * c["BLOCK_P"] > 1024 * c["num_warps"] else None
    ),
)


def _arguments(inputs: Inputs, *, D: int, L: int = 512, P: int = 112) -> tuple[Tensor, ...]:
    """D documents of L shingles each, P places."""
    shingles = inputs.randint(-(2**31), 2**31, D * L, dtype=torch.int32)
    ends = inputs.tensor(range(L, D * L + 1, L) if L else [0] * D, torch.int64)
    return shingles, ends, *(inputs.randint(-(2**63), 2**63 - 1, P) for _ in range(2))


@Example.of
def _example(inputs: Inputs, lengths: tuple[int, ...], places: int) -> tuple[Tensor, ...]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    shingles = inputs.randint(-(2**31), 2**31, ends[-1], dtype=torch.int32)
    return shingles, inputs.tensor(ends, torch.int64), *(inputs.randint(-(2**63), 2**63 - 1, places) for _ in range(2))


EXAMPLES = (
    _example("ragged", (17, 0, 1, 130, 16, 0, 33), 112),
    _example("long", (9000, 40), 30),
    _example("one", (1,), 1),
    _example("none", (0, 0), 129),
)


@triton.jit(
    do_not_specialize=["splits"], do_not_specialize_on_alignment=["shingles_ptr", "ends_ptr", "a_ptr", "b_ptr", "out_ptr"]
)
def _minhash_kernel(
    shingles_ptr, ends_ptr, a_ptr, b_ptr, out_ptr, splits,
    P: tl.constexpr, TILES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    tile = part % TILES
    split = (part // TILES) % splits
    document = (part // TILES // splits).to(tl.int64)
    place = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    a = tl.load(a_ptr + place, mask=place < P, other=0).to(tl.uint64, bitcast=True)
    b = tl.load(b_ptr + place, mask=place < P, other=0).to(tl.uint64, bitcast=True)
    a_low = (a & 0xFFFFFFFF).to(tl.uint32).to(tl.uint64)[None, :]
    a_high = (a >> 32).to(tl.uint32)[None, :]
    start = tl.load(ends_ptr + document - 1, mask=document > 0, other=0)
    end = tl.load(ends_ptr + document)
    least = tl.full([BLOCK_S, BLOCK_P], 0xFFFFFFFF, tl.uint32)
    for at in range(start + split * BLOCK_S, end, splits * BLOCK_S):
        # Past the end the last shingle is read again, which does not change the minimum.
        row = tl.minimum(at + tl.arange(0, BLOCK_S), end - 1)
        x = tl.load(shingles_ptr + row).to(tl.uint32, bitcast=True)[:, None]
        wide = x.to(tl.uint64) * a_low + b[None, :]
        least = tl.minimum(least, (wide >> 32).to(tl.uint32) + x * a_high)
    found = (tl.min(least.to(tl.int64), 0) >> 1).to(tl.int32)
    tl.atomic_min(out_ptr + document * P + place, found, mask=place < P, sem="relaxed")


def _launch(config: Config, shingles: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> Tensor:
    documents, places = len(ends), len(a)
    out = torch.full((documents, places), _EMPTY, dtype=torch.int32, device=shingles.device)
    if documents and places:
        tiles = triton.cdiv(places, config["BLOCK_P"])
        splits = max(1, min(256, len(shingles) // documents // _SPLIT))
        _minhash_kernel[(documents * splits * tiles,)](
            shingles, ends, a, b, out, splits, P=places, TILES=tiles, **config
        )  # fmt: skip
    return out


minhash_op = Op(
    name="minhash",
    reference=_reference,
    problem=lambda shingles, ends, a, b: Problem(len(a)),
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    fake=lambda shingles, ends, a, b: torch.empty(len(ends), len(a), dtype=torch.int32, device=shingles.device),
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def minhash(shingles: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Signatures of sets of shingles; see the top of this file for the formula.

    Args:
        shingles: [S] int32, the bits of unsigned 32-bit numbers, documents one after the other.
        ends: [D] int64, where each document's shingles end; must not decrease, the last one is S.
        a, b: [P] int64, factors (odd) and summands, the bits of unsigned 64-bit numbers.

    Returns:
        [D, P] int32, from 0 to 2**31 - 1, which means an empty set.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    wanted = {
        "shingles": (shingles, torch.int32), "ends": (ends, torch.int64), "a": (a, torch.int64), "b": (b, torch.int64),
    }  # fmt: skip
    for name, (value, dtype) in wanted.items():
        if value.dim() != 1 or value.dtype != dtype or not value.is_contiguous():
            got = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f"minhash: {name} must be one-dimensional, contiguous and {dtype}, got {got}")
    if len(a) != len(b):
        raise ValueError(f"minhash: a and b must have one length, got {len(a)} and {len(b)}")
    return minhash_op(shingles, ends, a, b)
