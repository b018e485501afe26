"""A real model on a CPU, with speculation and without: the same tokens, texts, log-probabilities and ends for any requests."""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.fake_runner import byte_tokenizer
from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.draft_model import DraftModel
from tilewright.engine.grammar import Grammar
from tilewright.engine.graphs import layout_of
from tilewright.engine.head import FULL, PLAIN, SCORED
from tilewright.engine.loading import load, runner_of
from tilewright.engine.request import Request, SamplingParams
from tilewright.engine.rules import FromGrammar
from tilewright.engine.runner import ModelRunner
from tilewright.engine.schedule import Scheduler
from tilewright.engine.slots import row_inputs
from tilewright.engine.speculation import FromText, Proposer
from tilewright.models import random_model
from tilewright.models.config import ModelConfig

VOCAB, END = 257, 256
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256, windows=(None,),
    eos_token_ids=(END,),
)  # fmt: skip
OPTIONS = EngineConfig(device="cpu", dtype="float32", kv_cache_bytes=1 << 18, max_seqs=8, page_size=4, speculate="ngram")
RUNNER = load(CONFIG, OPTIONS).runner


Asked = tuple[list[int], SamplingParams]


class Lagging:
    """The runner, but the engine launches the next step before it reads this one, as on a GPU."""

    def __init__(self, runner: Any, asynchronous: bool):
        self.asynchronous = asynchronous
        self.launch, self.collect, self.sample = runner.launch, runner.collect, runner.sample


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    end: Any = None


class RecordedProposer:
    """Knows the answers, and says what comes next wrongly now and then; about some requests nothing."""

    def __init__(self, answers: Mapping[tuple[str, int], Answer], right: float, *, free: bool):
        self.answers, self.right, self.free, self.rng = answers, right, free, random.Random(1)

    def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
        found = {}
        for request, most in asked.items():
            coming = self.answers[request.id, request.index].tokens[len(request.output_ids) :][:most]
            found[request] = [t if self.rng.random() < self.right else self.rng.randrange(VOCAB) for t in coming]
        return found


def engine(proposer: Proposer | None, *, asynchronous: bool, pages: int) -> Engine:
    blocks = BlockPool(pages, 4)
    made = Scheduler(blocks=blocks, max_seqs=8, max_tokens_per_step=64, max_model_len=256, max_waiting=100, max_samples=64)
    runner: Any = Lagging(RUNNER, asynchronous)
    return Engine(runner, byte_tokenizer(), (END,), made, proposer=proposer, draft_tokens=6)


def any_request(rng: random.Random) -> Asked:
    extras: dict[str, Any] = {
        "n": 2,
        "temperature": rng.choice((0.0, 0.7)),
        "top_k": 20,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "logit_bias": {rng.randrange(VOCAB): rng.choice((-20.0, 6.0)) for _ in range(5)},
        "allowed_token_ids": tuple(range(rng.randrange(40), 120, 3)),
        "min_tokens": 8,
        "stop_token_ids": tuple(range(start := rng.randrange(200), start + 6)),
        "stop": (chr(rng.randrange(97, 123)),),
        "logprobs": 2,
        "prompt_logprobs": 1,
        "ignore_eos": True,
        "speculate": False,
        "priority": 1,
    }
    chosen = {name: value for name, value in extras.items() if rng.random() < 0.25}
    if rng.random() < 0.25:
        chosen = {k: v for k, v in chosen.items() if k not in ("min_tokens", "allowed_token_ids")}
        chosen["grammar"] = Grammar("regex", rng.choice(("[a-c]{2,30}", "(yes|no|perhaps)+[0-9]*", r"[ -~]{0,25}")))
    stem = [7, 8, 9, 10, 11, 12, 13, 14]
    prompt = stem[: rng.randrange(9)] + [rng.randrange(256) for _ in range(rng.randint(1, 9))]
    fields: dict[str, Any] = {"max_tokens": rng.choice((8, 20, 40)), "seed": rng.randrange(9)}
    return prompt, SamplingParams(**fields | chosen)


