"""A million tiles of one block each: the rings and slots of the Hopper kernels turn as fast as they can.

A tile of one block gives a slot back as soon as it has it, so a warp that reads late reads the next tile's. Tiles are of 61
different kinds, one after the other, and each has to have the bits of the same tile launched alone, round after round.

    python -m pytest tests/kernels/test_release_stress.py        on a machine with an sm_90 card; half a minute
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright.hw.device import CARD_OF_ARCH, Device, device_of
from tilewright.op import Inputs, Op
from tilewright.ops import ALL

INDEX = 0 if torch.cuda.is_available() else -1
HERE = device_of(INDEX)
OPS = {op.name: op for op in ALL}
KINDS = 61  # no divisor of the number of SMs: a tile and the one before it in the same program differ
TILES = 1 << 16
ROUNDS = 16
"""Of TILES: a million."""


class Case(NamedTuple):
    """An op whose tiles are independent along the first dimension of what `make` gives."""

    op: str
    impl: str
    make: Callable[[Tensor], tuple[Any, ...]]
    """The kinds of the tiles [T], each below KINDS -> arguments of the op, with T tiles of one block."""
    block: tuple[int, ...]
    """Of a tile's result."""


def _drawn(kinds: Tensor, *shape: int, seed: int) -> Tensor:
    """[T, *shape] bf16: the same numbers for the same kind."""
    return Inputs(kinds.device, seed).randn(KINDS, *shape, dtype=torch.bfloat16)[kinds]


def attention(kinds: Tensor) -> tuple[Any, ...]:
    """128 queries on 64 keys: one tile, one block of keys, for each sequence of one head."""
    q = _drawn(kinds, 128, 1, 64, seed=1)
    k, v = (_drawn(kinds, 64, 1, 64, seed=seed) for seed in (2, 3))
    return q, k, v, None, None, 128, 64, 0.125, False, False


def linear(kinds: Tensor) -> tuple[Any, ...]:
    """128 rows, 64 columns of K, 128 of the result: one tile, one stage of the ring."""
    return (
        _drawn(kinds, 128, 64, seed=4).flatten(0, 1),
        Inputs(kinds.device, 5).randn(128, 64, dtype=torch.bfloat16),
        None,
        "none",
        None,
    )


CASES = (
    Case("attention", "sm90", attention, (128, 1, 64)),
    Case("linear", "sm90", linear, (128, 128)),
)


def results(case: Case, kinds: Tensor, launch: Callable[[tuple[Any, ...]], Any]) -> Tensor:
    """[T, *block] as integers."""
    found = launch(case.make(kinds))
    first = found[0] if isinstance(found, tuple) else found
    return first.reshape(kinds.shape[0], *case.block).view(torch.int16)


def wrong_tiles(case: Case, tiles: int, rounds: int, device: str, launch: Callable[[tuple[Any, ...]], Any]) -> list[str]:
    """round and number of every tile whose bits are not those of its kind alone; empty when all is well."""
    alone = torch.cat([results(case, torch.tensor([kind], device=device), launch) for kind in range(KINDS)])
    assert all((alone[0] != alone[kind]).any() for kind in range(1, KINDS)), "kinds of tiles that could not be told apart"
    kinds = torch.arange(tiles, device=device) % KINDS
    found = []
    for i in range(rounds):
        differs = (results(case, kinds, launch) != alone[kinds]).flatten(1).any(1).nonzero().flatten()
        found += [f"round {i}, tile {tile}" for tile in differs[:3].tolist()]
    return found


def launcher(op: Op, name: str, device: Device, args: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """The implementation with the config of these arguments, which one tile alone gets too."""
    impl = next(impl for impl in op.impls if impl.name == name)
    problem = op.problem(*args)
    assert impl.refusal(device, problem) is None, impl.refusal(device, problem)
    config = impl.space.default(device, problem)
    return lambda args: impl.launch(config, *args)


@pytest.mark.gpu
@pytest.mark.skipif(HERE.kind != "cuda" or HERE.arch != 90, reason=f"the kernels are for sm_90, this is {HERE.name}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_a_million_tiles(case: Case) -> None:
    run = launcher(OPS[case.op], case.impl, HERE, case.make(torch.arange(TILES, device="cuda") % KINDS))
    assert wrong_tiles(case, TILES, ROUNDS, "cuda", run) == []


# ---- the same without a card: what it launches, and whether it would find a tile that reads another one's numbers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_the_kernels_take_these_tiles(case: Case) -> None:
    launcher(OPS[case.op], case.impl, CARD_OF_ARCH[90], case.make(torch.arange(200) % KINDS))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_one_wrong_tile_is_found(case: Case) -> None:
    def launch(args: tuple[Any, ...]) -> Any:
        found = OPS[case.op].reference(*args)
        first = found[0] if isinstance(found, tuple) else found
        tiles = first.view(-1, *case.block)
        if spoil and tiles.shape[0] > 1:
            tiles[100] = tiles[99]
        return found

    spoil = False
    assert wrong_tiles(case, 130, 1, "cpu", launch) == []
    spoil = True
    assert wrong_tiles(case, 130, 2, "cpu", launch) == ["round 0, tile 100", "round 1, tile 100"]
