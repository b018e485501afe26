"""How a run is spread does not change what it computes: AdamW by four processes against one process, bit for bit."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parallel.cells import Cell, run
from tilewright.parallel.launch import run_ranks


def by_ranks(folder: Path, cells: Sequence[Cell], ranks: int = 4) -> dict[Cell, dict[str, Tensor]]:
    """What each cell gives on so many processes, which are started once."""
    (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in cells]))
    run_ranks([sys.executable, "-m", "tests.parallel.rank", str(folder)], ranks, print)
    return {cell: load_file(folder / f"{cell.name}.safetensors") for cell in cells}


@cache
def alone(cell: Cell) -> dict[str, Tensor]:
    """What one process gives."""
    return run(cell.alone())


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


ORDINARY = (Cell(plan="dp=4"), Cell(plan="dp=4,zero=2"))


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, dict[str, Tensor]]:
    return by_ranks(tmp_path_factory.mktemp("cells"), ORDINARY)


@pytest.mark.parametrize("cell", ORDINARY, ids=lambda cell: cell.name)
def test_four_processes_have_the_bits_of_one(cell: Cell, ordinary: dict[Cell, dict[str, Tensor]]) -> None:
    assert not differing(ordinary[cell], alone(cell))
