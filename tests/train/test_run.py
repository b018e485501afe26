"""Whole runs of a tiny model: killed and resumed, with a full disk, fine-tuned on conversations, sampled, saved and loaded."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.server.tiny_model import write_tiny_model
from tilewright.cli import app
from tilewright.data.shards import write
from tilewright.engine.chat_runs import chat_runs
from tilewright.engine.tokenizer import Tokenizer
from tilewright.extras import MissingExtra
from tilewright.models import (
    ModelError,
    empty_model,
    load_config,
    load_model,
    save_model,
)
from tilewright.train import checkpoint
from tilewright.train.config import TrainConfig, merged, read_toml, to_toml
from tilewright.train.main import train
from tilewright.train.setup import costs_of, learning_rate, plan_memory
from tilewright.train.step import train_step

TEXT = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "books.jsonl"
    generator = np.random.default_rng(0)
    lines = [json.dumps({"text": TEXT * int(generator.integers(1, 9)) + f"book {i}"}) for i in range(40)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def config(model: Path, books: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(**changes: Any) -> TrainConfig:
        small: dict[str, Any] = {"row_tokens": 48, "micro_rows": 2, "micro_batches": 2, "steps": 12, "warmup": 2, "lr": 3e-3}
        given = {"model": str(model), "init": "random", "data": [str(books)], "out": str(tmp_path / "run"), "device": "cpu"}
        return TrainConfig(**{**small, **given, "save_every": 5, "log_every": 4, **changes})

    return make


def quiet(words: str) -> None:
    pass


def losses(folder: Path) -> list[tuple[int, float, float]]:
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"], entry["norm"]) for entry in entries if "loss" in entry]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "float32", "optimizer": "muon", "accumulate": "tree"}, marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16", "optimizer": "adamw-8bit", "save_async": False}, marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_killed_and_resumed_has_bitwise_the_same_losses(
    config: Callable[..., TrainConfig], tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = config(steps=80, out=str(tmp_path / "whole"), **changes)
    train(whole, say=quiet)
    wanted = losses(tmp_path / "whole")
    assert [step for step, *_ in wanted] == list(range(1, 81))

    killed = config(steps=80, out=str(tmp_path / "killed"), **changes)
    (tmp_path / "config.toml").write_text(to_toml(killed))
    command = [sys.executable, "-m", "tilewright.cli", "train", str(tmp_path / "config.toml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "killed" / "log.jsonl"
    deadline = time.monotonic() + 200
    while not log.exists() or len(log.read_bytes().splitlines()) < 18:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run did not get as far as it should be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = [path for path in (tmp_path / "killed").glob("step-*") if path.suffix != ".partial"]
    assert done, "no checkpoint was whole when the run was killed"
    assert len(losses(tmp_path / "killed")) < 80

    said: list[str] = []
    train(killed, say=said.append)
    assert any("continuing after step" in line for line in said)
    assert losses(tmp_path / "killed") == wanted
    again = {name: load_model(tmp_path / name / "model", device="cpu") for name in ("whole", "killed")}
    for (name, a), b in zip(again["whole"].named_parameters(), again["killed"].parameters(), strict=True):
        assert torch.equal(a, b), name


def test_what_is_computed_depends_on_the_seed_and_not_on_what_is_free(
    config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    found = {}
    for name, changes in {
        "a": {"save_every": 3, "log_every": 1},
        "b": {"save_every": 100, "save_async": False, "log_every": 7},
        "seed": {"seed": 1},
    }.items():
        train(config(out=str(tmp_path / name), **changes), say=quiet)
        found[name] = losses(tmp_path / name)
    assert found["a"] == found["b"]
    assert found["a"] != found["seed"]


def test_the_loss_falls_to_what_the_text_is_worth(config: Callable[..., TrainConfig], books: Path) -> None:
    summary = train(config(steps=150, lr=1e-2, dtype="float32", eval_data=str(books), eval_rows=0, eval_every=150), say=quiet)
    assert summary.bits_per_byte is not None
    assert summary.bits_per_byte < 1.0, "a repeated sentence was not learned; random bytes have 8 bits"
    assert summary.tokens == 150 * 48 * 4


def test_held_out_text_that_is_mostly_one_document_is_named(
    config: Callable[..., TrainConfig], books: Path, tmp_path: Path
) -> None:
    said = list[str]()
    one = tmp_path / "one.jsonl"
    one.write_text("".join(json.dumps({"text": TEXT * n}) + "\n" for n in (1, 1, 6)))
    for held in (books, one):
        train(config(steps=3, eval_data=str(held), eval_rows=0, out=str(tmp_path / held.stem)), say=said.append)
    assert [line for line in said if "of the text" in line] == [
        f"{one}: one of 3 documents has 75% of the text, so the loss depends on it most\n"
    ]


def test_measuring_between_lines_of_the_log_does_not_change_the_speed(
    config: Callable[..., TrainConfig], books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only the updates (10 s) and the samples (1000 s) move."""
    now = [0.0]
    monkeypatch.setattr("tilewright.train.loop.time.perf_counter", lambda: now[0])

    def step(*given: Any) -> Any:
        now[0] += 10
        return train_step(*given)

    def sampler(model: Any) -> Callable[[], str]:
        def write() -> str:
            now[0] += 1000
            return ""

        return write

    monkeypatch.setattr("tilewright.train.loop.train_step", step)
    made = config(steps=12, log_every=4, eval_data=str(books), eval_rows=1, eval_every=3, sample_every=5)
    train(made, say=quiet, sampler=sampler)
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    speeds = [entry["tokens_per_s"] for entry in entries if "tokens_per_s" in entry]
    assert len(speeds) == 8  # behind the steps 3, 4, 5, 6, 8, 9, 10 and 12
    assert speeds == [pytest.approx(made.step_tokens / 10)] * len(speeds)


