"""Run the tests that need a GPU, in ten minutes: `make test-gpu`, or `python3 scripts/test_gpu.py`. Installs nothing.

Needs torch, triton and pytest in the Python that runs it, and a CUDA GPU. The tests run in several processes, because compiling
takes most of the time; the most important ones come first. Tests that have not begun when the time is up are listed as not run.

    --jobs N       number of processes; default: half of the cores, at most 12
    --limit S      start no further test after this many seconds; default: 540
    other words    are passed to pytest: `-k attention`

At the end the script lists failed tests, then skipped tests and tests that did not run, with the reason. The exit code is 0 if
all tests that ran passed and none was left out for lack of time, else 1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/test_gpu.py",
    "tests/kernels/test_release_stress.py",
    "tests/kernels/test_attention_sm90.py",
    "tests/kernels/test_scaled_attention_sm90.py",
    "tests/kernels/test_grouped.py",
    "tests/kernels/test_mixed_sm90.py",
    "tests/models/test_launches.py",
    "tests/train/test_captured.py",
    "tests/rl/test_captured.py",
    "tests/test_ops.py",
    "tests/kernels",
    "tests/ops",
    "tests/engine/test_invariance.py",
    "tests/engine/test_masked_graphs.py",
    "tests/hw/test_copies.py",
    "tests/host/test_direct_served.py",
    "tests/host/test_late_served.py",
    "tests/test_golden.py",
)
"""In the order of importance. `long` tests, which walk whole spaces of configs, are not among them."""


def main() -> None:
    """Run the shards, print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--limit", type=float, default=540.0)
    given, words = parser.parse_known_args()
    if missing := lacking():
        sys.exit(f"test-gpu needs {missing}; name a Python that has it: make test-gpu PYTHON=python3.12")
    until = time.time() + given.limit
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, f"{shard}.xml") for shard in range(given.jobs)]
        runs = []
        for shard, report in enumerate(reports):
            dealt = ["--shard", f"{shard}/{given.jobs}", "--until", str(until), f"--junitxml={report}"]
            command = [sys.executable, "-m", "pytest", *TESTS, "-m", "not long", "-p", "no:cacheprovider", *dealt, *words]
            log = report.with_suffix(".txt").open("w")
            runs.append((subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT), log))
        statuses = [run.wait() for run, _ in runs]
        for _, log in runs:
            log.close()
        sys.exit(report_shards(reports, statuses))


def lacking() -> str | None:
    """What this Python does not have of what is needed."""
    try:
        import pytest  # noqa: F401
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return str(error.name)
    return None if torch.cuda.is_available() else "a CUDA card, which this torch does not see"


def report_shards(reports: list[Path], statuses: list[int]) -> int:
    """Print what came of the shards; the exit status."""
    ran, failed, skipped, late = 0, [], Counter(), 0
    broken = False
    for report, status in zip(reports, statuses, strict=True):
        if status not in (0, 1, 5) or not report.exists():  # 5: the shard was dealt no test
            broken = True
            print(f"a process of the tests ended with status {status}:\n{report.with_suffix('.txt').read_text()[-4000:]}")
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
            left = case.find("skipped")
            if wrong is not None:
                failed.append(f"{name}\n{wrong.text or ''}")
            elif left is not None:
                reason = left.get("message") or ""
                skipped[reason] += 1
                late += reason.startswith("not run")
            else:
                ran += 1
    for text in failed:
        print(f"FAILED {text}\n")
    print(f"skipped, and why ({sum(skipped.values())}):")
    for reason, count in sorted(skipped.items(), key=lambda item: -item[1]):
        print(f"  {count:5d}  {reason}")
    print(f"{ran} passed, {len(failed)} failed, {sum(skipped.values())} skipped, of which {late} for lack of time")
    return int(bool(failed or late or broken or not ran))


if __name__ == "__main__":
    main()
