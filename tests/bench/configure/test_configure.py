"""`tilewright configure` from a model's folder to the file that `tilewright serve --config` takes."""

import math
import random
import tomllib
from pathlib import Path

import pytest

from tests.server.tiny_model import write_tiny_model
from tests.test_cli import tilewright
from tilewright.bench.configure.machine import facts_of, this_machine
from tilewright.bench.configure.predict import Machine, Point, Workload, predict
from tilewright.bench.configure.run import Asked, candidates, configure, toml
from tilewright.bench.load.slo import Slo

MACHINE = Machine(
    devices=1, flops_per_s=1e11, bytes_per_s=1e10, memory_bytes=1 << 30, step_s=3e-3, most_seqs=64, most_tokens=256
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_from_a_folder_to_a_file(model: Path, tmp_path: Path) -> None:
    asked = Asked(model=str(model), slo=Slo.parse("itl=50ms"), workload=Workload(prompt=60, output=20))
    facts, rng = facts_of(str(model)), random.Random(0)
    served = []

    def measure(point: Point) -> float:
        served.append(point)
        return 0.8 * predict(point, facts, MACHINE, asked.workload, asked.slo).goodput * math.exp(rng.gauss(0, 0.01))

    said: list[str] = []
    found, why = configure(asked, measure, machine=MACHINE, say=said.append)
    assert 1 <= len(served) <= 15
    assert len(said) == len(served) + 1
    best = max(predict(p, facts, MACHINE, asked.workload, asked.slo).goodput for p in candidates(asked, MACHINE))
    assert predict(found.point, facts, MACHINE, asked.workload, asked.slo).goodput >= 0.97 * best
    text = toml(str(model), found.point, why)
    values = tomllib.loads(text)
    assert values["max_seqs"] == found.point.max_seqs
    assert "quantize" not in values
    assert text.startswith("# Written by")
    path = tmp_path / "serve.toml"
    path.write_text(text)
    done = tilewright("serve", "--config", path, "--host", "no.such.host.invalid")
    assert "no.such.host.invalid" in done.stderr, "all values were taken; the host of the command line won"


def test_facts_are_those_of_the_loader(model: Path) -> None:
    facts = facts_of(str(model))
    assert (facts.dtype_bytes, facts.max_model_len) == (4, 128)
    machine = this_machine(facts.parameters * 4)
    assert machine.flops_per_s > 1e8
    assert machine.bytes_per_s > 1e7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slo", "ttft=fast"), "the objective 'ttft=fast'"),
        (("--replicas", "0"), "--replicas is '0'"),
        (("--quantize", "none,int3"), "quantize is 'int3'"),
        (("--prompt-tokens", "500"), "allows at most 128"),
        (("--slo", "e2e=1us", "--prompt-tokens", "20", "--output-tokens", "9"), "no configuration is predicted to meet"),
    ],
)
def test_what_cannot_be_is_one_line(model: Path, words: tuple[str, ...], said: str) -> None:
    done = tilewright("configure", model, *words)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_seq = 4\n", "did you mean max_seqs"),
        ("[serve]\nport = 1\n", "which is not an option of this command"),
        ("port = \n", "is not valid TOML"),
        ("[model]\nname = 1\n", "has a table [model]"),
        ('port = "many"\n', "a valid integer"),
    ],
)
def test_a_bad_config_file_is_a_misspelled_command(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    done = tilewright("serve", "--config", path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