def test_a_checkpoint_of_another_run_is_refused(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    train(config(steps=5), say=quiet)
    with pytest.raises(
        ValueError, match=r"belongs to a run with other settings: steps was 5 and is now 6; lr was 0\.003 and is now 0\.1"
    ):
        train(config(steps=6, lr=0.1), say=quiet)
    assert merged(read_toml(tmp_path / "run" / "config.toml"), {}) == config(steps=5), "the refused config was written down"


def test_a_damaged_checkpoint_is_refused_in_words(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    train(config(steps=5), say=quiet)
    weights = next((tmp_path / "run" / "step-00000005").glob("model-*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        ValueError, match=r"step-00000005 cannot be read .*; remove it to continue from the checkpoint before it"
    ):
        train(config(steps=5), say=quiet)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_failed_save_ends_the_run_only_if_it_is_the_last(
    config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, last: bool
) -> None:
    """The checkpoint of step 2 or of step 3 cannot be written; the failure of an asynchronous save is found at the next one."""
    broken = f"step-0000000{3 if last else 2}.partial"
    before = checkpoint.to_disk

    def to_disk(path: Path) -> None:
        if broken in path.parts:
            raise OSError("no space left")
        before(path)

    monkeypatch.setattr(checkpoint, "to_disk", to_disk)
    said: list[str] = []
    made = config(steps=3, save_every=1, save_async=asynchronous)
    if last:
        with pytest.raises(OSError, match="the last checkpoint, of step 3, could not be written"):
            train(made, say=said.append)
    else:
        assert train(made, say=said.append).step == 3
        assert (tmp_path / "run" / "step-00000003").is_dir()
    warnings = [line for line in said if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "could not be written (no space left); step-0000000" in warnings[0]


def test_a_run_that_has_ended_has_nothing_left_to_do(config: Callable[..., TrainConfig]) -> None:
    train(config(steps=3), say=quiet)
    again = train(config(steps=3), say=quiet)
    assert (again.step, again.loss) == (3, None)


def test_gradients_that_stay_not_finite_end_the_run(config: Callable[..., TrainConfig], model: Path, tmp_path: Path) -> None:
    broken = load_model(model, device="cpu")
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    save_model(broken, tmp_path / "broken", model)
    with pytest.raises(
        FloatingPointError, match="were not finite in 3 updates in a row up to step 3, and none of them was applied"
    ):
        train(config(model=str(tmp_path / "broken"), init="load", max_skipped=3), say=quiet)


def test_fine_tuning_on_conversations_by_the_command(model: Path, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word * 3}] for word in "abcd" * 5]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    options = (
        f"train run --model {model} --data {tmp_path}/chats.jsonl --chat --steps 8 --row-tokens 96 --out {tmp_path}/run --json"
    )
    more = "--sample-every 4 --sample-tokens 5 --sample-prompt hello --device cpu --log-every 2 --lr 0.01 --warmup 1"
    done = CliRunner().invoke(app, f"{options} {more}".split(), prog_name="tilewright")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step"] == 8
    assert done.stderr.count(" writes: ") == 2
    assert read_toml(tmp_path / "run" / "config.toml")["chat"] is True
    found = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert found[-1] < found[0]


def test_shards_are_made_again_where_the_chat_template_or_the_end_of_texts_is_another(
    config: Callable[..., TrainConfig], model: Path, books: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    settings, home = tmp_path / "model" / "tokenizer_config.json", tmp_path / "run" / "data"
    chat = [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "aaa"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")

    def made(**changes: Any) -> int:
        given = config(model=str(tmp_path / "model"), steps=1, warmup=0, row_tokens=96, **changes)
        render = partial(chat_runs, Tokenizer.load(tmp_path / "model")) if given.chat else None
        train(given, render=render, say=quiet)
        shutil.rmtree(tmp_path / "run" / "step-00000001")
        return len(list(home.iterdir()))

    def edit(**changes: str) -> None:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))

    assert made() == made() == 1
    edit(eos_token="<bos>")
    assert made() == 2
    edit(eos_token="<eos>")
    chats = {"data": [str(tmp_path / "chats.jsonl")], "chat": True}
    assert made(**chats) == made(**chats) == 4
    edit(chat_template="hello " + json.loads(settings.read_text())["chat_template"])
    assert made(**chats) == 6


def test_options_need_no_config_file_and_help_stays_that_of_the_group(model: Path, books: Path, tmp_path: Path) -> None:
    options = f"--model {model} --data {books} --steps 2 --warmup 1 --row-tokens 48 --out {tmp_path}/run --device cpu --json"
    done = CliRunner().invoke(app, ["train", *options.split()], prog_name="tilewright")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step"] == 2
    for word in ("--help", "-h"):
        said = CliRunner().invoke(app, ["train", word], prog_name="tilewright")
        assert said.exit_code == 0
        assert "plan" in said.stdout
        assert "--row-tokens" not in said.stdout


def test_the_log_is_also_written_for_tensorboard(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    train(config(steps=3, tensorboard=True), say=quiet)
    read = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss, _ in losses(tmp_path / "run")
    ]


def test_tensorboard_that_is_missing_is_one_sentence(
    config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"TensorBoard needs tensorboard, .* pip install 'tilewright\[train\]'"):
        train(config(tensorboard=True), say=quiet)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "qwen3-0.6b", "init": "load"}, "is a shape without weights; set init to random"),
        ({"row_tokens": 4096}, "supports only 128 positions; lower row_tokens to at most 128"),
        ({"data": []}, "data is empty"),
        ({"data": ["/nowhere.jsonl"]}, "/nowhere.jsonl does not exist"),
        ({"device": "gpu"}, "device is 'gpu', wanted cpu, cuda or cuda:N"),
        ({"chat": True}, "chat needs a tokenizer with a chat template"),
        ({"text_field": "body"}, "no document has text in the field 'body'; set text_field"),
        ({"model": "qwen3-0.6b", "init": "random"}, "has no tokenizer; set tokenizer to a folder that has one"),
    ],
)
def test_bad_input_is_one_sentence(config: Callable[..., TrainConfig], changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, OSError, ModelError), match=words):
        train(config(**changes), say=quiet)


