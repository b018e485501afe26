"""Every decoder family against transformers on random configs: through the engine, and saved and loaded both ways."""

from pathlib import Path

import pytest
import torch

from tests.models.oracles import FAMILIES, make_oracle
from tests.models.random_configs import ENGINE, random_config
from tests.models.running import run_logits
from tilewright import SamplingParams
from tilewright.engine.llm import EngineConfig, load_engine
from tilewright.engine.outputs import Transcript
from tilewright.models import load_model, save_model, save_quantized
from tilewright.quant import quantize

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

LIMIT = 1e-4
TOKENS = [5, 9, 31, 7, 80, 2, 44]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs(family: str, seed: int, tmp_path: Path) -> None:
    """Logits of chunks; then what `save_model` writes, in both libraries."""
    oracle = make_oracle(family, random_config(family, seed), seed)
    oracle.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(0, oracle.config.vocab_size, (19,), generator=torch.Generator().manual_seed(seed)).tolist()
    want = oracle(torch.tensor([tokens])).logits[0]
    model = load_model(tmp_path / "theirs", device="cpu")
    got = run_logits(model, tokens, 7)
    assert want.std() > 0.1  # else the limit would say nothing
    assert (got - want).abs().max() < LIMIT
    save_model(model, tmp_path / "ours")
    again = load_model(tmp_path / "ours", device="cpu")
    assert again.config == model.config
    assert (run_logits(again, tokens, 19) - want).abs().max() < LIMIT
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **plain).eval()
    with torch.no_grad():
        assert (theirs(torch.tensor([tokens])).logits[0] - want).abs().max() < LIMIT


@pytest.mark.parametrize("family", ENGINE)
def test_engine(family: str, tmp_path: Path) -> None:
    """Prompts that share a prefix, in chunks, in a batch, again from cached pages: each token the oracle's likeliest.

    The log-probabilities of prompts and of what was generated are the oracle's of the whole text.
    """
    oracle = make_oracle(family, {**ENGINE[family], "max_position_embeddings": 64})
    oracle.save_pretrained(tmp_path)
    options = EngineConfig(
        max_seqs=3, page_size=4, max_tokens_per_step=16, kv_cache_bytes=1 << 20, prefill_chunk=8, device="cpu"
    )
    engine = load_engine(tmp_path, options)
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(1, 97, (13,), generator=generator).tolist()
    prompts = [[*shared, *torch.randint(1, 97, (n,), generator=generator).tolist()] for n in (1, 6, 12)] + [shared[:3]]
    for asked in (0, None):  # the log-probabilities of a cached prompt are nobody's
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=asked)
        done = {engine.submit(prompt, params): Transcript(prompt, 1) for prompt in prompts}
        while engine.has_work:
            for delta in engine.step():
                done[delta.request_id].add(delta)
        for prompt, transcript in zip(prompts, done.values(), strict=True):
            completion = transcript.completion()
            output = completion.outputs[0]
            text = [*prompt, *output.token_ids]
            want = oracle(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
            assert output.token_ids == want[len(prompt) - 1 :].argmax(-1).tolist()
            assert output.logprobs is not None
            entries = [*(completion.prompt_logprobs or [])[-len(prompt) + 1 :], *output.logprobs]
            got = torch.tensor([entry.logprob for entry in entries if entry is not None])
            assert len(got) == len(output.token_ids) + (len(prompt) - 1 if asked == 0 else 0)
            chosen = want.gather(1, torch.tensor(text[1:])[:, None])[-len(got) :, 0]
            assert (got - chosen).abs().max() < LIMIT
    assert engine.stats().prefix_hit_tokens > 0


def test_longrope_follows_the_longest_text(tmp_path: Path) -> None:
    """Short factors for an engine that takes no more than the model was first trained with; long ones for a text beyond it."""
    long = {"short_factor": [1.0, 1.1, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8], "long_factor": [2.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **long}
    oracle = make_oracle("phi3", {"rope_parameters": rope, "original_max_position_embeddings": 16})
    oracle.save_pretrained(tmp_path)
    prompt = torch.randint(1, 97, (30,), generator=torch.Generator().manual_seed(5)).tolist()
    for longest, ids in ((16, prompt[:12]), (64, prompt)):
        options = EngineConfig(max_seqs=1, max_model_len=longest, kv_cache_bytes=1 << 20, device="cpu")
        engine = load_engine(tmp_path, options)
        name = engine.submit(ids, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        transcript = Transcript(ids, 1)
        while engine.has_work:
            for delta in engine.step():
                assert delta.request_id == name
                transcript.add(delta)
        tokens = transcript.completion().outputs[0].token_ids
        want = oracle(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
        assert tokens == want.argmax(-1).tolist()


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("family", ["gemma2", "glm4", "olmo2", "phi3"])
def test_quantised_models_are_saved_and_loaded(family: str, format: str, tmp_path: Path) -> None:
    """Merged and whole tensors alike: the same logits from the folder as from the model that was quantised."""
    changes = {**ENGINE[family], "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}
    make_oracle(family, changes).save_pretrained(tmp_path / "floats")
    model = load_model(tmp_path / "floats", device="cpu")
    quantize(model, format)
    save_quantized(model, tmp_path / "codes", tmp_path / "floats")
    want = run_logits(model, TOKENS, 5)
    assert torch.equal(run_logits(load_model(tmp_path / "codes", device="cpu"), TOKENS, 5), want)
    assert (want - run_logits(load_model(tmp_path / "floats", device="cpu"), TOKENS, 5)).abs().max() > 1e-4
