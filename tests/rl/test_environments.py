"""Tasks and graders against other people's truths; workers that survive what rewards do."""

import itertools
import json
import operator
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from tests.awake import awake_s
from tests.paths import SHARED
from tilewright.rl.environments.base import Task
from tilewright.rl.environments.math import final_answer, grade
from tilewright.rl.environments.named import environment
from tilewright.rl.environments.puzzles import value_of
from tilewright.rl.environments.workers import Workers

SOLUTIONS = SHARED / "data" / "math" / "gsm8k-solutions.jsonl"
MISBEHAVING = f"{Path(__file__).with_name('rewards_for_tests.py')}:Misbehaving"


@pytest.mark.skipif(not SOLUTIONS.is_file(), reason=f"no recorded solutions at {SOLUTIONS}")
@pytest.mark.parametrize("every", [pytest.param(12, id="some"), pytest.param(1, id="all", marks=pytest.mark.long)])
def test_the_grader_agrees_with_recorded_verdicts(every: int) -> None:
    pytest.importorskip("math_verify", reason="math-verify, which grades, is not installed")
    lines = SOLUTIONS.read_text(encoding="utf-8").splitlines()
    verdicts: list[tuple[bool, bool]] = []
    for line in lines[::every]:
        record = json.loads(line)
        models = [value for value in record.values() if isinstance(value, dict)]
        assert len(models) == 4
        verdicts += [(grade(model["solution"], record["ground_truth"]), model["is_correct"]) for model in models]
    assert len(verdicts) == 4 * len(lines[::every])
    assert {right for _, right in verdicts} == {True, False}
    assert [ours for ours, _ in verdicts] == [recorded for _, recorded in verdicts]


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", True),
        ("#### 1,000", "1000", True),
        ("A: $18.00", "A: 18", True),
        ("A: 18.\nA: 19", "18", False),
        ("A: 19\nA: 18.", "18", True),
        ("#### 2/3", "\\boxed{\\frac{4}{6}}", True),
        ("#### 0.66", "2/3", False),
        ("\\boxed{x+1}", "1+x", True),
        ("\\boxed{x-1}", "1+x", False),
        ("the answer is -3", "3", False),
        ("18", "18", False),
        ("", "18", False),
        ("A:", "18", False),
        ("\\boxed{", "18", False),
        ("A: " + "9" * 1000, "9", False),
        ("A: ((((", "18", False),
    ],
)
def test_final_answers(answer: str, truth: str, right: bool) -> None:
    pytest.importorskip("math_verify", reason="math-verify, which grades, is not installed")
    assert grade(answer, truth) is right


def test_the_last_mark_counts() -> None:
    assert final_answer("A: 1\nthen \\boxed{2}") == "2"
    assert final_answer("\\boxed{2} and the answer is 3") == "3"
    assert final_answer("\\boxed{\\frac{a}{b}} more") == "\\frac{a}{b}"
    assert final_answer("none") is None


@pytest.mark.parametrize("spec", ["reversal", "reversal:digits=9", "sorting", "addition", "addition:digits=1"])
def test_exact_tasks_are_what_they_say(spec: str) -> None:
    made = environment(spec)
    seen = set()
    for seed in range(200):
        task = made.task(seed)
        assert task == made.task(seed)
        seen.add(task.prompt)
        text = task.prompt[:-1]
        if spec.startswith("addition"):
            truth = str(sum(int(part) for part in text.split("+")))
        else:
            truth = "".join(sorted(text)) if spec == "sorting" else "".join(reversed(text))
        assert made.score(task, truth) == 1.0
        assert made.score(task, f" {truth}\n") == 1.0
        assert made.score(task, truth + "0") == 0.0
        assert made.score(task, "") == 0.0
    assert len(seen) > 60


@pytest.mark.parametrize("numbers", [3, 4])
def test_every_countdown_task_has_an_answer(numbers: int) -> None:
    made = environment(f"countdown:numbers={numbers}")
    for seed in range(20):
        task = made.task(seed)
        assert task.prompt.endswith(f"{task.data['target']}=")
        solution = next(_solutions([(Fraction(n), str(n)) for n in task.data["numbers"]], task.data["target"]))
        assert made.score(task, solution) == 1.0
        assert made.score(task, f"{solution}+0") == 0.0
        assert made.score(task, str(task.data["target"])) == 0.0


