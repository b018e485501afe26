"""How a run is spread does not change what it computes: AdamW by four processes against one process, bit for bit."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

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


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative difference of losses."""
    losses, right = found["said"][:, 0], wanted["said"][:, 0]
    return ((losses - right).abs() / right).max().item()


SHORT: dict[str, Any] = {"steps": 2}
ORDINARY = (
    Cell(plan="dp=2,tp=2,sp,zero=3", shape="qwen3", **SHORT),
    Cell(plan="pp=2,virtual=2,schedule=zero-bubble,dp=2,zero=1", **SHORT),
    Cell(plan="cp=2,tp=2,sp", shape="cut", **SHORT),
    Cell(plan="cp=4,ring", shape="qwen3", **SHORT),
    Cell(plan="dp=4,zero=2", micro_batches=8, **SHORT),
    Cell(plan="pp=2,tp=2,slices=4", shape="cut", **SHORT),
    Cell(plan="dp=2,tp=2,zero=3", shape="wide", compute="fp8", **SHORT),
    Cell(plan="cp=2,tp=2,sp", shape="wide", compute="fp8-all", **SHORT),
    Cell(plan="dp=4,ep=2,zero=1", micro_batches=8, shape="mixture", **SHORT),
    Cell(plan="dp=4,ep=4", shape="mixtral", **SHORT),
    Cell(plan="dp=2,cp=2,zero=3", dtype="bfloat16", **SHORT),
    Cell(plan="cp=2,pp=2", dtype="bfloat16", **SHORT),
    Cell(plan="cp=4,ring", dtype="bfloat16", shape="qwen3", **SHORT),
)
FAST = (
    Cell(plan="dp=4", tree=False, micro_batches=8, **SHORT),
    Cell(plan="dp=2,tp=2,slices=4", tree=False, shape="cut", **SHORT),
    Cell(plan="dp=4,ep=2", tree=False, micro_batches=8, shape="mixture", **SHORT),
)
FAULTS = (
    Cell(plan="dp=4", fault="lost", **SHORT),
    Cell(plan="dp=4", fault="divisor", **SHORT),
    Cell(plan="pp=2,dp=2", fault="tied", **SHORT),
    Cell(plan="dp=4,ep=2", fault="expert", shape="mixture", **SHORT),
)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, dict[str, Tensor]]:
    return by_ranks(tmp_path_factory.mktemp("cells"), (*ORDINARY, *FAST, *FAULTS))


@pytest.mark.parametrize("cell", ORDINARY, ids=lambda cell: cell.name)
def test_four_processes_have_the_bits_of_one(cell: Cell, ordinary: dict[Cell, dict[str, Tensor]]) -> None:
    assert not differing(ordinary[cell], alone(cell))


@pytest.mark.parametrize("cell", FAST, ids=lambda cell: cell.name)
def test_sums_in_the_librarys_order_differ_in_rounding_alone(cell: Cell, ordinary: dict[Cell, dict[str, Tensor]]) -> None:
    found, wanted = ordinary[cell], alone(cell)
    assert differing(found, wanted), "the library adds up in the order of the tree: then this compares nothing"
    assert off(found, wanted) < 1e-6


@pytest.mark.parametrize("cell", FAULTS, ids=lambda cell: cell.name)
def test_what_is_done_wrong_is_seen(cell: Cell, ordinary: dict[Cell, dict[str, Tensor]]) -> None:
    assert differing(ordinary[cell], alone(cell))
    assert off(ordinary[cell], alone(cell)) > 1e-4


MATRIX = (
    "dp=4", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "tp=4", "tp=4,sp", "tp=2,slices=4,dp=2", "pp=4,schedule=gpipe", "pp=4",
    "pp=2,virtual=2,schedule=interleaved,dp=2", "pp=4,schedule=zero-bubble", "pp=2,virtual=2,schedule=zero-bubble,dp=2,zero=1",
    "cp=4", "cp=2,dp=2,zero=2", "cp=2,tp=2,sp", "cp=2,ring,tp=2,sp",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_matrix_has_the_bits_of_one_process(tmp_path: Path) -> None:
    shapes = ("llama", "qwen3", "qwen2")
    cells = [Cell(plan=plan, micro_batches=4 + 4 * (i % 2), shape=shapes[i % 3]) for i, plan in enumerate(MATRIX)]
    cells += [Cell(plan=plan, micro_batches=8 - 4 * (i % 2)) for i, plan in enumerate(MATRIX)]
    found = by_ranks(tmp_path, cells)
    assert not {cell.name: names for cell in cells if (names := differing(found[cell], alone(cell)))}


EXPERTS = (
    "dp=4,ep=4", "dp=4,ep=2", "dp=4,ep=2,zero=1", "dp=4,ep=4,zero=1", "pp=2,dp=2,ep=2", "pp=2,dp=2,ep=2,schedule=gpipe",
    "pp=2,virtual=2,schedule=interleaved,dp=2,ep=2,zero=1", "pp=2,virtual=2,schedule=zero-bubble,dp=2,ep=2", "dp=4,zero=3",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_mixtures_have_the_bits_of_one_process(tmp_path: Path) -> None:
    cells = [
        Cell(plan=plan, micro_batches=4 + 4 * (i % 2), shape=("mixture", "mixtral")[i % 2]) for i, plan in enumerate(EXPERTS)
    ]
    found = by_ranks(tmp_path, cells)
    assert not {cell.name: names for cell in cells if (names := differing(found[cell], alone(cell)))}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_three_dimensions_on_eight_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    cells = [Cell(plan="pp=2,dp=2,tp=2,sp"), Cell(plan="dp=2,cp=2,tp=2,sp,zero=3", shape="qwen2")]
    cells += [Cell(plan="pp=2,dp=4,ep=2,zero=1", shape="mixture", micro_batches=8)]
    found = by_ranks(tmp_path, cells, ranks=8)
    assert not {cell.name: names for cell in cells if (names := differing(found[cell], alone(cell)))}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_optimizers_that_want_whole_parameters_run_on_replicas_and_layers(tmp_path: Path) -> None:
    kinds = ("muon", "adamw-8bit", "momentum", "sgd")
    cells = [Cell(plan=plan, optimizer=kind, **SHORT) for kind in kinds for plan in ("dp=4", "pp=2,dp=2")]
    found = by_ranks(tmp_path, cells)
    assert not {cell.name: names for cell in cells if (names := differing(found[cell], alone(cell)))}