def run(made: Engine, asked: list[Asked], aborts: Mapping[int, int]) -> dict[tuple[str, int], Answer]:
    found: dict[tuple[str, int], Answer] = defaultdict(Answer)
    for i, (prompt, params) in enumerate(asked):
        made.submit(prompt, params, str(i))
    steps = 0
    while made.has_work:
        for i, step in aborts.items():
            if step == steps:
                made.abort(str(i))
        steps += 1
        for delta in made.step():
            answer = found[delta.request_id, delta.index]
            answer.tokens += delta.token_ids
            answer.text += delta.text
            answer.logprobs += [entry.logprob for entry in delta.logprobs]
            answer.tops += [(entry.token_id, entry.rank) for entry in delta.logprobs]
            answer.end = (delta.finish_reason, delta.stop_reason, delta.error)
    assert made.stats().pages_used == 0
    return found


@pytest.mark.parametrize("seed", range(8))
def test_nothing_changes_but_the_time(seed: int) -> None:
    rng = random.Random(seed)
    asked = [any_request(rng) for _ in range(13)]
    asked.append(([1, 2, 3], SamplingParams(max_tokens=40, temperature=0, allowed_token_ids=(97, 98, 99))))  # repeats itself
    plain = run(engine(None, asynchronous=False, pages=256), asked, {})
    gone = {i: rng.randrange(12) for i in range(14) if rng.random() < 0.1}
    right, free, asynchronous = rng.choice((0.5, 0.9, 1.0)), rng.random() < 0.3, rng.random() < 0.7
    proposer = FromText(8) if seed == 0 else RecordedProposer(plain, right, free=free)
    made = engine(proposer, asynchronous=asynchronous, pages=rng.choice((40, 256)))
    for key, answer in run(made, asked, gone).items():
        want = plain[key]
        if int(key[0]) in gone and answer.end[0] == "abort":
            assert answer.tokens == want.tokens[: len(answer.tokens)]
            continue
        assert (answer.tokens, answer.text, answer.end) == (want.tokens, want.text, want.end), asked[int(key[0])][1]
        assert answer.tops == want.tops
        assert answer.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    if seed == 0 or not free:
        assert made.stats().drafted_tokens > (0 if seed == 0 else 20)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("beside", [FromGrammar, partial(FromText, 8)])
def test_forced_tokens_change_nothing_but_the_time(asynchronous: bool, beside: Any) -> None:
    rng = random.Random(6)
    asked = [any_request(rng) for _ in range(6)]
    fixed = ("[0-9]{2} hundred bottles of [a-c]{1,5} beer", r"(the answer is [0-9]|there is no answer to it)\\.")
    for i in range(6):
        more: dict[str, Any] = ({"temperature": 0.0}, {"repetition_penalty": 1.3, "logprobs": 2}, {"n": 2})[i % 3]
        params = SamplingParams(max_tokens=(60, 20)[i % 2], seed=i, grammar=Grammar("regex", fixed[i % 2]), **more)
        asked.insert(2 * i, ([i, 2, 3], params))
    plain = run(engine(None, asynchronous=False, pages=256), asked, {})
    made = engine(beside(), asynchronous=asynchronous, pages=256)
    for key, answer in run(made, asked, {}).items():
        want = plain[key]
        assert (answer.tokens, answer.text, answer.end) == (want.tokens, want.text, want.end), asked[int(key[0])][1]
        assert answer.tops == want.tops
    stats = made.stats()
    assert stats.forced_tokens > 80
    assert beside is not FromGrammar or stats.forced_tokens == stats.accepted_tokens == stats.drafted_tokens


