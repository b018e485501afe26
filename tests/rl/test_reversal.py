"""The first example of docs/rl.md learns: four digits are reversed from random weights, on one thread of a CPU."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tilewright.rl.config import RLConfig, read_config
from tilewright.rl.loop import Trainer

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"
WITHIN, WANTED, OVER = 250, 0.95, 5
"""Updates, exact answers, and the steps that they are a mean over."""


def documented(folder: Path) -> RLConfig:
    """The config of the page's first example."""
    found = re.search(r"cat > reversal\.toml <<'END'\n(.*?)END\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    path = folder / "reversal.toml"
    path.write_text(found[1], encoding="utf-8")
    return read_config(path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_example_is_what_is_measured(tmp_path: Path) -> None:
    config = documented(tmp_path)
    assert config.environment.startswith("reversal:digits=4")
    assert config.prompts * config.answers == 512
    assert config.updates == WITHIN
    assert not config.model


def test_it_has_begun_to_learn_after_a_few_updates(tmp_path: Path, one_thread: None) -> None:
    """With two digits, in a twentieth of the samples."""
    config = replace(documented(tmp_path), environment="reversal:digits=2,partial=1", max_tokens=2, prompts=32, updates=40)
    with Trainer(config) as trainer:
        rewards = [row["reward"] for row in trainer]
    eights = [statistics.mean(rewards[start : start + 8]) for start in range(0, 40, 8)]
    assert eights[-1] > eights[0] + 0.1, eights
    assert sum(later > earlier for earlier, later in pairwise(eights)) >= 3, eights


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_four_digits_are_reversed_within_250_updates(seed: int, tmp_path: Path, one_thread: None) -> None:
    with Trainer(replace(documented(tmp_path), seed=seed)) as trainer:
        exact = [row["exact"] for row in trainer]
    means = [statistics.mean(exact[start : start + OVER]) for start in range(len(exact) - OVER + 1)]
    first = next((start + OVER for start, mean in enumerate(means) if mean >= WANTED), None)
    print(f"seed {seed}: {WANTED:.0%} at update {first}, {means[-1]:.1%} at the end")
    assert first is not None
    assert first <= WITHIN
