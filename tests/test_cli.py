"""The command line: its options are frozen, its errors are one line, its exit codes are 0, 1, 2 and 130."""

import json
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.bench.load.options import CONFIGURE_OPTIONS, ENGINE_OPTIONS, LOAD_OPTIONS, SERVED_OPTIONS
from tests.server.tiny_model import write_tiny_model
from tests.train.options import TRAIN_VERBS
from tilewright import __version__
from tilewright.cli import app

# An option that is renamed or goes breaks somebody's script: change these on purpose only.
OPTIONS = {
    "serve": {
        *ENGINE_OPTIONS,
        *("--host", "--port", "--api-key", "--api-key-file", "--served-name", "--max-body-mib", "--max-seqs", "--queue"),
        *("--max-wait", "--prefix-cache", "--no-prefix-cache", "--config", "--replicas", "--fronts", "--max-connections"),
        *("--ray", "--no-ray", "--max-replicas", "--scale-down-after", "--traces", "--trace-share", "--shared-memory"),
        *("--adapter", "--max-adapters", "--max-adapter-rank", "--adapter-dir", "--no-shared-memory"),
        *("--drain-timeout", "--cors-origin", "--log-level", "--log-format"),
        *("--tool-format", "--grpc-port", "--model", "--repository", "--package", "--precision", "--max-batch", "--max-delay"),
    },
    "run": {
        *ENGINE_OPTIONS,
        *("--prompt", "-p", "--chat", "--json", "--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p"),
        *("--seed", "--stop", "--ignore-eos"),
    },
    "warmup": {
        *("--out", "--arch", "--card", "--jobs", "--json"),
        *("--dtype", "--quantize", "--max-model-len", "--max-seqs", "--page-size", "--kv-cache", "--max-tokens-per-step"),
        *("--invariant", "--no-invariant", "--speculate", "--max-adapters", "--max-adapter-rank"),
    },
    **TRAIN_VERBS,
    "bench engine": {
        *("--workload", "-w", "--runs", "--dtype", "--quantize", "--kv-cache", "--max-model-len"),
        *("--page-size", "--max-tokens-per-step", "--speculate", "--out", "--resume", "--json"),
    },
    "bench engine-host": {"--running", "--context", "--steps", "--speculate", "--json"},
    "compare": {
        *("--model", "--ours", "--baseline", "--beside", "--claim", "--report", "--budget", "--whole", "--seed", "--threads"),
        *("--device", "--json", "--counters", "--no-counters"),
    },
    "bench attention-8bit": {"--shapes", "--settle", "--out", "--resume", "--json"},
    "bench layers": {"--shapes", "--rows", "--activation", "--invariant", "--settle", "--out", "--resume", "--json"},
    "bench op": {
        *("--shapes", "--set", "--against", "--prefer", "--aligned", "--counters", "--settle", "--out", "--resume", "--json"),
    },
    "bench front": {"--fronts", "-f", "--streams", "--tokens", "--rate", "--idle", "--json"},
    "bench structured": {"--tokenizer", "--share", "--out", *SERVED_OPTIONS},
    "bench adapters": {"--adapters", "--rank", "--out", *SERVED_OPTIONS},
    "bench served": {"--fronts", "-f", *SERVED_OPTIONS},
    "bench all": {"--out", "--budget", "--only", "--dry-run"},
    "bench ops": {"--out", "--resume", "--json"},
    "asm": {"--impl", "--example", "--arch", "--config", "--show", "--json"},
    "optimize": {"--precision", "--tolerance", "--tune", "--device", "--out", "--json"},
    "quantize": {"--format", "--out", "--skip", "--calibrate", "--migrate", "--activation", "--device", "--json"},
    "export": {"--out", "--precision", "--max-batch", "--sizes", "--shape", "--card", "--jobs"},
    "explain": {"--card", "--prefer", "--invariant", "--json"},
    "rl run": {"--out", "--log", "--updates", "--seed", "--every", "--samples", "--json"},
    "rl tasks": {"--out", "--count", "--layers", "--hidden", "--seed", "--json"},
    "scaling fit": {
        *("--params-column", "--tokens-column", "--flops-column", "--loss-column", "--drop-highest", "--delta", "--bootstrap"),
        *("--seed", "--test", "--out", "--plots", "--json"),
    },
    "scaling plan": {
        *("--budget", "--budgets", "--ratio", "--sizes", "--span", "--vocab", "--sequence", "--tied", "--head-dim"),
        *("--layers", "--prior", "--hidden", "--max-tokens", "--lr", "--seeds"),
        *("--card", "--utilisation", "--out", "--json"),
    },
    "scaling predict": {"--flops", "--plan", "--json"},
    "ops": {"--card", "--json"},
    "doctor": {"--json"},
    "lab coordinate-check": {
        *("--widths", "--base", "--layers", "--batch", "--length", "--steps", "--lr", "--seeds", "--out", "--svg", "--json"),
    },
    "lab gradient-flow": {
        *("--norm", "--layers", "--width", "--batch", "--length", "--steps", "--lr", "--warmup", "--seed"),
        *("--out", "--svg", "--json"),
    },
    "load": LOAD_OPTIONS,
    "configure": CONFIGURE_OPTIONS,
    "place": {"--max-batch", "--explain", "--json"},
    "train plan": {"--tokens", "--length", "--card", "--budget", "--json"},
    "scaling run": {"--jobs", "--out"},
    "hw": {"--measure", "--json"},
    "hw occupancy": {"--threads", "--registers", "--arch", "--shared", "--barriers", "--json"},
    "hw waves": {"--blocks", "--sms", "--blocks-per-sm", "--json"},
    "tune op": {
        *("--top", "--exhaustive", "--time-limit", "--invariant", "--force", "--card", "--dry-run", "--database", "--json"),
    },
    "data clean": {"--out", "--processes", "--memory-gb", "--executor", "--json"},
    "data diff": {"--json"},
    "data train-quality": {"--good", "--bad", "--out", "--text-field"},
    "tune export": {"--op", "--card", "--database"},
    "tune import": {"--database", "--json"},
    "tune merge": {"--database", "--json"},
    "tune freeze": {"--card", "--op", "--out", "--database", "--json"},
    "tune show": {"--card", "--table", "--all", "--database", "--json"},
}


