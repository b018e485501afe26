"""Steps with prompts in the layout of their captured graphs: the same samples as without, whatever stands beside them."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from tests.engine.test_plan import TINY
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.llm import load_engine
from tilewright.engine.mixed_graphs import MOST_TOKENS, MixedGraph, MixedGraphs, mixed_layout, mixed_sizes
from tilewright.engine.request import SamplingParams
from tilewright.ops.paged import FEW_QUERIES

ROWS = 4


class Uncaptured(MixedGraph):
    """What a graph would run, run as it comes."""

    def __init__(self, runner: Any, tokens: int, rows: int):
        self.runner, self.layout = runner, mixed_layout(tokens, rows, runner.kinds)
        self._buffer = torch.full((self.layout.nbytes,), 0x55, dtype=torch.uint8)
        self._table = torch.zeros(runner.kinds, rows, runner._max_pages, dtype=torch.int32)

    def run(self, adapted: bool = False) -> None:
        assert not adapted
        self.hidden = self.runner._body(self.layout.device(self._buffer, self._table, self.layout.counts[0]))


class _NoDecodeGraphs:
    """Steps without prompts run eagerly."""

    def for_rows(self, rows: int) -> None:
        return None

    def for_drafts(self, rows: int) -> None:
        return None


def captured(made: Engine, used: Counter[Any]) -> Engine:
    """Its runner takes steps with prompts to what their graphs would run."""
    runner: Any = made.runner
    sizes = mixed_sizes(ROWS, 96)
    graphs: Any = MixedGraphs.__new__(MixedGraphs)
    graphs._sizes, graphs._graphs = sizes, {size: Uncaptured(runner, *size) for size in sizes}
    find = graphs.of_step

    def of_step(tokens: int, rows: int) -> Any:
        graph = find(tokens, rows)
        used[None if graph is None else (graph.layout.counts[0], graph.layout.seqs)] += 1
        return graph

    graphs.of_step = of_step
    runner._graphs, runner._mixed = _NoDecodeGraphs(), graphs
    return made


def run(made: Engine, seed: int) -> dict[str, list[Any]]:
    """What requests of all kinds get that come while others decode."""
    rng, found, left = random.Random(seed), dict[str, list[Any]](), 14
    extras: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5},
        {"temperature": 0.0},
    ]
    extras.append({"logit_bias": {5: 2.0}, "top_k": 8})
    while left or made.has_work:
        if left and rng.random() < 0.4:
            left -= 1
            prompt = [rng.randrange(2, 60) for _ in range(rng.choice((1, 3, 17, 40, 90, 110)))]
            params = SamplingParams(max_tokens=rng.randrange(1, 14), ignore_eos=True, seed=left, **rng.choice(extras))
            found[made.submit(prompt, params)] = []
        for delta in made.step():
            assert delta.error is None, delta.error
            tops = [entry.rank for entry in delta.logprobs]
            found[delta.request_id] += [*delta.token_ids, *tops, len(delta.prompt_logprobs or ())]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_samples_are_those_of_eager_steps(seed: int) -> None:
    options = EngineConfig(device="cpu", kv_cache_bytes=1 << 20, max_seqs=ROWS, max_tokens_per_step=120, max_model_len=128)
    used = Counter[Any]()
    got = run(captured(load_engine(TINY, options), used), seed)
    assert got == run(load_engine(TINY, options), seed)
    assert used[None], "no step was too large for all graphs"
    assert len(used) == 3, used


@pytest.mark.parametrize(("max_seqs", "max_tokens"), [(1, 8192), (4, 40), (256, 8192), (512, 512), (300, 300)])
def test_sizes_are_few_and_have_room_for_the_padding(max_seqs: int, max_tokens: int) -> None:
    sizes = mixed_sizes(max_seqs, max_tokens)
    assert len(sizes) <= 18
    assert all(FEW_QUERIES < tokens <= min(MOST_TOKENS, max_tokens) and rows <= max_seqs + 1 for tokens, rows in sizes)
    held = {(tokens, rows) for tokens in range(2, min(MOST_TOKENS, max_tokens) + 1) for rows in range(1, max_seqs + 1)}
    assert all(any(tokens <= t and rows < r for t, r in sizes) for tokens, rows in held if rows <= tokens <= sizes[-1][0])
