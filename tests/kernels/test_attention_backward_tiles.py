"""Which keys a tile of attention's backward on Hopper has: the kernel's own function, run as Python."""

from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import pytest
import triton

from tilewright.kernels.attention.backward import sm90_schedule as sm90_work


class _Plain:
    """What the function uses of Gluon, with integers of Python."""

    cdiv = staticmethod(triton.cdiv)
    minimum, maximum = staticmethod(min), staticmethod(max)
    load = staticmethod(lambda pointer: pointer.numbers[pointer.at])


@dataclass(frozen=True)
class _Pointer:
    """A pointer into a list of numbers."""

    numbers: list[int]
    at: int = 0

    def __add__(self, by: int) -> "_Pointer":
        return replace(self, at=self.at + by)

    def __sub__(self, by: int) -> "_Pointer":
        return self + -by


_KERNEL: Any = sm90_work.keys_of
keys_of = FunctionType(_KERNEL.fn.__code__, {"gl": _Plain})

# (sequences, queries, keys, key/value heads, keys of a tile, section)
DEALT = (
    (8, 512, 512, 4, 128, 8), (8, 700, 700, 2, 128, 5), (3, 129, 127, 4, 128, 7), (1, 65, 63, 1, 128, 1), (2, 40, 20, 2, 64, 4),
    (3, 2048, 2048, 2, 64, 1), (5, 130, 130, 1, 128, 2),
)  # fmt: skip


@pytest.mark.parametrize("dealt", DEALT, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "in order"])
def test_tiles(dealt: tuple[int, ...], causal: bool, ordered: bool) -> None:
    """Each block of keys of each head is one tile's, and the queries that see it are visited, no block of them for nothing."""
    batch, queries, keys, heads, width, section = dealt
    key_blocks, rows = -(-keys // width), 64
    shape = (key_blocks, section, heads, 1, queries, keys, 0, None)
    tiles = key_blocks * batch * heads
    found: list[tuple[int, int, int]] = []
    lengths: dict[int, list[int]] = {}
    for tile in range(tiles):
        place: Any = keys_of(tile, tiles, shape, width, rows, causal, False, object() if ordered else None)
        block, head, b, first, last = place
        found.append((b, head, block))
        lengths.setdefault(tile // (section * key_blocks), []).append(last - first)
        seeing = [q for q in range(queries) if not causal or block * width <= q + keys - queries]
        assert (first, last) == (min(seeing[0] // rows, last) if seeing else first, -(-queries // rows))
    assert sorted(found) == [(b, h, block) for b in range(batch) for h in range(heads) for block in range(key_blocks)]
    for section_lengths in lengths.values():  # the longest first, or last where they wait for each other's additions
        assert section_lengths == sorted(section_lengths, reverse=not ordered)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_documents(causal: bool) -> None:
    """A tile's queries begin with its own first key under a diagonal, and end with the document of its last key."""
    ends = [end for start, end in ((0, 70), (70, 71), (71, 400), (400, 520)) for _ in range(start, end)]
    tokens, width, rows, blocks = len(ends), 128, 64, 5
    for tile in range(blocks):
        shape = (blocks, 1, 1, 1, tokens, tokens, 0, _Pointer(ends))
        block, _head, _sequence, first, last = keys_of(tile, blocks, shape, width, rows, causal, False, None)
        end = ends[min((block + 1) * width, tokens) - 1]
        assert last == -(-end // rows)
        assert first == (block * width // rows if causal else 0)
