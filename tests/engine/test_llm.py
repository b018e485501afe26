"""`LLM` over a fake model: prompts in, completions out in their order, and nothing left behind after errors and interrupts."""

import itertools
from types import SimpleNamespace

import pytest

from tests.engine.fake_runner import FakeRunner, byte_tokenizer, expected, fault_at
from tilewright.engine import llm as llm_module
from tilewright.engine.config import EngineConfig
from tilewright.engine.llm import LLM
from tilewright.engine.request import QueueFull, RequestTooLong, SamplingParams

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size


@pytest.fixture
def make(monkeypatch, tmp_path):
    """LLM(...) over a fake runner, with the loader replaced."""

    def build(*, asynchronous=True, faults=lambda number: None, pages=64, **options) -> LLM:
        def load(config: EngineConfig, progress):
            size = config.page_size
            runner = FakeRunner(pages, size, vocab_size=VOCAB, asynchronous=asynchronous, faults=faults)
            return SimpleNamespace(
                runner=runner,
                tokenizer_path=tmp_path,
                tokenizer=None,
                config=SimpleNamespace(vocab_size=VOCAB + 7),
                plan=SimpleNamespace(host_pages=0, num_pages=pages, page_size=size, window_pages=0, max_model_len=200),
                adapters=None,
                draft=None,
                draft_head=False,
            )

        TOKENIZER._backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        monkeypatch.setattr(llm_module, "_load", load)
        return LLM(**{"page_size": 4, "max_seqs": 4, "max_tokens_per_step": 32, **options})

    return build


def ending(prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
    return expected(prompt, params, seed, vocab_size=VOCAB, eos_ids=(256,))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_generate(make, asynchronous):
    llm = make(asynchronous=asynchronous, max_waiting=3)
    params = [SamplingParams(max_tokens=3 + i % 5, seed=i, n=1 + i % 3) for i in range(12)]
    prompts = [f"a prompt, number {i}" for i in range(12)]
    done = llm.generate(prompts, params)
    for prompt, param, completion in zip(prompts, params, done, strict=True):
        assert completion.prompt_ids == list(prompt.encode())
        assert [output.index for output in completion.outputs] == list(range(param.n))
        for output in completion.outputs:
            tokens = ending(completion.prompt_ids, param, (param.seed or 0) + output.index)
            assert output.token_ids == tokens
            assert output.text == llm.tokenizer.decode(tokens)
            assert output.finish_reason in ("stop", "length")
            assert (output.logprobs, output.error) == (None, None)
    assert llm.engine.stats().pages_used == 0


def test_generate_takes_one_text_or_token_ids(make):
    llm = make()
    params = SamplingParams(max_tokens=3, seed=1, logprobs=0, prompt_logprobs=0)
    text, ids = llm.generate("hello", params), llm.generate([list(b"hello")], params)
    assert text == ids
    assert [entry.token_id for entry in text[0].prompt_logprobs or ()] == list(b"ello")
    assert len(text[0].outputs[0].logprobs or ()) == 3
    assert llm.generate([], params) == []
    with pytest.raises(ValueError, match="wanted a text or a list of token ids"):
        llm.generate([104, 105], params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params has 2 entries for 1 prompts"):
        llm.generate("hello", [params, params])


def test_generate_refuses_what_does_not_fit_and_goes_on(make):
    llm = make(max_waiting=2)
    with pytest.raises(RequestTooLong, match="together 206; the model takes 200"):
        llm.generate(["short", "x" * 190], SamplingParams(max_tokens=16))
    with pytest.raises(QueueFull, match="3 more asked for, 2 may wait"):
        llm.generate("short", SamplingParams(n=3))
    assert not llm.engine.has_work
    assert llm.engine.stats().pages_used == 0
    assert len(llm.generate("short", SamplingParams(max_tokens=2, seed=1))[0].outputs[0].token_ids) == 2


def test_generate_reports_failures(make):
    llm = make(faults=fault_at(2), asynchronous=False)
    output = llm.generate("hello", SamplingParams(max_tokens=5, seed=1))[0].outputs[0]
    assert (output.finish_reason, output.error) == ("error", "the step failed: Fault: out of memory")
    assert len(output.token_ids) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [1, 3, -1, -3])
def test_an_interrupt_frees_everything(make, number, asynchronous):
    armed = True

    def faults(seen: int) -> None:
        if armed and seen == number:
            raise KeyboardInterrupt

    llm = make(faults=faults, asynchronous=asynchronous)
    params = SamplingParams(max_tokens=6, seed=1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "hello there", "bye"], params)
    armed = False
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.pages_cached, stats.aborted) == (0, 0, 0, 0, 3)
    assert not llm.engine.has_work
    assert llm.generate("hello", params)[0].outputs[0].token_ids == ending(list(b"hello"), params, 1)


def test_stream_and_leaving_it_early(make):
    llm = make()
    params = SamplingParams(max_tokens=8, seed=3, n=2)
    deltas = list(llm.stream("hello", params))
    for index in range(2):
        tokens = [token for delta in deltas if delta.index == index for token in delta.token_ids]
        assert tokens == ending(list(b"hello"), params, 3 + index)
    first = list(itertools.islice(stream := llm.stream("hello", params), 3))
    assert len(first) == 3
    stream.close()
    assert llm.engine.stats().pages_used == 0
    assert llm.generate("hello", params)[0].outputs[0].token_ids == ending(list(b"hello"), params, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seqs": 0}, "max_seqs is 0, wanted 1 or more"),
        ({"max_tokens_per_step": 100}, "max_tokens_per_step is 100, wanted 256, max_seqs or more"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options)
