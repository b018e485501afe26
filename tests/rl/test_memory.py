"""Memory that is given back and taken again: at the same address, gone in between, and no sample notices."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewright.hw.revocable import Revocable
from tilewright.rl.config import RLConfig
from tilewright.rl.loop import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")
DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
MIB = 1 << 20


def held(device: torch.device) -> int:
    """Bytes in use: of this process on a CPU, of everybody on a GPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_memory_goes_and_comes_back_at_its_address(device: torch.device) -> None:
    nbytes = 96 * MIB + 4096
    memory = Revocable(nbytes, device)
    where = memory.memory.data_ptr()
    memory.memory.fill_(7)
    full = held(device)
    for _ in range(2):
        assert memory.give_back() >= 0
        assert memory.give_back() >= 0  # twice is once
        assert full - held(device) > 90 * MIB
        memory.take()
        assert memory.memory.data_ptr() == where
        assert int(memory.memory.count_nonzero()) == 0
        memory.memory.fill_(9)
        assert abs(full - held(device)) < 6 * MIB
        assert int(memory.memory.sum(dtype=torch.int64)) == 9 * nbytes


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_samples_are_the_same_with_a_cache_that_goes_in_between(device: torch.device) -> None:
    config = RLConfig(
        environment="sorting:digits=6", max_tokens=8, prompts=4, answers=3, updates=3, minibatches=1, hidden=32, layers=1,
        device=str(device), cache_bytes=4 * MIB,
    )  # fmt: skip
    rows = {}
    for shares in (False, True):
        with Trainer(replace(config, free_cache=shares)) as trainer:
            rows[shares] = list(trainer)
    for kept, freed in zip(rows[False], rows[True], strict=True):
        assert freed["cache_freed_bytes"] > 0
        assert freed["ratio_off"] < 1e-4
        assert "cache_freed_bytes" not in kept
    compared = rows[True] if device.type == "cpu" else rows[True][:1]  # gradients on a GPU are added in any order
    for kept, freed in zip(rows[False], compared):
        assert (kept["reward"], kept["ratio_off"]) == (freed["reward"], freed["ratio_off"])
    assert rows[True][-1]["cache_take_s"] > 0


def test_a_sampler_process_has_no_memory_to_share() -> None:
    with pytest.raises(ValueError, match="its own memory"):
        RLConfig(environment="reversal", sampler="cpu", free_cache=True)
