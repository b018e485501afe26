"""README.md: it is short, its examples run, its links lead somewhere, and its figures are those of benchmarks/results."""

import importlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tilewright.ops import ALL

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def figure(pattern: str) -> float:
    """The number that README.md gives in these words."""
    found = re.search(pattern, README)
    assert found, f"README.md no longer says {pattern!r}: change the test with it"
    return float(found[1])


@pytest.mark.parametrize("name", ["results_table", "charts"])
def test_figures_are_those_of_the_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    wanted = importlib.import_module(name).wanted()
    stale = [path.name for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not stale, f"older than benchmarks/results; run: python scripts/{name}.py"


def test_it_is_short_and_has_no_generated_table() -> None:
    assert len(README.splitlines()) <= 130
    assert "<!--" not in README


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long)])  # the second one compiles a model
def test_its_python_examples_run(number: int, tmp_path: Path) -> None:
    assert len(PYTHON) == 2
    done = subprocess.run(
        [sys.executable, "-c", PYTHON[number]], capture_output=True, text=True, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    """This one, with the package of this checkout."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def test_its_server_and_its_request_work() -> None:
    serve, request = re.search(r"```sh\n(tilewright serve \S+) &.*?\n(curl .*?)```", README, re.DOTALL).groups()  # pyright: ignore
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; from tilewright.cli import main; main()"
    words = [sys.executable, "-c", code, *serve.split()[1:], "--port", str(port)]
    server = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        body = re.search(r"-d '(.*)'", request)[1]  # pyright: ignore[reportOptionalSubscript]
        path = re.search(r"http://127.0.0.1:8000(/\S+)", request)[1]  # pyright: ignore[reportOptionalSubscript]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            answer = ask(client, path, body)
        assert answer["usage"]["completion_tokens"] == json.loads(body)["max_tokens"]
    finally:
        server.kill()
        server.wait()


def ask(client: httpx.Client, path: str, body: str) -> dict:
    """The request of README.md, again until the server is ready, as `curl --retry --retry-connrefused` does."""
    for _ in range(240):
        try:
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
        except httpx.ConnectError:
            time.sleep(0.25)
            continue
        if answer.status_code == 503:
            time.sleep(0.25)
            continue
        assert answer.status_code == 200, answer.text
        return answer.json()
    raise AssertionError("the server of README.md did not come up in a minute")


def test_every_link_leads_somewhere() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 15
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_four_figures() -> None:
    assert len(ALL) > figure(r"more than (\d+) operators")
    pages = [path for path in (ROOT / "docs/experiments").glob("*.md") if path.stem != "index"]
    assert len(pages) > figure(r"more than (\d+) experiments")
    content = json.loads((ROOT / "benchmarks/results/h100/compare-bert-base-eager.json").read_text())
    assert content["fair"]
    assert len(content["segments"]) == figure(r"each of the (\d+) layers of BERT-base")
    assert round(min(segment["ratio"][1] for segment in content["segments"]), 2) == figure(
        r"at least ([\d.]+) times as fast as eager"
    )


def test_the_speed_is_that_of_the_chart() -> None:
    results = (ROOT / "benchmarks/results").glob("*/studies/optimize-models.json")
    content = max((json.loads(path.read_text()) for path in results), key=lambda content: content["runs"][-1]["date"])
    most = max(row["batch"] for row in content["rows"])
    rows = [row["us"] for row in content["rows"] if row["batch"] == most and {"graph", "compile"} <= set(row.get("us", ()))]
    gains = [min(us for name, us in row.items() if name != "ours") / row["ours"] for row in rows]
    assert f"{statistics.geometric_mean(gains):.2f}" == f"{figure(r'people.s models run ([0-9.]+) times'):.2f}"