class Uncaptured:
    """A step laid out for a graph of `rows` rows with room for `each` tokens, but run as it comes."""

    def __init__(self, runner: Any, rows: int, each: int):
        self.runner, self.rows = runner, rows
        self.layout, self.derives, self.slots = layout_of(rows, each), each == 1, None
        self.table = torch.zeros(1, rows, runner._max_pages, dtype=torch.int32)
        if self.derives:
            buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
            self.inputs = row_inputs(rows, buffer, self.table, runner.max_seqs)

    def take(self, packed: torch.Tensor, block_table: torch.Tensor) -> None:
        self.table[:, : block_table.shape[1], : block_table.shape[2]] = block_table
        self.inputs = self.layout.device(packed.clone(), self.table, self.layout.each or 1)

    def run(self, adapted: bool) -> None:
        assert not adapted
        if self.derives:
            self.runner._state.derive(self.inputs)
        self.hidden = self.runner._body(self.inputs)

    def sample(self, tail: int) -> Any:
        return self.runner._head.tails[tail](self.inputs, self.hidden)

    def logits(self) -> None:
        self.found = self.runner._tails.logits(self.inputs, self.hidden)

    def sample_masked(self, tail: int) -> Any:
        mask = self.runner._tails.mask(self.inputs.sampled_slots.numel())
        return self.runner._head.tails[tail](self.inputs, self.hidden, mask, self.found)


