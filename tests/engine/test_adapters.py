"""Many adapters in one engine: the answers of merged weights, whatever else is in the batch; loaded and unloaded meanwhile."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.tiny_model import write_tiny_model
from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.llm import LLM
from tilewright.engine.request import SamplingParams
from tilewright.models import ModelError, load_config, load_model, random_model, save_model
from tilewright.models.adapter_config import AdapterConfig
from tilewright.models.adapters import Adapter, Pair, merge, read_adapter, save_adapter, targets_of

PROMPTS = ["the quick brown fox", "the quick brown fox jumps", "a", "the quick brown fox jumps over the lazy dog and runs"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def write_adapter(
    base: Path, folder: Path, seed: int, *, rank: int = 4, targets: tuple[str, ...] = (), size: float = 0.3
) -> Path:
    """An adapter that changes what the model says."""
    config = AdapterConfig(rank=rank, alpha=2.0 * rank, targets=targets or "all-linear", base=str(base))
    generator, found = torch.Generator().manual_seed(seed), {}
    model = load_model(base, device="cpu")
    for name in config.chosen(of := targets_of(model)):
        a = torch.randn(rank, of[name].cols, generator=generator) * size
        found[name] = Pair(a, torch.randn(of[name].rows, rank, generator=generator) * size, config.scale_of(name))
    save_adapter(Adapter(config=config, pairs=found), folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are far apart: greedy tokens then do not hang on a last bit."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    raw = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(raw))
    save_model(random_model(load_config(folder), device="cpu", dtype=torch.float32, seed=5), folder)
    return folder


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(base, home / "one", 1),
        "two": write_adapter(base, home / "two", 2, rank=7, targets=("q_proj", "v_proj", "down_proj")),
        "three": write_adapter(base, home / "three", 3, rank=1, targets=("up_proj", "k_proj")),
    }


@pytest.fixture(scope="module")
def merged(base: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list[list[int]]]:
    """What the base and the merged models answer to `PROMPTS`."""
    found: dict[str | None, list[list[int]]] = {}
    for name in (None, *folders):
        folder = base
        if name is not None:
            model = load_model(base, device="cpu")
            merge(model, read_adapter(folders[name], targets_of(model)))
            save_model(model, folder := tmp_path_factory.mktemp("merged") / name, base)
        llm = LLM(str(folder), device="cpu", kv_cache_bytes=1 << 22)
        found[name] = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    answers = [json.dumps(answer) for answer in found.values()]
    assert len(set(answers)) == len(answers), "the adapters change nothing: the test would show nothing"
    return found


def named(folders: dict[str, Path]) -> tuple[str, ...]:
    return tuple(f"{name}={folder}" for name, folder in folders.items())


def with_adapter(name: str | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "adapter": name, **more})


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few pages, small chunks": {"kv_cache_bytes": 30 << 10, "page_size": 4, "prefill_chunk": 5},
    "no prefix cache": {"prefix_cache": False, "page_size": 4},
    "guessing ahead": {"speculate": "ngram", "draft_tokens": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_answers_are_those_of_merged_weights(
    base: Path, folders: dict[str, Path], merged: dict[str | None, list[list[int]]], options: dict[str, Any]
) -> None:
    llm = LLM(
        str(base), device="cpu", **{"kv_cache_bytes": 1 << 22, "adapters": named(folders), "max_model_len": 96, **options}
    )
    names = [None, *folders]
    asked = [(name, i) for i in range(len(PROMPTS)) for name in names]
    for _ in range(2):  # the second time with a warm prefix cache
        done = llm.generate([PROMPTS[i] for _, i in asked], [with_adapter(name) for name, _ in asked])
        for (name, i), one in zip(asked, done, strict=True):
            assert one.outputs[0].token_ids == merged[name][i], f"{name}: {PROMPTS[i]!r}"
    if "page_size" in options and "prefix_cache" not in options:
        stats = llm.engine.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens > 0


def test_pages_are_shared_within_an_adapter_alone(base: Path, folders: dict[str, Path]) -> None:
    llm = LLM(str(base), device="cpu", kv_cache_bytes=1 << 22, page_size=4, adapters=named(folders))
    prompt = "a prompt of some length"

    def hit(name: str | None) -> int:
        before = llm.engine.stats().prefix_hit_tokens
        llm.generate(prompt, with_adapter(name, max_tokens=1))
        return llm.engine.stats().prefix_hit_tokens - before

    assert [hit(name) for name in (None, "one", "two")] == [0, 0, 0]
    again = [hit(name) for name in (None, "one", "two")]
    assert min(again) > 0
    # What was loaded anew has other pages, though its name is the same.
    llm.unload_adapter("one")
    llm.load_adapter("one", folders["two"])
    assert hit("one") == 0


def test_loaded_and_unloaded_while_others_run(
    base: Path, folders: dict[str, Path], merged: dict[str | None, list[list[int]]]
) -> None:
    llm = LLM(str(base), device="cpu", kv_cache_bytes=1 << 22, max_adapters=2, adapters=(f"one={folders['one']}",))
    engine = llm.engine
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    names = {engine.submit(ids[0], with_adapter("one")): ("one", 0), engine.submit(ids[1], GREEDY): (None, 1)}
    tokens: dict[str, list[int]] = {name: [] for name in names}

    def steps(count: int) -> None:
        for _ in range(count):
            for delta in engine.step():
                assert delta.error is None
                tokens[delta.request_id] += delta.token_ids

    steps(3)
    llm.load_adapter("two", folders["two"])
    for name in (engine.submit(ids[2], with_adapter("two")), engine.submit(ids[3], with_adapter("two"))):
        names[name] = ("two", 2 if len(names) == 2 else 3)
        tokens[name] = []
    steps(2)
    llm.unload_adapter("one")  # two requests have begun with it, and end with it
    with pytest.raises(UnknownAdapter, match="there is no adapter 'one' here; there are two"):
        engine.submit(ids[0], with_adapter("one"))
    with pytest.raises(ValueError, match="2 adapters are held or still in use"):
        llm.load_adapter("three", folders["three"])
    steps(12)
    llm.load_adapter("three", folders["three"])  # its place is free now
    name = engine.submit(ids[0], with_adapter("three"))
    names[name], tokens[name] = ("three", 0), []
    while engine.has_work:
        steps(1)
    for name, (adapter, prompt) in names.items():
        assert tokens[name] == merged[adapter][prompt], adapter


def test_a_quantised_base_has_adapters(tmp_path: Path) -> None:
    """Int8 layers would be handed codes by the norm before them; an adapter reads numbers."""
    base = write_tiny_model(tmp_path / "wide")
    raw = json.loads((base / "config.json").read_text()) | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    (base / "config.json").write_text(json.dumps(raw))
    save_model(random_model(load_config(base), device="cpu", dtype=torch.float32, seed=5), base)
    folder = write_adapter(base, tmp_path / "one", 1)
    for format in ("int8", "int4"):
        llm = LLM(str(base), device="cpu", kv_cache_bytes=1 << 22, quantize=format, adapters=(f"one={folder}",))
        prompt = "a prompt of more than sixteen tokens, which are few"
        alone = [llm.generate(prompt, with_adapter(name))[0].outputs[0].token_ids for name in (None, "one")]
        both = llm.generate([prompt, prompt], [with_adapter(None), with_adapter("one")])
        assert [one.outputs[0].token_ids for one in both] == alone
        assert alone[0] != alone[1]


def test_memory_is_planned(base: Path, folders: dict[str, Path]) -> None:
    llm = LLM(str(base), device="cpu", kv_cache_bytes=1 << 22, max_adapters=3, max_adapter_rank=8)
    # Two blocks; q, k and v read 32, as o; gate and up too; down reads 48.
    a = 3 * 8 * 32 + 8 * 32 + 2 * 8 * 32 + 8 * 48
    b = (32 + 16 + 16) * 8 + 32 * 8 + 2 * 48 * 8 + 32 * 8
    assert llm.plan.adapters_bytes == 3 * 2 * 4 * (a + b + 3 + 1 + 2 + 1)
    assert "room for LoRA adapters" in str(llm.plan)


# ---- what is refused


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight" for letter in "AB")

DAMAGES: dict[str, tuple[Any, str]] = {
    "no folder": (lambda f: [path.unlink() for path in f.iterdir()] and f.rmdir(), "does not exist"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "broken config": (lambda f: (f / "adapter_config.json").write_text("{"), "is not JSON"),
    "list": (lambda f: (f / "adapter_config.json").write_text("[]"), "must contain a JSON object"),
    "another method": (lambda f: change_config(f, peft_type="IA3"), "has the peft_type 'IA3', wanted LORA"),
    "magnitudes": (lambda f: change_config(f, use_dora=True), "requires magnitudes (DoRA)"),
    "biases": (lambda f: change_config(f, bias="all"), "has trained biases"),
    "whole layers": (lambda f: change_config(f, modules_to_save=["lm_head"]), "completely trained layers"),
    "changed base": (lambda f: change_config(f, init_lora_weights="pissa_niter_4"), "changes the base"),
    "rank is text": (lambda f: change_config(f, r="4"), "r is '4', wanted an integer"),
    "rank of nothing": (lambda f: change_config(f, r=0), "r is '0', wanted an integer"),
    "bad pattern": (lambda f: change_config(f, rank_pattern={"((": 1}), "cannot be read"),
    "a pattern for ever, and half a pair": (
        lambda f: (change_config(f, target_modules=r"(\w+\.?)+X"), change_tensors(f, lambda t: t.pop(B))), "has no tensor base_"
    ),
    "rank pattern that takes for ever": (lambda f: change_config(f, rank_pattern={".*.*.*.*X": 2}), "has repeated groups"),
    "alpha is infinite": (lambda f: change_config(f, lora_alpha=float("inf")), "wanted a number"),
    "rank above the maximum": (lambda f: change_config(f, r=64), "has an adapter of rank 64, but the limit here is 16"),
    "another rank": (lambda f: change_config(f, r=5), "wanted [5, 32]"),
    "unknown targets": (lambda f: change_config(f, target_modules=["fc1"]), "names no layer of this model"),
    "fewer targets": (lambda f: change_config(f, target_modules=["v_proj"]), "which belongs to no layer that adapter_config"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "pickled": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "an adapter_model.bin is pickled"
    ),
    "cut off": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x10\0\0"), "is not a complete safetensors file"),
    "missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(B)), "has no tensor base_model.model.model.layers.0"),
    "unknown tensor": (
        lambda f: change_tensors(f, lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[A].clone()})),
        "has the tensor 'base_model.model.lm_head.lora_A.weight', which belongs to no layer",
    ),
    "another base": (lambda f: change_tensors(f, lambda t: t.update({A: torch.zeros(4, 31)})), "is for another model"),
    "NaN": (lambda f: change_tensors(f, lambda t: t[B].view(-1)[3:4].fill_(float("nan"))), "numbers that are not finite"),
    "infinity": (lambda f: change_tensors(f, lambda t: t[A].view(-1)[:1].fill_(float("inf"))), "numbers that are not finite"),
    "integers": (lambda f: change_tensors(f, lambda t: t.update({A: t[A].to(torch.int8)})), "of dtype I8, wanted one of BF16"),
}  # fmt: skip


@pytest.fixture(scope="module")
def victim(base: Path, folders: dict[str, Path]) -> LLM:
    return LLM(str(base), device="cpu", kv_cache_bytes=1 << 22, max_adapters=3, adapters=(f"one={folders['one']}",))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_adapter_is_one_sentence_and_nobody_else_notices(
    base: Path, victim: LLM, merged: dict[str | None, list[list[int]]], tmp_path: Path, damage: tuple[Any, str]
) -> None:
    change, words = damage
    change(folder := write_adapter(base, tmp_path / "bad", 9))
    engine, tokens = victim.engine, list[int]()
    engine.submit(victim.tokenizer.encode(PROMPTS[0]), with_adapter("one"))
    for _ in range(4):
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        victim.load_adapter("bad", folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    while engine.has_work:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == merged["one"][0]
    assert engine.adapters is not None
    assert list(engine.adapters.names) == ["one"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"adapters": ("one",)}, "adapter 'one' is no NAME=FOLDER"),
        ({"adapters": ("a=x", "a=y")}, "the adapter's name 'a' is given twice"),
        ({"adapters": ("a b=x",)}, "wanted at most 128 letters, digits"),
        ({"adapters": ("a=/no/such",)}, "adapter a: the folder /no/such does not exist"),
        ({"max_adapters": 5000}, "max_adapters is 5000, wanted at most 4096"),
        ({"max_adapter_rank": 0, "max_adapters": 1}, "max_adapter_rank is 0, wanted 1 or more"),
    ],
)
def test_options_that_are_wrong_are_one_sentence(base: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        LLM(str(base), device="cpu", kv_cache_bytes=1 << 22, **given)


def test_names_that_are_wrong(victim: LLM, folders: dict[str, Path]) -> None:
    with pytest.raises(UnknownAdapter, match="there is no adapter 'nobody' here; there are one"):
        victim.generate("a", adapter="nobody")
    with pytest.raises(ValueError, match="there is an adapter 'one' already"):
        victim.load_adapter("one", folders["two"])
    with pytest.raises(UnknownAdapter):
        victim.unload_adapter("two")
    plain = LLM("bookworm", device="cpu", kv_cache_bytes=1 << 22)
    with pytest.raises(UnknownAdapter, match="has no room for adapters"):
        plain.generate("a", adapter="one")
    with pytest.raises(ValueError, match="no room for adapters"):
        plain.load_adapter("one", folders["one"])
