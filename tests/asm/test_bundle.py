"""Bundles: made without a GPU, complete, checked before use. And the counter that shows it, with its reasons."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton import knobs

from tilewright.asm import bundle
from tilewright.asm.bundle import BundleRefused
from tilewright.asm.compile import compile_only
from tilewright.asm.jit import CompileCounter, Compiled, LateCompile, raise_late
from tilewright.engine.config import EngineConfig
from tilewright.engine.loading import facts_of, load, make_bundle, runner_of
from tilewright.hw import env
from tilewright.hw.device import device_named
from tilewright.models import SHAPES, empty_model
from tilewright.models.config import ModelConfig
from tilewright.op import on_card

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles nothing")

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, windows=(None, None),
    dtype=torch.bfloat16,
)  # fmt: skip
OPTIONS = EngineConfig(max_seqs=2, max_tokens_per_step=32)
H100 = device_named("h100")
FACTS = facts_of(CONFIG, torch.bfloat16, OPTIONS)


@pytest.fixture(autouse=True)
def _own_manager() -> Iterator[None]:
    before = knobs.cache.manager_class
    yield
    knobs.cache.manager_class = before


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "llama"
    found = make_bundle(folder, CONFIG, OPTIONS, card=H100, jobs=2, progress=lambda words: None)
    assert {"_gemv_kernel", "_rms_norm_kernel", "_stream_kernel", "_varlen_kernel"} <= set(found.kernels)
    return folder


def rehearsal(options: EngineConfig = OPTIONS) -> tuple[Compiled, ...]:
    """What a start of the engine asks Triton for."""
    counter = CompileCounter().start()
    runner = runner_of(empty_model(CONFIG, device="meta", dtype=torch.bfloat16), 1024, 256, options)
    with on_card(H100), compile_only(90, 1):
        runner.warmup(lambda words: None)
    counter.stop()
    return counter.compiled


def test_a_start_with_the_bundle_compiles_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))  # Triton's own cache is empty
    found = bundle.use(made, arch=90, facts=FACTS)
    asked = rehearsal()
    assert len(asked) == len(found.kernels)
    assert [event.kernel for event in asked if not event.from_disk] == []


def test_only_what_is_launched_is_kept(made: Path) -> None:
    assert {path.suffix for path in (made / "kernels").rglob("*") if path.is_file()} == {".cubin", ".json"}
    assert not list((made / "kernels").rglob("__grp__*"))
    assert bundle.read(made).toolchain["arch"] == "sm_90"


def spoil(folder: Path, **changes: object) -> None:
    path = folder / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: spoil(f, toolchain={**bundle.toolchain(90), "triton": "3.5.0"}), "made for triton 3.5.0, here"),
        (lambda f: spoil(f, use={**FACTS, "max_seqs": 64}), "made for max_seqs 64, here 2"),
        (lambda f: spoil(f, schema=9), "format 9, wanted 1"),
        (lambda f: spoil(f, files={"../../x.cubin": "0"}), "outside its folder"),
        (lambda f: spoil(f, files={"A" * 40 + "/x.so": "0"}), "outside its folder"),
        (lambda f: spoil(f, files={"A" * 40 + "/x.cubin": "0"}), "missing or changed"),
        (lambda f: spoil(f, files=3), "does not describe a bundle"),
        (lambda f: (f / "bundle.json").write_text("{"), "does not describe a bundle"),
        (lambda f: (f / "bundle.json").write_text(" " * (17 << 20)), "wanted at most"),
        (lambda f: (f / "bundle.json").unlink(), "is not a bundle"),
        (lambda f: next((f / "kernels").rglob("*.cubin")).write_bytes(b"x"), "missing or changed"),
        (lambda f: next((f / "kernels").rglob("*.cubin")).unlink(), "missing or changed"),
    ],
)
def test_refused(made: Path, tmp_path: Path, change: object, words: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    bundle.use(folder, arch=90, facts=FACTS)
    change(folder)  # pyright: ignore[reportCallIssue]
    with pytest.raises(BundleRefused, match=words):
        bundle.use(folder, arch=90, facts=FACTS)


def test_another_card_is_refused(made: Path) -> None:
    with pytest.raises(BundleRefused, match="arch sm_90, here sm_80"):
        bundle.use(made, arch=80, facts=FACTS)


def test_a_bundle_on_a_cpu_is_refused(made: Path) -> None:
    with pytest.raises(ValueError, match="leave --bundle out"):
        load(CONFIG, replace(OPTIONS, bundle=str(made), device="cpu"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="not empty"):
        make_bundle(tmp_path, CONFIG, OPTIONS, card=H100, jobs=1, progress=lambda words: None)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_facts_tell_models_apart() -> None:
    shapes = [facts_of(config, torch.bfloat16, OPTIONS) for config in SHAPES.values()]
    assert all(a != b for i, a in enumerate(shapes) for b in shapes[:i])


def test_late_kernels_are_named_with_their_reason(made: Path) -> None:
    bundle.use(made, arch=90, facts=FACTS)
    late: list[Compiled] = []
    counter = CompileCounter(on_late=late.append).start()
    rehearsal()
    counter.mark_ready()
    rehearsal(replace(OPTIONS, page_size=32))
    counter.stop()
    assert late
    assert counter.after_ready == sum(not event.from_disk for event in late)
    assert {event.kernel for event in late} >= {"_varlen_kernel"}
    assert any("S: 16 -> 32" in event.reason for event in late)


def test_strict_raises_on_a_compile_and_not_on_a_read() -> None:
    event = Compiled(kernel="k", arch=90, from_disk=True, seconds=0.1, reason="EVEN_K: True -> False")
    raise_late(event)
    with pytest.raises(LateCompile, match="k was compiled after the start: EVEN_K: True -> False"):
        raise_late(replace(event, from_disk=False))