def test_drafts_in_the_layout_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have room for more tokens than they bring, and there are rows of padding."""
    rng, used, held = random.Random(4), Counter[str](), dict[tuple[int, int], Uncaptured]()
    asked = [any_request(rng) for _ in range(12)]
    plain = run(engine(None, asynchronous=False, pages=256), asked, {})

    def uncaptured(each: int, name: str, rows: int) -> Uncaptured:
        used[name] += 1
        return held.setdefault((each, rows), Uncaptured(RUNNER, rows + 2, each))

    graphs = SimpleNamespace(for_rows=partial(uncaptured, 1, "plain"), for_drafts=partial(uncaptured, 9, "drafted"))
    monkeypatch.setattr(RUNNER, "_graphs", graphs)
    made = engine(RecordedProposer(plain, 0.9, free=False), asynchronous=True, pages=256)
    for key, answer in run(made, asked, {}).items():
        want = plain[key]
        assert (answer.tokens, answer.text, answer.end) == (want.tokens, want.text, want.end), asked[int(key[0])][1]
    assert min(used["plain"], used["drafted"]) > 3


@pytest.mark.parametrize("edits", [False, True])
def test_masks_in_the_layout_of_a_graph(monkeypatch: pytest.MonkeyPatch, edits: bool) -> None:
    """Logits and samples are two parts of a step then; with drafts unless rows edit their logits."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: there are no grammars")
    used, held = Counter[tuple[int, int]](), dict[tuple[int, int], Uncaptured]()
    grammar = Grammar("regex", "([0-9]{2,8}, )*[a-c]{5,20}")
    kinds: list[dict[str, Any]] = [{"grammar": grammar}, {"temperature": 0}, {"grammar": grammar, "speculate": False}]
    kinds += [{"grammar": grammar, "logprobs": 2, "max_tokens": 4}]
    kinds += [{"repetition_penalty": 1.3}, {"grammar": grammar, "presence_penalty": 1.0}] if edits else []
    each: list[dict[str, Any]] = [{"max_tokens": 9 + i, "seed": i} | kinds[i % len(kinds)] for i in range(12)]
    asked = [([i, 2, 3], SamplingParams(**fields)) for i, fields in enumerate(each)]
    plain = run(engine(None, asynchronous=False, pages=256), asked, {})

    def uncaptured(each: int, rows: int) -> Uncaptured:
        return held.setdefault((each, rows), Uncaptured(RUNNER, rows + 2, each))

    def masked(graph: Uncaptured, tail: int) -> Any:
        used[graph.layout.each or 1, tail] += 1
        return sample(graph, tail)

    sample = Uncaptured.sample_masked
    monkeypatch.setattr(Uncaptured, "sample_masked", masked)
    graphs = SimpleNamespace(for_rows=partial(uncaptured, 1), for_drafts=partial(uncaptured, 9))
    monkeypatch.setattr(RUNNER, "_graphs", graphs)
    made = engine(None if edits else RecordedProposer(plain, 0.9, free=False), asynchronous=True, pages=256)
    for key, answer in run(made, asked, {}).items():
        want = plain[key]
        assert (answer.tokens, answer.text, answer.end) == (want.tokens, want.text, want.end), asked[int(key[0])][1]
        assert answer.tops == want.tops
    assert used.keys() >= ({(1, FULL)} if edits else {(1, PLAIN), (9, PLAIN), (9, SCORED)})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_draft_model(asynchronous: bool) -> None:
    """One that agrees, because it is the model itself, and one that does not."""
    rng = random.Random(5)
    asked = [([rng.randrange(256) for _ in range(rng.randint(1, 60))], SamplingParams(max_tokens=40, seed=i)) for i in range(8)]
    plain = run(engine(None, asynchronous=False, pages=256), asked, {})
    torch.manual_seed(11)
    model = random_model(CONFIG, device=torch.device("cpu"), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * parameter.std() / 2
    other = runner_of(model, 256, 256, OPTIONS)
    itself = runner_of(RUNNER.model, 256, 256, OPTIONS)
    shares = []
    for runner in (itself, other):
        made = engine(DraftModel(runner, max_seqs=8, most_tokens=16), asynchronous=asynchronous, pages=256)
        found = run(made, asked, {})
        assert {k: (a.tokens, a.end) for k, a in found.items()} == {k: (a.tokens, a.end) for k, a in plain.items()}
        shares.append(made.stats().accepted_tokens / made.stats().drafted_tokens)
    assert shares[0] > 0.99
    assert shares[1] < 0.9


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_distribution_of_sampled_tokens() -> None:
    """210,000 draws of three tokens each out of four, most of them at drafted positions: chi-square against the softmax."""
    allowed, temperature, requests = (40, 80, 120, 160), 0.3, 70_000
    guess = random.Random(2)
    sizes: dict[str, Any] = {"max_seqs": 64, "max_tokens_per_step": 512, "max_model_len": 256, "max_samples": 256}
    runner: Any = Lagging(ModelRunner(RUNNER.model, num_pages=512, page_size=4, **sizes), asynchronous=True)
    scheduler = Scheduler(blocks=BlockPool(512, 4), max_waiting=100, **sizes)
    made = Engine(runner, None, (END,), scheduler, vocab_size=VOCAB, proposer=RecordedProposer({}, 0.0, free=False))
    made._speculator.proposer.propose = lambda asked: {r: guess.choices(allowed, k=most) for r, most in asked.items()}  # type: ignore[union-attr]
    params = [SamplingParams(max_tokens=3, temperature=temperature, allowed_token_ids=allowed, seed=i) for i in range(requests)]
    counts, waiting = Counter[tuple[int, ...]](), iter(params)
    tokens: dict[str, list[int]] = defaultdict(list)
    done = 0
    while done < requests:
        while len(made.scheduler.waiting) < 80 and (one := next(waiting, None)) is not None:
            made.submit([1, 2, 3], one)
        for delta in made.step():
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                counts[tuple(tokens.pop(delta.request_id))] += 1
                done += 1
    assert made.stats().accepted_tokens > requests / 8

    def chances(output: tuple[int, ...]) -> dict[int, float]:
        """Of each token behind these, from the logits of a step of its own."""
        seen: list[torch.Tensor] = []
        head, RUNNER.model.logits = RUNNER.model.logits, lambda hidden: (seen.append(head(hidden)), seen[-1])[1]
        alone = engine(None, asynchronous=False, pages=256)
        run(alone, [([1, 2, 3, *output], SamplingParams(max_tokens=1))], {})
        RUNNER.model.logits = head
        return dict(zip(allowed, (seen[0][0][list(allowed)] / temperature).double().softmax(0).tolist(), strict=True))

    chances = lru_cache(chances)
    square = 0.0
    for text in itertools.product(allowed, repeat=3):
        want = requests * math.prod(chances(text[:i])[text[i]] for i in range(3))
        square += (counts[text] - want) ** 2 / want
    degrees = len(allowed) ** 3 - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty, 1 in 10,000
    assert square < bound, f"chi-square is {square:.1f}, wanted less than {bound:.1f}"
