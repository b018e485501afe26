"""The loop: trainer and sampler are one model; a step is reproducible; what the config says; the policy improves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.rl.batch import Batch, Sample, pack
from tilewright.rl.characters import Characters
from tilewright.rl.config import RLConfig, read_config
from tilewright.rl.learner import Learner
from tilewright.rl.loop import Trainer
from tilewright.rl.losses import ALGORITHMS
from tilewright.rl.policies import small_model
from tilewright.rl.policy import logprobs_and_entropies_of, logprobs_of
from tilewright.rl.rollout import Sampler

TINY = RLConfig(
    environment="reversal:digits=2,partial=1", algorithm="grpo", max_tokens=2, prompts=8, answers=4, hidden=32, layers=1,
    updates=2, minibatches=4, learning_rate=3e-3, entropy_bonus=0.0, decay=0.0,
)  # fmt: skip

CLOCKED = ("seconds", "waiting", "sampling", "scoring", "sampled_tokens_per_s", "trained_tokens_per_s")


def sample(tokens: list[int], prompt: int) -> Sample:
    count = len(tokens)
    return Sample(tokens=tokens, chosen=[i >= prompt for i in range(count)], logprobs=[0.0] * count, reward=0.0, group=0)


def random_samples() -> Batch:
    g = torch.Generator().manual_seed(0)
    return pack([sample(torch.randint(0, 21, (length,), generator=g).tolist(), 1) for length in (7, 2, 1, 12)])


def test_logprobs_are_those_of_transformers_one_sequence_at_a_time() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    config = replace(TINY, layers=2)
    model = small_model(config)
    shape = model.config
    oracle = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=shape.rms_norm_eps,
        )
    ).double()
    from tilewright.models.fill import part_names, parts_of

    theirs = dict(oracle.named_parameters())
    copied = 0
    for path, parameter in model.named_parameters():
        parts = parts_of(model.get_submodule(path.rpartition(".")[0]), parameter)
        names, form = part_names(model, path, parts)
        for name, piece in zip(names, form.views(parameter.detach(), parts), strict=True):
            theirs[name].data.copy_(piece)
            copied += 1
    assert copied == len(theirs)
    batch = random_samples()
    found = logprobs_of(model, batch).split(batch.lengths.tolist())
    for tokens, ours in zip(batch.tokens.split(batch.lengths.tolist()), found):
        wanted = oracle(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        assert ours[0] == 0
        assert ours[1:].double().tolist() == pytest.approx(wanted.tolist(), abs=2e-5)


def test_entropies_are_those_of_torch_one_sequence_at_a_time() -> None:
    model, batch = small_model(TINY).requires_grad_(False), random_samples()
    found = logprobs_and_entropies_of(model, batch)
    assert torch.equal(found[0], logprobs_of(model, batch))
    parts = zip(batch.tokens.split(batch.lengths.tolist()), found[1].split(batch.lengths.tolist()))
    for tokens, ours in parts:
        assert ours[0] == 0
        for place in range(1, len(tokens)):
            # Every possible next token in turn gives the whole distribution.
            every = pack([sample([*tokens[:place].tolist(), token], place) for token in range(21)])
            probabilities = logprobs_of(model, every)[every.mask].double().exp()
            wanted = torch.distributions.Categorical(probs=probabilities).entropy()
            assert float(ours[place]) == pytest.approx(float(wanted), abs=1e-5)


def test_an_entropy_bonus_keeps_the_policy_uncertain() -> None:
    entropies = []
    for bonus in (0.0, 1.0):
        with Trainer(replace(TINY, updates=25, entropy_bonus=bonus)) as trainer:
            entropies.append(list(trainer)[-1]["entropy"])
    assert entropies[0] < 2.85 < 3.0 < entropies[1]  # ln 21 = 3.04 is the most


def test_the_sampler_reports_what_the_trainer_finds_also_after_an_update() -> None:
    with Trainer(TINY) as trainer:
        before = [p.clone() for p in trainer.model.parameters()]
        rows = list(trainer)
        assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
        for row in rows:
            assert row["ratio"] == pytest.approx(1.0, abs=1e-5)
            assert row["ratio_off"] < 1e-4
        assert rows[1]["ratio_after"] != 1.0
        # A sampler of the weights at the start is noticed at once.
        stale = Sampler(small_model(TINY), max_len=16, seqs=8, end_ids=(20,))
        trainer.gatherer.sampler = stale
        trainer.config = replace(TINY, updates=3)
        with pytest.raises(ConnectionError, match="step 2 got samples from weights of versions 0 to 0, wanted version 2"):
            trainer.step()
        stale.version = 2  # also one that says otherwise
        assert trainer.step()["ratio_off"] > 1e-2


def test_in_one_process_the_engine_reads_the_very_tensors_that_the_optimizer_writes() -> None:
    with Trainer(TINY) as trainer:
        assert trainer._local is not None
        served = trainer._local._engine.runner.model  # pyright: ignore[reportAttributeAccessIssue]
        row = trainer.step()
        written = trainer.learner._optimizer.master.untyped_storage().data_ptr()
        assert {parameter.untyped_storage().data_ptr() for parameter in served.parameters()} == {written}
        assert not [name for name in row if name.startswith("push")]


def test_samples_follow_the_probabilities() -> None:
    model = small_model(TINY)
    prompt = Characters().prompt("12=")
    answers = Sampler(model, max_len=16, seqs=256, end_ids=())([prompt], answers=4000, max_tokens=1, seed=3)[0]
    counts = torch.zeros(21)
    for answer in answers:
        counts[answer.tokens[0]] += 1
    every = pack([sample([*prompt, token], 3) for token in range(21)])
    expected = logprobs_of(model, every)[every.mask].exp().detach() * 4000
    assert float(expected.sum()) == pytest.approx(4000, rel=1e-4)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 45.3  # the 99.9th percentile of 20 degrees of freedom


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_makes_a_step_that_a_second_run_repeats(name: str) -> None:
    config = replace(TINY, algorithm=name, updates=1, kl=0.01 if name == "grpo" else 0.0)
    rows = []
    for _ in range(2):
        with Trainer(config) as trainer:
            row = trainer.step()
        assert row["applied"] == 1.0
        assert row["norm"] > 0
        assert row["lost"] == 0
        rows.append({key: value for key, value in row.items() if key not in CLOCKED})
    assert rows[0] == rows[1]


def test_cutting_a_step_into_passes_changes_rounding_alone() -> None:
    norms = []
    for most in (16384, 20):
        with Trainer(replace(TINY, tokens_per_pass=most)) as trainer:
            norms.append(trainer.step()["norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_step_of_one_update_needs_no_pass_before_it_or_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, minibatches=1, updates=1, tokens_per_pass=60)
    with Trainer(replace(config, moved_every=2)) as trainer:
        once = trainer.step()
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "_once", lambda self, update: False)
        with Trainer(config) as trainer:
            twice = trainer.step()
    for name in ("reward", "entropy", "length", "equal_groups"):
        assert once[name] == twice[name]
    for name in ("loss", "norm", "ratio"):
        assert once[name] == pytest.approx(twice[name], rel=1e-5, abs=1e-7)
    assert max(once["ratio_off"], twice["ratio_off"]) < 1e-5
    assert twice["kl_after"] > 0
    assert "kl_after" not in once  # every second step says it


def test_the_command_logs_every_step(tmp_path: Path) -> None:
    path, log = tmp_path / "a.toml", tmp_path / "a.jsonl"
    path.write_text(
        'environment = "reversal:digits=2,partial=1"\nmax_tokens = 2\nprompts = 4\nanswers = 2\nhidden = 32\nlayers = 1\n'
        "entropy_floor = 5.0\n"
    )
    result = CliRunner().invoke(app, ["rl", str(path), "--updates", "2", "--log", str(log)], prog_name="tilewright")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2
    assert (
        result.stderr.count("the policy has collapsed, because the mean -log p of its tokens is 3") == 2
    )  # ln 21 = 3.04 is below that floor
    assert "this config does not guarantee 0" in result.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2]
    assert {"reward", "length", "entropy", "kl", "ratio", "clip_share", "sampling", "lost"} <= rows[0].keys()


def test_a_reward_that_fails_costs_its_sample_alone() -> None:
    misbehaving = f"{Path(__file__).with_name('rewards_for_tests.py')}:Misbehaving"
    config = replace(TINY, environment=misbehaving, max_tokens=1, updates=1, prompts=16)
    with Trainer(config) as trainer:
        row = trainer.step()
        failures = trainer.workers.failures
    # A digit is scored as itself; anything else is no number.
    assert 0 < row["lost"] == failures["raised"] < 64
    assert row["applied"] == 1.0
    with Trainer(config) as trainer:
        trainer.workers.score = lambda tasks, answers: [None] * len(tasks)
        with pytest.raises(ValueError, match="step 0: no answer got a reward"):
            trainer.step()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no field environment"),
        ("environment = 3", "environment is 3, wanted str"),
        ('environment = "addition"\nupdate = 3', "unknown fields update"),
        ('environment = "addition"\nupdates = 0', "updates is 0, wanted 1 to"),
        ('environment = "addition"\nupdates = "3"', "updates is '3', wanted int"),
        ('environment = "addition"\nlearning_rate = nan', "learning_rate is nan"),
        ('environment = "addition"\nalgorithm = "sarsa"', "algorithm is 'sarsa', wanted one of ppo, "),
        ('environment = "addition"\ndtype = "float16"', "dtype is 'float16', wanted one of float32, bfloat16"),
        ('environment = "addition"\nchat = true', "chat needs model to have a chat template"),
        ('environment = "addition"\ntensorboard = true', "out is empty"),
        ('environment = "addition"\nkl_estimator = "k9"', "wanted one of k1, k2, k3"),
        ('environment = "addition"\nalphabet = "aa"', "each character only once"),
        ('environment = "addition"\ntemperature = 0', "temperature is 0, wanted 0.01 to 100"),
        ('environment = "addition"\ntop_p = 0.0', "top_p is 0.0, wanted"),
        ('environment = "addition"\nstaleness = 1', "staleness is 1, but sampler is empty"),
        ('environment = "addition"\nprompts = 1\nanswers = 1\nminibatches = 4', "fewer than the 4 minibatches"),
        ("environment = ", "is not valid TOML"),
    ],
)
def test_bad_configs_are_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_config(path)


def test_a_prompt_outside_of_the_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match="contains '=', which is not in the alphabet"):
        Trainer(replace(TINY, alphabet="0123456789"))