def _solutions(parts: list[tuple[Fraction, str]], target: int) -> Iterator[str]:
    """All expressions over the parts that give the target, by trying every pair and operator."""
    if len(parts) == 1:
        yield from [parts[0][1]] if parts[0][0] == target else []
    for (i, (a, left)), (j, (b, right)) in itertools.permutations(enumerate(parts), 2):
        others = [part for k, part in enumerate(parts) if k not in (i, j)]
        for sign, apply in (("+", operator.add), ("-", operator.sub), ("*", operator.mul), ("/", operator.truediv)):
            if sign != "/" or b:
                yield from _solutions([*others, (apply(a, b), f"({left}{sign}{right})")], target)


def test_expressions_are_valued_exactly_and_nothing_else_is() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice(["1", "23", "4", "+", "-", "*", "/", "(", ")"]) for _ in range(rng.randint(1, 12)))
        found = value_of(text)
        if found is not None:
            assert float(found[0]) == pytest.approx(eval(text))  # the text is digits and operators only
    for text in (
        "2**9",
        "9**9**9**9",
        "-3",
        "a",
        "f(1)",
        "1.5",
        "1 if 1 else 2",
        "__import__('os')",
        "1/0",
        "(" * 500,
        "0x10j",
        "True",
    ):
        assert value_of(text) is None


def test_reasoning_gym_scores_its_own_answers() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    made = environment("gym:leg_counting")
    truth = reasoning_gym.create_dataset("leg_counting", seed=0, size=1_000_000)
    for seed in range(5):
        task = made.task(seed)
        assert task.prompt == truth[seed]["question"]
        assert made.score(task, truth[seed]["answer"]) == 1.0
        assert made.score(task, "-1") < 1.0
    with pytest.raises(ValueError, match="has no data set 'nothing'"):
        environment("gym:nothing")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "no environment 'nothing'; wanted one of addition"),
        ("reversal:digits=x", "NAME:KEY=INTEGER"),
        ("reversal:size=3", "NAME:KEY=INTEGER"),
        ("missing.py:X", "missing.py does not exist"),
        (f"{__file__}:NoSuch", "defines no environment 'NoSuch'"),
    ],
)
def test_environments_that_are_none(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        environment(spec)


def test_workers_lose_a_sample_and_nothing_else() -> None:
    answers = ["1", "hang", "2", "memory", "x", "3", "die", "nan", "spin", "4", "list", "inf", "child", "5"]
    with Workers(MISBEHAVING, count=2, timeout_s=1.0, memory_bytes=1 << 30) as workers:
        tasks = [Task(prompt="")] * len(answers)
        rewards = workers.score(tasks, answers)
        assert rewards == [1.0, None, 2.0, None, None, 3.0, None, None, None, 4.0, None, None, None, 5.0]
        assert workers.failures == {"time": 3, "memory": 1, "raised": 2, "died": 1, "not finite": 2}
        assert "TypeError" in workers.last_error or "ValueError" in workers.last_error
        began = awake_s()
        assert workers.score(tasks[:3], ["7", "8", "9"]) == [7.0, 8.0, 9.0]
        assert awake_s() - began < 60
        processes = [worker.process for worker in workers._workers]
    assert all(process.poll() is not None for process in processes)


def test_an_environment_that_cannot_be_loaded_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with Workers("nothing", count=1) as workers, pytest.raises(ValueError, match="ended before it was ready"):
        workers.score([Task(prompt="")], ["1"])
    assert "no environment 'nothing'" in capfd.readouterr().err


def test_an_environment_that_never_ends_loading_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tilewright.rl.environments.workers._START_S", 0.5)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    refused = pytest.raises(ValueError, match=r"a reward worker was not ready after 0\.5 s: .*slow\.py:Slow")
    with Workers(f"{tmp_path}/slow.py:Slow", count=1) as workers, refused:
        workers.score([Task(prompt="")], [""])


def test_many_answers_come_back_in_order() -> None:
    made = environment("addition")
    tasks = [made.task(seed) for seed in range(300)]
    answers = [task.data["answer"] if seed % 3 else "0" for seed, task in enumerate(tasks)]
    with Workers("addition", count=2) as workers:
        assert workers.score(tasks, answers) == [float(made.score(task, answer)) for task, answer in zip(tasks, answers)]
        assert not workers.failures