def verbs(group: Any = None, before: str = "") -> dict[str, Any]:
    """Everything that can be run, by its words."""
    found: dict[str, Any] = {}
    for name, verb in (group or get_command(app)).commands.items():
        if not hasattr(verb, "commands"):
            found[before + name] = verb
            continue
        found |= verbs(verb, f"{before}{name} ")
        if verb.invoke_without_command:
            found[before + name] = verb
    return found


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def tilewright(*arguments: str | Path, stdin: str = "") -> Done:
    """Run a command in this process, which has torch already."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, prog_name="tilewright")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def command(*arguments: str | Path) -> list[str]:
    """The same as a command line, for what only a process of its own shows."""
    return [sys.executable, "-m", "tilewright.cli", *map(str, arguments)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_every_verb_is_in_the_table() -> None:
    assert sorted(verbs()) == sorted(OPTIONS)


@pytest.mark.parametrize("verb", OPTIONS)
def test_the_options_are_frozen(verb: str) -> None:
    parameters = verbs()[verb].params
    options = {name for p in parameters if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    assert options - {"--help", "-h"} == OPTIONS[verb]
    defaults = {p.name: p.default for p in parameters}
    if verb in ("serve", "run"):
        assert defaults["model"] == "bookworm"
    if verb == "serve":
        assert (defaults["host"], defaults["port"]) == ("127.0.0.1", 8000)


def test_help_is_immediate() -> None:
    """In processor time, so that a busy machine does not fail it; and by what it must not import."""
    heavy = "{'torch', 'triton', 'tokenizers', 'fastapi', 'uvicorn', 'numpy', 'transformers'}"
    script = (
        "import sys, tilewright.cli\n"
        "try: tilewright.cli.app(['--help'], prog_name='tilewright')\n"
        f"finally: print('heavy:', sorted({heavy} & sys.modules.keys()))"
    )
    times = [float("inf")]
    while len(times) < 12 and min(times) >= 0.5:  # a core that shares its caches with a busy one takes up to 1.5 times as long
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "heavy: []" in done.stdout
    assert min(times) < 0.5


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_verb_has_help(verb: str) -> None:
    done = tilewright(*verb.split(), "--help")
    assert done.returncode == 0
    assert f"Usage: tilewright {verb}" in done.stdout
    if " " not in verb:
        assert "Examples" in done.stdout


def test_version() -> None:
    assert tilewright("--version").stdout == f"tilewright {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["run", "--nonsense"], ["run", "--max-tokens", "many", "-p", "x"], ["serve", "--port"], ["run", "a", "b"]],
    ids=" ".join,
)
def test_a_misspelled_command_exits_with_2(arguments: list[str]) -> None:
    done = tilewright(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


USER_ERRORS = [
    (["run", "-p", "x", "--temperature", "-1"], "temperature is -1.0, wanted 0 to 100"),
    (["run", "-p", "x", "--top-p", "2"], "top_p is 2.0, wanted 0 to 1"),
    (["run", "-p", "x", "--max-tokens", "0"], "max_tokens is 0, wanted 1 to 2147483647"),
    (["run", "-p", "x", "--max-model-len", "1"], "max_model_len is 1, wanted 2"),
    (["serve", "--port", "99999"], "port is 99999, wanted 0 to 65535"),
    (["serve", "--host", "no.such.host.invalid"], "is not known"),
    (["serve", "--api-key-file", "/no/such/file"], "/no/such/file"),
    (["serve", "--max-seqs", "0", "--port", "0"], "max_seqs is 0, wanted 1"),
]


@pytest.mark.parametrize(("arguments", "words"), USER_ERRORS, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_what_a_user_gets_wrong_is_one_line_and_1(arguments: list[str], words: str) -> None:
    done = tilewright(*arguments)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .+\n", done.stderr), done.stderr
    assert words in done.stderr
    with pytest.raises((ValueError, OSError), match=re.escape(words)):
        tilewright("--traceback", *arguments)


def test_keys_from_two_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    done = tilewright("serve", "--api-key", "x", "--api-key-file", tmp_path / "key")
    assert done.returncode == 2
    assert "both given" in done.stderr


def test_a_port_in_use_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = tilewright("serve", "/no/such/model", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert re.fullmatch(r"error: cannot listen on .* it is in use; .* --port .*\n", done.stderr), done.stderr


def test_run_prints_the_text(model: Path) -> None:
    arguments = ("run", model, "--max-tokens", "20", "--seed", "3", "--ignore-eos", "--device", "cpu")
    done = tilewright(*arguments, "--prompt", "Once")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "20 tokens in" in done.stderr
    assert tilewright(*arguments, stdin="Once").stdout == done.stdout, "the prompt may come on stdin; a seed gives the same"


def test_run_quantises_while_it_loads(model: Path) -> None:
    done = tilewright("run", model, "-p", "Once", "--max-tokens", "3", "--ignore-eos", "--device", "cpu", "--quantize", "int8")
    assert done.returncode == 0, done.stderr
    assert "3 tokens in" in done.stderr
    assert next(line for line in done.stderr.splitlines() if "weights" in line).endswith("int8")


def test_quantize_saves_what_run_takes(model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Once upon a time there was a text. " * 20)
    done = tilewright(
        "quantize",
        model,
        "--format",
        "int8",
        "--out",
        out,
        "--device",
        "cpu",
        "--calibrate",
        text,
        "--migrate",
        "0.5",
        "--activation",
        "static",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["calibrated"]
    assert all(layer["error"] < 0.1 for layer in report["layers"] if layer["format"])
    assert tilewright("run", out, "-p", "Once", "--max-tokens", "3", "--ignore-eos", "--device", "cpu").returncode == 0
    again = tilewright("quantize", model, "--format", "int8", "--out", out)
    assert again.returncode == 1
    assert "is not empty; give a new or an empty folder" in again.stderr
    assert "wanted one of int8, fp8" in tilewright("quantize", model, "--format", "q4", "--out", tmp_path / "x").stderr


def test_run_json_is_one_object(model: Path) -> None:
    for prompt, tokens in (("Once", 4), ("", 1)):
        done = tilewright("run", model, "-p", prompt, "--json", "--max-tokens", "6", "--ignore-eos", "--device", "cpu")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert list(answer) == ["model", "text", "token_ids", "finish_reason", "usage", "timings"]
        assert len(answer["token_ids"]) == 6
        assert answer["finish_reason"] == "length"
        assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 6, "total_tokens": tokens + 6}
        assert 0 < answer["timings"]["first_token_s"] <= answer["timings"]["total_s"]


def test_run_chat_uses_the_template(model: Path, tmp_path: Path) -> None:
    done = tilewright("run", model, "--chat", "-p", "hi", "--json", "--max-tokens", "1", "--device", "cpu")
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == len("[user]hi[assistant]") + 1
    base = write_tiny_model(tmp_path / "base", chat=False)
    done = tilewright("run", base, "--chat", "-p", "hi", "--device", "cpu")
    assert done.returncode == 1
    assert "no chat template" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "x" * 200], "the model takes 128"),
        (["-p", "x", "--device", "abacus"], "abacus"),
        (["-p", "x", "--dtype", "int3"], "int3"),
        (["-p", "x", "--quantize", "int3"], "quantize is 'int3', wanted one of int8, fp8, fp8-block, mxfp8, int4, int8-weight"),
    ],
    ids=["too long", "device", "dtype", "format"],
)
def test_what_the_model_refuses_is_one_line(model: Path, arguments: list[str], words: str) -> None:
    done = tilewright("run", model, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error_message(model: Path) -> None:
    verb = shlex.join(command("run", model, "-p", "x", "--max-tokens", "120", "--ignore-eos", "--device", "cpu"))
    done = subprocess.run(f"{verb} | head -c 1 > /dev/null", shell=True, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


@pytest.mark.parametrize(
    ("verb", "sig", "said", "code"),
    [
        (["run", "-p", "x"], signal.SIGINT, "interrupted", 130),
        (["run", "-p", "x"], signal.SIGTERM, "terminated", 143),
        (["serve", "--port", "0"], signal.SIGTERM, "terminated", 143),
    ],
    ids=str,
)
def test_a_signal_while_a_model_loads(verb: list[str], sig: signal.Signals, said: str, code: int, model: Path) -> None:
    arguments = command(*verb, model, "--device", "cpu")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().lower().startswith("loading")
        process.send_signal(sig)
        rest = process.stderr.read()
        assert process.wait(30) == code
    assert "Traceback" not in rest
    assert rest.splitlines()[-1] == said


@pytest.mark.parametrize(("name", "said", "code"), [("SIGINT", "interrupted\n", 130), ("SIGTERM", "terminated\n", 143)])
def test_who_swallows_exceptions_is_ended_too(name: str, said: str, code: int) -> None:
    """As torch does while it is imported."""
    script = (
        "import os, signal\n"
        "from tilewright.cli.root import ends_at_once\n"
        f"with ends_at_once(signal.{name}):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "        signal.pause()\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


def test_serve_from_start_to_end(model: Path) -> None:
    arguments = command("serve", model, "--port", "0", "--device", "cpu", "--max-seqs", "4")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while (found := re.search(r"Serving tiny at (http://127\.0\.0\.1:\d+)", said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        with httpx.Client(base_url=found[1], timeout=30) as client:
            body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}
            answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
            assert answers[0]["usage"]["completion_tokens"] == 8
            assert answers[0]["choices"] == answers[1]["choices"]
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
            assert client.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")
            assert "<title>tilewright</title>" in client.get("/").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
