"""Steps with masks on a GPU: captured graphs give the samples of eager launches."""

import random
from typing import Any

import pytest
import torch

from tests.engine.test_invariance import CONFIG, PAGE_SIZE, engine
from tilewright.engine.config import EngineConfig
from tilewright.engine.grammar import Grammar
from tilewright.engine.loading import load
from tilewright.engine.request import SamplingParams
from tilewright.engine.runner import ModelRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {"temperature": 0.0}],
    "scored": [{}, {"logprobs": 2}],
    "full": [{}, {"presence_penalty": 1.0, "logprobs": 1}],
}
PATTERNS = ("([0-9]{2,8}, )*[a-c]{5,40}", "(yes|no|perhaps)+[0-9]{9}", "[ -~]{60}")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    options = EngineConfig(
        device="cuda", dtype="bfloat16", max_seqs=32, page_size=PAGE_SIZE, max_tokens_per_step=512, kv_cache_bytes=8 << 20,
        invariant=True,
    )  # fmt: skip
    return load(CONFIG, options).runner


def answers(runner: ModelRunner, kind: str) -> dict[str, tuple[list[int], list[float]]]:
    """Token ids and log-probabilities of 30 requests, two thirds of them with a grammar, which join and leave."""
    rng, found = random.Random(1), dict[str, tuple[list[int], list[float]]]()
    made = engine(runner)
    made.eos_ids = (CONFIG.vocab_size - 1,)
    for i in range(30):
        more = KINDS[kind][i % 2]
        grammar = Grammar("regex", PATTERNS[i % 3]) if i % 5 > 1 else None
        params = SamplingParams(seed=i, max_tokens=rng.randint(5, 50), ignore_eos=True, grammar=grammar, **more)
        made.submit([rng.randrange(256) for _ in range(rng.randint(1, 40))], params, str(i))
    while made.has_work:
        for delta in made.step():
            assert delta.error is None
            tokens, logprobs = found.setdefault(delta.request_id, ([], []))
            tokens += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_have_the_samples_of_eager_launches(runner: ModelRunner, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed: there are no grammars")
    assert runner._graphs is not None
    captured = answers(runner, kind)
    assert len(captured) == 30
    monkeypatch.setattr(runner, "_graphs", None)
    assert answers(runner, kind) == captured
