"""The real sampler and runner on a CPU: what requests ask of their logits, alone, in company, and after a restart."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.engine.pair import start_again
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import NOT_NUMBERS, Engine
from tilewright.engine.llm import load_engine
from tilewright.engine.request import Delta, Request, SamplingParams
from tilewright.engine.sampler import LogitTables
from tilewright.models.config import ModelConfig

VOCAB = 97
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256, windows=(None,), eos_token_ids=(5,),
)  # fmt: skip
PROMPT = [11, 3, 7, 11, 20]


@pytest.fixture
def engine() -> Engine:
    return load_engine(CONFIG, EngineConfig(device="cpu", kv_cache_bytes=1 << 20, max_seqs=16, page_size=4))


class Lagging:
    """The runner, but the engine launches the next step before it reads this one, as on a GPU."""

    asynchronous = True

    def __init__(self, runner: Any):
        self.launch, self.collect = runner.launch, runner.collect


def drain(engine: Engine) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def edited(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int]) -> torch.Tensor:
    """The definition: one row of logits after all that a request asks of it."""
    out, counts = logits.float().clone(), Counter(output)
    for token in range(len(out)):
        if params.repetition_penalty != 1 and (counts[token] or token in prompt):
            out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        out[token] -= counts[token] * params.frequency_penalty + (counts[token] > 0) * params.presence_penalty
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -math.inf
        out[token] += params.logit_bias.get(token, 0.0)
        if token in stops and len(output) < params.min_tokens:
            out[token] = -math.inf
    return out


EDITS: list[dict[str, object]] = [
    {},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 100.0},
    {"repetition_penalty": 0.5, "frequency_penalty": 1.0},
    {"logit_bias": {40: 100, 41: 99.5, 5: 50}},
    {"allowed_token_ids": (2, 64, 96)},
    {"min_tokens": 9, "logit_bias": {5: 100}},
    {"min_tokens": 9, "stop_token_ids": (50,), "logit_bias": {50: 100, 5: 99}},
    {"allowed_token_ids": (5, 31), "min_tokens": 3, "repetition_penalty": 3.0, "logprobs": 2},
]


def greedy(fields: dict[str, object]) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0, **fields)  # type: ignore[arg-type]


@pytest.fixture
def wanted(engine: Engine) -> list[list[int]]:
    """Token by token, each from a request of one token that asks for nothing, with the definition in place of the sampler."""
    texts = []
    model = engine.runner.model  # type: ignore[attr-defined]
    seen: list[torch.Tensor] = []
    head = model.logits
    model.logits = lambda hidden: (seen.append(head(hidden)), seen[-1])[1]
    for fields in EDITS:
        params, output = greedy(fields), []
        stops = {5, *params.stop_token_ids}
        while len(output) < params.max_tokens and not (output and output[-1] in stops):
            engine.submit([*PROMPT, *output], SamplingParams(max_tokens=1))
            drain(engine)
            output.append(int(edited(seen[-1][0], params, PROMPT, output, stops).argmax()))
        texts.append(output)
    model.logits = head
    return texts


@pytest.mark.parametrize("again_after", [None, 1, 5])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_edits_are_those_of_the_definition(
    engine: Engine, wanted: list[list[int]], asynchronous: bool, again_after: int | None
) -> None:
    """Together in one batch; `asynchronous`: a step is launched before the tokens of the one before are known on the host."""
    assert len({tuple(text) for text in wanted}) > 6, "the edits change nothing: this test would prove nothing"
    engine.runner = Lagging(engine.runner) if asynchronous else engine.runner
    names = [engine.submit(PROMPT, greedy(fields)) for fields in EDITS]
    deltas: list[Delta] = []
    if again_after is not None:
        for _ in range(again_after):
            deltas += engine.step()
        while engine._in_flight:
            engine._collect()
        start_again(engine.scheduler)
    found = {name: [delta for delta in deltas if delta.request_id == name] for name in names}
    for name, more in drain(engine).items():
        found[name] += more
    assert [tokens(found[name]) for name in names] == wanted


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("least", [1, 2, 5])
def test_min_tokens_holds_the_end_back_to_the_token(engine: Engine, least: int, asynchronous: bool) -> None:
    """A bias makes the end-of-text token the likeliest everywhere: it comes as soon as it may, and not before."""
    engine.runner = Lagging(engine.runner) if asynchronous else engine.runner
    name = engine.submit(PROMPT, SamplingParams(max_tokens=9, min_tokens=least, logit_bias={5: 100}))
    ids = tokens(drain(engine)[name])
    assert len(ids) == least + 1
    assert 5 not in ids[:-1]
    assert ids[-1] == 5


def test_a_slot_forgets_who_had_it(engine: Engine) -> None:
    """One request after the other in the same slot: what the first banned and counted means nothing to the next."""
    plain = engine.submit(PROMPT, SamplingParams(max_tokens=8, temperature=0))
    alone = tokens(drain(engine)[plain])
    for fields in EDITS[1:]:
        engine.submit(PROMPT, greedy(fields))
        drain(engine)
        again = engine.submit(PROMPT, SamplingParams(max_tokens=8, temperature=0))
        penalised = engine.submit(PROMPT, SamplingParams(max_tokens=8, temperature=0, min_tokens=1, ignore_eos=True))
        found = drain(engine)
        assert tokens(found[again]) == tokens(found[penalised])[: len(alone)] == alone


def test_the_head_runs_once_a_step(engine: Engine) -> None:
    rows: list[int] = []
    model = engine.runner.model  # type: ignore[attr-defined]
    head = model.logits
    model.logits = lambda hidden: (rows.append(hidden.shape[0]), head(hidden))[1]
    for fields in EDITS:
        engine.submit(PROMPT, greedy({**fields, "ignore_eos": True, "stop_token_ids": (), "logprobs": 3}))
    engine.step()
    while engine.has_work:
        rows.clear()
        engine.step()
        assert len(rows) == 1
        assert rows[0] <= len(EDITS)


def test_prompt_logprobs_cost_the_steps_of_the_prompt_alone(engine: Engine) -> None:
    rows: list[int] = []
    model = engine.runner.model  # type: ignore[attr-defined]
    head = model.logits
    model.logits = lambda hidden: (rows.append(hidden.shape[0]), head(hidden))[1]
    engine.submit(PROMPT, SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True))
    drain(engine)
    assert rows == [len(PROMPT) - 1, 1, 1, 1, 1]


def test_counts_stay_within_their_width() -> None:
    tables = LogitTables(max_seqs=1, vocab_size=3, device=torch.device("cpu"))
    request = Request("a", [0], SamplingParams(max_tokens=10**6, frequency_penalty=1.0, repetition_penalty=2.0))
    request.slot, request.output_ids = 0, [1] * 20_000
    tables.place(request)
    slot = torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        tables.count(slot, slot + 1)
    tables.count(slot, slot)
    assert tables._counts[0].tolist() == [3, 32766, 0]


@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"prompt_logprobs": 0}, {"logprobs": 0, "presence_penalty": 1.0}])
def test_logits_that_are_not_numbers_end_the_requests_that_ask_for_them(engine: Engine, fields: dict[str, object]) -> None:
    good = engine.submit(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    want = tokens(drain(engine)[good])
    good = engine.submit(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    engine.step()
    name = engine.submit([9, 9, 9], SamplingParams(max_tokens=4, **fields))  # type: ignore[arg-type]
    model = engine.runner.model  # type: ignore[attr-defined]
    head = model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[(1 if logits.shape[0] > 1 and "prompt_logprobs" not in fields else 0) :] = math.nan
        return logits

    model.logits = broken
    found = {good: engine.step()}
    bad = [delta for delta in found[good] if delta.request_id == name]
    model.logits = head
    rest = drain(engine)
    last = [*bad, *rest.get(name, [])][-1]
    assert (last.finish_reason, last.error) == ("error", NOT_NUMBERS)
    assert tokens(rest[good])[-8:] == want[-8:] or "prompt_logprobs" in fields
