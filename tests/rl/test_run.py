"""A run in a folder: it resumes with the same bits, its model is served; conversations, the critic, texts for pretraining."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.rl.test_loop import CLOCKED, TINY
from tilewright import LLM, SamplingParams
from tilewright.cli import app
from tilewright.engine.tokenizer import Tokenizer, TokenizerError
from tilewright.rl.batch import Sample, pack
from tilewright.rl.characters import ALPHABET, Characters
from tilewright.rl.config import RLConfig, read_config
from tilewright.rl.critic import Critic, with_advantages
from tilewright.rl.loop import Trainer
from tilewright.rl.policies import small_model
from tilewright.rl.policy import hidden_of
from tilewright.rl.run import rows, to_toml
from tilewright.rl.tasks import solved_texts
from tilewright.rl.text import Tokens

HERE = Path(__file__).parent


def finished(config: RLConfig) -> list[dict[str, Any]]:
    """The log of a run to its end."""
    with Trainer(config) as trainer:
        list(rows(trainer, say=lambda line: None))
    log = (Path(config.out) / "log.jsonl").read_text(encoding="utf-8")
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCKED} for line in log.splitlines()]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    config = replace(TINY, algorithm=algorithm, updates=4, save_every=2, kl=0.01, resample=1)
    whole = finished(replace(config, out=str(tmp_path / "whole")))
    cut = replace(config, out=str(tmp_path / "cut"))
    with Trainer(cut) as trainer:
        steps = rows(trainer, say=lambda line: None)
        for _ in range(3):  # the third step is behind the last checkpoint, so it is made again
            next(steps)
        steps.close()
    assert finished(cut) == whole
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match=r"belongs to a run with other settings: learning_rate was 0\.003"):
        finished(replace(cut, learning_rate=1e-3))


def test_the_config_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = replace(TINY, out='a "folder"\n', alphabet=ALPHABET + "\\é", kl=0.25, resample=2)
    (tmp_path / "a.toml").write_text(to_toml(config), encoding="utf-8")
    assert read_config(tmp_path / "a.toml") == config


def test_the_folder_of_characters_gives_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers, which reads the folder, is not installed")
    alphabet = ALPHABET + 'é\n\\"ab'
    ours = Characters(alphabet)
    ours.save(tmp_path)
    theirs, read = Tokenizer.load(tmp_path), Tokens(tmp_path)
    assert (read.end_ids, read.vocab) == (ours.end_ids, ours.vocab)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 30)))
        assert theirs.encode(text) == read.prompt(text) == ours.prompt(text)
        assert read.decode([*ours.prompt(text), ours.end]) == text
    with pytest.raises(TokenizerError, match="fails on this text"):
        theirs.encode("1x")


def test_from_tasks_to_a_policy_that_is_served(tmp_path: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(
        app, ["rl", "tasks", "countdown:numbers=3", "sorting:digits=2", "--count", "400", "--hidden", "32", "--layers", "1",
              "--out", str(tmp_path / "t"), "--json"], prog_name="tilewright",
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["texts"] == 400
    config = tmp_path / "c.toml"
    config.write_text(
        'environment = "sorting:digits=2"\nmax_tokens = 3\nprompts = 4\nanswers = 2\nupdates = 2\ndevice = "cpu"\n'
        f'model = "{tmp_path / "t" / "model"}"\neval_every = 1\neval_tasks = 8\n'
    )
    result = runner.invoke(
        app, ["rl", str(config), "--out", str(tmp_path / "run"), "--samples", "1", "--every", "1"], prog_name="tilewright"
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("eval_exact") == 2
    assert result.stdout.count("reward") == 4
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {"update", "prompt", "answer", "reward"} == shown[0].keys()
    llm = LLM(str(tmp_path / "run" / "model"), device="cpu")
    answer = llm.generate("21<", SamplingParams(max_tokens=3, temperature=0.0))[0].outputs[0]
    assert set(answer.text) <= set(ALPHABET)
    assert answer.finish_reason in ("stop", "length")


def test_texts_are_right_and_of_no_task_that_is_trained_or_measured_on() -> None:
    with Trainer(replace(TINY, environment="addition")) as trainer:
        trained = {trainer.environment.task(seed).data["answer"] for seed in range(3)}
    assert trained
    texts = list(solved_texts(["addition", "reversal"], 40, 0))
    for text in texts[::2]:
        question, _, answer = text.partition("=")
        a, _, b = question.partition("+")
        assert int(a) + int(b) == int(answer)
    assert texts != list(solved_texts(["addition", "reversal"], 40, 1))
    with pytest.raises(ValueError, match=r"has no solution\(task\)"):
        list(solved_texts([f"{HERE / 'rewards_for_tests.py'}:Guessing"], 1, 0))


def test_a_conversation_is_learnt_from_as_it_was_sampled() -> None:
    """Replies are in the context and not among what the policy chose; also behind them both sides agree."""
    guessing = f"{HERE / 'rewards_for_tests.py'}:Guessing"
    config = replace(TINY, environment=guessing, alphabet="0123456789<>=", turns=3, updates=2, max_tokens=4, max_reply_tokens=4)
    with Trainer(config) as trainer:
        tasks = [trainer.environment.task(seed) for seed in range(40)]
        made = trainer.gatherer.sample(tasks, answers=4, seed=0)
        turns = [len(one.answers) for one in made]
        assert max(turns) == 3
        assert min(turns) < 3
        assert [one.group for one in made] == [i // 4 for i in range(160)]
        for one in made:
            said, tokens, place = list(one.answers), trainer.text, 0
            runs: list[tuple[bool, list[int]]] = []
            for chosen, token in zip(one.chosen, one.tokens):
                if not runs or runs[-1][0] != chosen:
                    runs.append((chosen, []))
                runs[-1][1].append(token)
            assert runs[0] == (False, tokens.prompt(one.task.prompt))
            for chosen, ids in runs[1:]:
                if chosen:
                    assert tokens.decode(ids) == said[place]
                    place += 1
                else:
                    assert tokens.decode(ids) in ("<", ">")
        for row in trainer:
            assert row["ratio_off"] < 1e-4
            assert row["lost"] == 0
    with pytest.raises(ValueError, match="has no reply"):
        Trainer(replace(TINY, turns=2))


def test_replies_that_fail_end_their_conversations_and_are_counted() -> None:
    config = replace(TINY, environment=f"{HERE / 'rewards_for_tests.py'}:Silent", turns=2)
    with Trainer(config) as trainer:
        made = trainer.gatherer.sample([trainer.environment.task(0)], answers=8, seed=0)
        assert [len(one.answers) for one in made] == [1] * 8
        assert trainer.workers.failures["raised"] == sum(not one.truncated for one in made)


def test_the_critic_is_a_copy_that_learns_alone_and_speaks_of_the_state_before() -> None:
    model = small_model(TINY)
    critic = Critic(model)
    torch.manual_seed(0)
    critic.weight.data.normal_()
    lengths = (5, 1, 3)
    batch = pack(
        [
            Sample(tokens=list(range(n)), chosen=[False] + [True] * (n - 1), logprobs=[0.0] * n, reward=1.0, group=0)
            for n in lengths
        ]
    )
    values = critic(batch).split(list(lengths))
    hidden = hidden_of(model, batch).split(list(lengths))
    for found, states in zip(values, hidden):
        assert found[0] == 0
        assert found[1:].tolist() == pytest.approx((states[:-1] @ critic.weight[0]).tolist(), abs=1e-6)
    critic(batch).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_advantages_by_the_critic_are_those_of_the_formula() -> None:
    """Against a float64 loop over the chosen tokens of each sequence (Schulman et al., 2016, equations 11, 12 and 16)."""
    g = torch.Generator().manual_seed(0)
    samples = []
    for n in (6, 2, 9, 1):
        marks = [False, *(torch.rand(n - 1, generator=g) < 0.6).tolist()]
        reward = float(torch.randn((), generator=g))
        samples.append(Sample(tokens=[0] * n, chosen=marks, logprobs=[0.0] * n, reward=reward, group=0))
    batch = pack(samples, torch.float64)
    values = torch.randn(len(batch.tokens), generator=g, dtype=torch.float64)
    gamma, lam = 0.9, 0.8
    found = with_advantages(batch, values, gamma=gamma, lam=lam, whiten=False)
    wanted, start = torch.zeros_like(values), 0
    for sample in samples:
        steps = [start + i for i, chosen in enumerate(sample.chosen) if chosen]
        for first in range(len(steps)):
            for later in range(first, len(steps)):
                last = later == len(steps) - 1
                after = 0.0 if last else gamma * values[steps[later + 1]]
                delta = (sample.reward if last else 0.0) + after - values[steps[later]]
                wanted[steps[first]] += (gamma * lam) ** (later - first) * delta
        start += len(sample.tokens)
    assert found.known("advantages").tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
    returns = torch.where(batch.mask, wanted + values, 0.0)
    assert torch.where(batch.mask, found.known("returns"), 0.0).tolist() == pytest.approx(returns.tolist(), abs=1e-12)
    white = with_advantages(batch, values, gamma=gamma, lam=lam, whiten=True).known("advantages")[batch.mask]
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(white.std(correction=0)) == pytest.approx(1.0, abs=1e-6)


def test_prompts_without_a_difference_are_replaced() -> None:
    config = replace(TINY, environment="reversal:digits=1", max_tokens=1, prompts=4, answers=4, resample=40)
    with Trainer(config) as trainer:
        row = trainer.step()
        assert row["dropped_groups"] > 0  # a random policy is mostly wrong in all four
        assert row["equal_groups"] == 0.0
        gatherer = trainer.gatherer
        assert gatherer.drawn == 4 + row["dropped_groups"]
        assert trainer.state() == {"update": 1, "drawn": gatherer.drawn, "rounds": gatherer.rounds}


@pytest.mark.long
def test_ppo_learns_to_sort_two_digits() -> None:
    config = replace(
        TINY, environment="sorting:digits=2", algorithm="ppo", max_tokens=2, prompts=64, answers=4, updates=60, epochs=2,
        hidden=64, eval_every=60,
    )  # fmt: skip
    with Trainer(replace(config, updates=1, eval_every=1)) as trainer:
        before = trainer.step()["eval_exact"]
    with Trainer(config) as trainer:
        last = list(trainer)[-1]
    assert before < 0.05
    assert last["eval_exact"] > 0.2
    assert last["explained"] > 0.1
