"""`tilewright place`: the work of a call, the sizes, and what the command says on a machine without a card."""

import json
import re

import pytest
import torch
from torch import nn

from tests.test_cli import tilewright
from tilewright.bench.place import place, sizes_up_to, work_of


@pytest.mark.parametrize("most", [8, 20, 64, 1000])
def test_sizes_are_some_twenty_from_one_on(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    assert 5 <= len(sizes) <= 20


def test_the_work_of_a_layer_is_counted() -> None:
    work, taken, given = work_of(nn.Linear(16, 8), [torch.zeros(4, 16)])
    assert work.flops == 2 * 4 * 16 * 8
    assert work.bytes == 4 * (16 * 8 + 8 + 4 * 16 + 4 * 8)
    assert (taken, given) == (4 * 4 * 16, 4 * 4 * 8)


def test_a_processor_alone_does_everything() -> None:
    found = place(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), [torch.zeros(1, 64)], 32)
    if torch.cuda.is_available():
        pytest.skip("there is a card here: which device comes first is measured")
    assert found.spans == ((1, "cpu"),)
    assert len(found.lines) == len(sizes_up_to(32))


def test_the_command() -> None:
    done = tilewright("place", "tabular_mlp", "--max-batch", "16", "--explain")
    assert done.returncode == 0, done.stderr
    assert "cpu: the prediction is off by" in done.stdout
    assert re.search(r"^16 rows: .*FLOPs .*transfers", done.stdout, re.MULTILINE)
    said = json.loads(tilewright("place", "tabular_mlp", "--max-batch", "16", "--json").stdout)
    assert said["devices"][0]["name"] == "cpu"
    assert "wanted at least 8" in tilewright("place", "tabular_mlp", "--max-batch", "4").stderr