def test_tokens_beyond_the_vocabulary_are_refused(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    write(tmp_path / "shards", [np.array([1, 2, 3, 60000])], "uint16", 100, {})
    with pytest.raises(ValueError, match="the data contain token 60000, but the model has only"):
        train(config(data=[str(tmp_path / "shards")]), say=quiet)


def test_plan_and_costs_are_the_formulas(config: Callable[..., TrainConfig], model: Path) -> None:
    shape = load_config(model)
    meta = empty_model(shape, device="meta", dtype=torch.bfloat16).requires_grad_(True)
    count = sum(p.numel() for p in meta.parameters())
    plan = plan_memory(config(dtype="bfloat16", optimizer="adamw"), meta, torch.device("cpu"))
    assert (plan.weights, plan.optimizer) == (2 * count, 12 * count)
    costs = costs_of(config(), meta, torch.device("cpu"))
    matrices = shape.vocab_size * 32 + 2 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48)
    assert costs.full == 6 * matrices + 2 * 12 * 32 * 48
    assert costs.full - costs.causal == 2 * 6 * 32 * 48


def test_a_config_file_and_options(tmp_path: Path) -> None:
    text = 'model = "x"\ndata = ["a", "b"]\nweights = [1, 3.5]\nlr = 1e-3\nsample_prompt = "say \\"hi\\"\\n"\nmax_norm = inf\n'
    path = tmp_path / "config.toml"
    path.write_text(text)
    made = merged(read_toml(path), {"lr": 2e-3})
    path.write_text(to_toml(made))
    assert merged(read_toml(path), {}) == made
    assert (made.lr, made.weights, made.sample_prompt, made.max_norm) == (2e-3, (1, 3.5), 'say "hi"\n', float("inf"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": 1}, "the config has 'learning_rate', which is not a field"),
        ({"row_token": 1}, "did you mean 'row_tokens'"),
        ({"steps": "many"}, "steps is 'many', wanted int"),
        ({"steps": 1.5}, "steps is 1.5, wanted int"),
        ({"steps": True}, "steps is True, wanted int"),
        ({"data": [1]}, "an entry of data is 1, wanted str"),
        ({"lr": 0}, "lr is 0 and lr_floor"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"optimizer": "adam"}, "optimizer is 'adam', wanted one of adamw"),
        ({"weights": [1.0]}, "weights has 1 numbers, but data has 0 entries"),
        ({"warmup": 200}, "longer than the run of 100 steps"),
        ({"keep": 0}, "keep is 0, wanted 1 or more"),
    ],
)
def test_a_bad_config_is_one_sentence(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        merged(values, {})


def test_rates_follow_the_schedule(config: Callable[..., TrainConfig]) -> None:
    made = config(steps=10, warmup=2, lr=1.0, schedule="wsd", decay=4, lr_floor=0.2)
    assert [learning_rate(made, step) for step in (0, 1, 5, 6, 8)] == pytest.approx([0.5, 1, 1, 1, 0.6])
