"""Runs vLLM's tests of its parsers on tilewright's: `python -m tests.server.tools.third_party FOLDER ...`.

A folder holds `tool_parsers` and `reasoning`, as vLLM's `tests` does. Nothing of it is in this repository:

    git clone --depth 1 --branch v0.33.0 --filter=blob:none --sparse https://github.com/vllm-project/vllm
    git -C vllm sparse-checkout set tests/tool_parsers tests/reasoning
    python -m tests.server.tools.third_party vllm/tests

The tests of Mistral's format and of harmony were last in v0.16.0; they import `partial-json-parser`, `mistral-common` and
`openai-harmony`, which are not among this project's dependencies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.server.tools.third_party.differences import DIFFERENCES

TOOLS = (
    "deepseekv31",
    "deepseekv3",
    "hermes",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "pythonic",
    "qwen3coder",
    "qwen3xml",
)
REASONING = ("base_thinking", "deepseekr1", "deepseekv3", "gptoss", "holo2", "minimax_m2", "nemotron_v3", "qwen3", "step3")
"""Files of formats that tilewright reads."""
VERDICTS = {
    "passed": "passed",
    "better": "passed, where they expect their own parser to fail",
    "expected": "failed, as they expect their own parser to",
    "white space": "equal but for white space at the ends of a text",
    "different": "another convention (differences.py)",
    "not ours": "a format, or a part of their program, that is not here",
    "not run": "needs a package that is not installed",
    "failed": "failed",
}
HERE = Path(__file__).parent

Result = tuple[str, str, str]
"""A test's name, what became of it, and why."""


def files_in(folder: Path) -> list[str]:
    """The files of `folder` that are about formats of ours."""
    named = [f"tool_parsers/test_{name}_tool_parser.py" for name in TOOLS]
    named += [f"reasoning/test_{name}_reasoning_parser.py" for name in REASONING]
    return [name for name in named if (folder / name).is_file()]


def run(folder: Path, names: list[str], *more: str) -> list[Result]:
    """Run tests of a folder. Raises `RuntimeError` where pytest itself fails."""
    with tempfile.TemporaryDirectory() as text:
        top, results = Path(text), Path(text) / "results"
        results.touch()
        (top / "tests").mkdir()
        (top / "tests" / "__init__.py").write_text(f"__path__.append({str(HERE.parents[2])!r})\n")  # theirs before ours
        for part in ("tool_parsers", "reasoning"):
            if (folder / part).is_dir():
                (top / "tests" / part).symlink_to((folder / part).resolve())
        paths = [str(top), str(HERE.parents[3]), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", text, "-p", "no:cacheprovider", "-q"]
        # A test's name begins with a folder of that name.
        asked = [name if name.startswith("tests/") else f"tests/{name}" for name in names]
        done = subprocess.run(
            [*command, "-p", f"{__package__}.vllm_names", "--results", str(results), *more, *asked],
            cwd=top,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode not in (0, 1, 2):
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return [(name, outcome, why) for name, outcome, why in map(json.loads, results.read_text().splitlines())]


def judged(folder: Path) -> list[Result]:
    """Each test of a folder with a verdict: a key of `VERDICTS`."""
    names = files_in(folder)
    found = run(folder, names)
    again = [name for name, outcome, _ in found if outcome == "failed" and "::" in name]
    aside = {name for name, outcome, _ in run(folder, again, "--white-space-aside") if outcome == "passed"} if again else set()
    verdicts = []
    for name, outcome, why in found:
        reason = next((text for part, text in DIFFERENCES if part in name), None)
        if outcome == "skipped":
            outcome = "not ours"
        elif outcome == "failed" and "ModuleNotFoundError" in why and "::" not in name:
            outcome = "not run"
        elif outcome == "failed" and name in aside:
            outcome, why = "white space", "equal but for white space at the ends of a text"
        elif outcome == "failed" and reason is not None:
            outcome, why = "different", reason
        verdicts.append((name.removeprefix("tests/"), outcome, why))
    return verdicts


def report(folder: Path, verdicts: list[Result]) -> bool:
    """Print what came out; returns whether nothing failed and something passed."""
    counts = Counter(outcome for _, outcome, _ in verdicts)
    print(f"{folder}: {len(verdicts)} tests of {len(files_in(folder))} files")
    for outcome, meaning in VERDICTS.items():
        if counts[outcome]:
            print(f"{counts[outcome]:5} {meaning}")
        if outcome == "passed":
            continue
        reasons = dict[str, list[str]]()
        for name, verdict, why in verdicts:
            if verdict == outcome:
                reasons.setdefault(why.strip().splitlines()[-1] if why.strip() else "", []).append(name)
        for why, names in reasons.items():
            print(
                f"        {why.removeprefix('not ours: ')}: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
            )
    return counts["passed"] > 0 and not counts["failed"]


def main() -> None:
    """Run all folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    fine = True
    for folder in parser.parse_args().folders:
        if not files_in(folder):
            raise SystemExit(f"{folder} has none of these tests, wanted a folder with tool_parsers and reasoning")
        fine = report(folder, judged(folder)) and fine
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
