"""Draft heads: what they guess is what their definition says, nothing is lost by them, and what does not fit is refused."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from tests.engine import head_folders as folders
from tests.engine.head_folders import AUX, HIDDEN, Guess, oracle, write_model
from tests.engine.test_speculation_exact import any_request
from tests.server.fake_engine import VOCAB
from tilewright.engine.llm import LLM
from tilewright.engine.request import Request, SamplingParams
from tilewright.models import ModelError

SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 120, "kv_cache_bytes": 1 << 21, "page_size": 4, "max_seqs": 8}
KINDS = ("eagle", "eagle3", "eagle3-normed", "mtp")
SHORT = ["eagle", "eagle3", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[2:])]
"""Two kinds are enough where the layers between make no difference."""


class Made:
    """A model, its head, and the head's definition."""

    def __init__(self, kind: str, folder: Path):
        if kind == "mtp":
            self.model, self.head = folder, None
            _, self.guess = folders.mtp(folder, oracle("DeepseekV3", 3, num_hidden_layers=2))
        else:
            made = oracle("Llama", 3, num_hidden_layers=3)
            self.model = write_model(folder / "model", made)
            more = {"normed": True} if kind == "eagle3-normed" else {}
            write = folders.eagle if kind == "eagle" else folders.eagle3
            self.head, self.guess = write(folder / "head", made, **more)

    @property
    def options(self) -> dict[str, Any]:
        return {"speculate": "mtp"} if self.head is None else {"draft": str(self.head)}

    def llm(self, **more: Any) -> LLM:
        return LLM(str(self.model), **SIZES, **self.options, **more)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp(request.param))


class Spy:
    """Notes what a proposer says about which text."""

    free = False

    def __init__(self, inner: Any):
        self.inner = inner
        self.said: list[tuple[list[int], Sequence[int]]] = []

    def propose(self, asked: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        found = self.inner.propose(asked)
        self.said += [(request.tokens(0, len(request)), found[request]) for request in asked]
        return found


def spied(llm: LLM) -> Spy:
    speculator: Any = llm.engine._speculator
    speculator.proposer = Spy(speculator.proposer)
    return speculator.proposer


def answers(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    done = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return [[(one.token_ids, one.text, one.finish_reason) for one in request.outputs] for request in done]


def test_guesses_are_those_of_the_definition(made: Made) -> None:
    """Over long prompts and short ones, beside each other, with pages that are shared, and behind guesses that were wrong."""
    rng = random.Random(2)
    stem = [rng.randrange(256) for _ in range(21)]
    prompts = [stem + [rng.randrange(256) for _ in range(n)] for n in (1, 9)] + [[5], [7, 8, 9, 10]] + [[*stem, 3]]
    llm = made.llm(draft_tokens=3, max_tokens_per_step=16)
    spy = spied(llm)
    for prompt in (prompts[:4], prompts[4:]):
        answers(llm, [(one, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)) for one in prompt])
    assert len(spy.said) > 10
    assert llm.engine.stats().prefix_hit_tokens >= 20
    lengths = {len(tokens) for tokens, _ in spy.said}
    assert len(lengths) > 8
    for tokens, found in spy.said:
        assert found == made.guess(tokens, len(found)), tokens


@pytest.mark.parametrize("made", SHORT, indirect=True)
def test_nothing_is_lost(made: Made) -> None:
    rng = random.Random(0)
    asked = [any_request(rng) for _ in range(7)]
    plain = answers(LLM(str(made.model), **SIZES), asked)
    llm = made.llm(draft_tokens=4)
    assert answers(llm, asked) == plain
    assert llm.engine.stats().drafted_tokens > 12


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_head_that_knows_all_is_always_right(kind: str, tmp_path: Path) -> None:
    """The model looks at its last token alone, and the head does the same: where they agree, so do their samples, at any
    temperature, if both draw with the noise of the same position."""
    first = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    made = oracle("Llama" if kind == "eagle" else "DeepseekV3", 4, num_hidden_layers=2, first_k_dense_replace=2)
    for name, parameter in made.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        elif name == "model.norm.weight":
            parameter.fill_(1.0)
        elif name == "model.embed_tokens.weight":  # of length 1 already, so that EAGLE's head, without a norm, is the model's
            parameter.div_(parameter.square().mean(-1, keepdim=True).sqrt())
        elif name == "lm_head.weight":
            parameter.mul_(2.0)
    guess: Guess
    if kind == "eagle":
        write_model(tmp_path, made)
        head, guess = folders.eagle(tmp_path / "head", made, fc=first, still=True)
        options: dict[str, Any] = {"draft": str(head)}
    else:
        _, guess = folders.mtp(tmp_path, made, proj=first, still=True)
        options = {"speculate": "mtp"}
    llm = LLM(str(tmp_path), **SIZES, **options)
    params = [SamplingParams(max_tokens=60, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0.0, 0.7, 1.0))]
    answers(llm, [([3, i], one) for i, one in enumerate(params)])
    stats = llm.engine.stats()
    assert stats.drafted_tokens > 100
    assert stats.accepted_tokens / stats.drafted_tokens > 0.97
    assert guess([3, 4], 1)  # the definition agrees with transformers that there is such a head


def changed(folder: Path, to: Path, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A copy of a head with other values; None takes one out."""
    to.mkdir()
    told = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**told, **(config or {})}))
    held = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, to / "model.safetensors")
    return to


def refusals(head: Path, kind: str) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    fc = load_file(head / "model.safetensors")["fc.weight"]
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"vocab_size": VOCAB + 1}, {}, "is a draft head for 259 tokens, but the model has 258"),
        ({"architectures": ["Qwen9Eagle"]}, {}, "is a draft head for a 'Qwen9Eagle', wanted one for Llama"),
        ({}, {"fc.weight": fc.to(torch.int32)}, "fc.weight is .* of I32, wanted"),
    ]
    if kind == "eagle":
        cases += [
            ({"hidden_size": 64, "head_dim": 8}, {}, "reads 64 numbers per token, but the model provides 32"),
            ({}, {"layers.0.mlp.up_proj.weight": None}, "mlp.up_proj.weight: missing"),
        ]
    else:
        short = torch.zeros(100, dtype=torch.int64) + VOCAB
        cases += [
            ({}, {"fc.weight": fc[:, :-1].contiguous()}, r"reads 95 numbers per token, but the model provides 96"),
            ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, {}, "reads the layers .*, wanted layers of the model, 0 to 2"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, {}, "numbers per token"),
            ({"draft_vocab_size": 0}, {}, "has draft_vocab_size 0, wanted 1 to 258"),
            ({"num_hidden_layers": 2}, {}, "has 2 layers, wanted a draft head with one"),
            ({}, {"d2t": None}, "has 100 tokens but no d2t"),
            ({}, {"d2t": short}, "does not map to 100 different tokens below 258"),
            ({}, {"lm_head.weight": torch.zeros(99, HIDDEN)}, r"lm_head.weight: shape is \[99, 32\]"),
        ]
    return cases


def test_a_head_that_does_not_fit_is_one_sentence(made: Made, tmp_path: Path) -> None:
    if made.head is None:
        with pytest.raises(ModelError, match=r"has no MTP layer, because it has no tensor model.layers.2.eh_proj.weight"):
            LLM(str(write_model(tmp_path / "plain", oracle("DeepseekV3", 3, num_hidden_layers=2))), **SIZES, speculate="mtp")
        return
    kind = "eagle" if "eagle3" not in str(made.head) else "eagle3"
    for i, (config, tensors, words) in enumerate(refusals(made.head, kind)):
        head = changed(made.head, tmp_path / str(i), config, **tensors)
        with pytest.raises(ModelError, match=words):
            LLM(str(made.model), **SIZES, draft=str(head))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text((made.head / "config.json").read_text())
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="only pickled weights"):
        LLM(str(made.model), **SIZES, draft=str(tmp_path / "pickled"))


def test_what_takes_no_head(made: Made) -> None:
    with pytest.raises(ModelError, match="is a LlamaForCausalLM, wanted one of DeepseekV3ForCausalLM, which have MTP"):
        LLM("bookworm", **SIZES, speculate="mtp")
    if made.head is not None:
        with pytest.raises(ModelError, match="draft head for 258 tokens"):
            LLM("bookworm", **SIZES, draft=str(made.head))


def test_the_memory_of_a_head_is_planned(made: Made) -> None:
    plain = LLM(str(made.model), **SIZES).plan
    plan = made.llm().plan
    heads = 2 * 2 * 8 if made.head is not None else 32 + 8  # keys and values of one layer; a latent
    assert plan.page_bytes - plain.page_bytes == 4 * 4 * (heads + HIDDEN)
    assert plan.weights_bytes > plain.weights_bytes
    assert len(AUX) * HIDDEN > HIDDEN, "what three layers give is kept as one state"
