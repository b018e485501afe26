"""The documentation: links lead somewhere, pages keep their form, and the operator of the how-to guide works as it stands.

`make docs` checks anchors and the generated pages as well; it needs the extra `docs`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
GENERATED = {DOCS / "reference/cli.md", DOCS / "reference/operators.md", DOCS / "changelog.md"}
"""What scripts/docs_pages.py adds while the site is built."""
EXPERIMENTS = [page for page in sorted((DOCS / "experiments").glob("*.md")) if page.stem != "index"]
TRIAL = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tilewright.kernels.elementwise.gelu_tanh_add", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
from tests.conformance import check
from tilewright.hw.device import device_of
from tilewright.op import Inputs
op = module.gelu_tanh_add_op
for example in op.examples:
    for impl in op.impls:
        args = example.make(Inputs())
        check(op, impl, impl.space.default(device_of(-1), op.problem(*args)), args)
print("checked", len(op.examples))
"""


FOLLOWS = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tilewright.kernels.elementwise.gelu_tanh_add", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
from tilewright import ops
op = module.gelu_tanh_add_op
ops.ALL = (*ops.ALL, op)  # what the one line in tilewright/ops/__init__.py does
from tilewright.asm.certify import certify
from tilewright.bench.op import checked
from tilewright.cli import main
from tilewright.op import Inputs
print("certified", len(certify(op, Inputs, archs=[90], keep=lambda place, key: False)["cases"]))
print("benched by", *sorted(checked(op, ["M=64", "N=64"])))
for words in (["ops", "gelu_tanh_add"], ["explain", "gelu_tanh_add", "M=4096", "N=4096", "--card", "h100"]):
    sys.argv = ["tilewright", *words]
    try:
        main()
    except SystemExit as done:
        assert not done.code, words
"""
TO_BE_WRITTEN = {"tilewright/kernels/elementwise/gelu_tanh_add.py", "tilewright/hw/ceilings_of/NAME.json"}
"""Files that the guides tell their readers to make."""
OLDER = {*EXPERIMENTS, DOCS / "log.md"}
"""Pages that keep the names of their time."""


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as MkDocs makes them."""
    found = re.findall(r"^#{1,6} (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() or target in GENERATED, f"{link}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OLDER], ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    names = re.findall(r"`((?:tilewright|tests|scripts|docs|examples|kernels)/[\w./*-]+)`", page.read_text(encoding="utf-8"))
    bases = (ROOT, ROOT / "tilewright")
    missing = [name for name in names if name not in TO_BE_WRITTEN and not any(any(base.glob(name)) for base in bases)]
    assert not missing


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda page: page.stem)
def test_an_experiment_has_question_answer_and_decision_first(page: Path) -> None:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line]
    assert re.fullmatch(r"# .*\?", lines[0])
    assert lines[1].startswith("**Answer.** ")
    assert lines[2].startswith("**Decision.** ")
    assert f"({page.name})" in (DOCS / "experiments/index.md").read_text(encoding="utf-8")


def test_what_cited_the_former_log_still_leads_somewhere() -> None:
    kept = set(re.findall(r'<a id="([^"]+)">', (DOCS / "log.md").read_text(encoding="utf-8")))
    for file in [*(ROOT / "tilewright").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        assert set(re.findall(r"docs/log\.md#([a-z0-9-]+)", file.read_text(encoding="utf-8"))) <= kept, file


def test_the_digest_of_performance_is_a_page() -> None:
    assert len((DOCS / "performance.md").read_text(encoding="utf-8").splitlines()) <= 60


def _with_the_operator_of_the_guide(script: str, folder: Path, *, interpreted: bool) -> "subprocess.CompletedProcess[str]":
    """Run a script that is given the file of the guide."""
    guide = (DOCS / "how-to/add-an-operator.md").read_text(encoding="utf-8")
    file = folder / "gelu_tanh_add.py"
    file.write_text(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0], encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, cwd=ROOT, timeout=250,
        env=environment | ({"TRITON_INTERPRET": "1"} if interpreted else {}),
    )  # fmt: skip


def test_the_operator_of_the_guide_conforms(tmp_path: Path) -> None:
    done = _with_the_operator_of_the_guide(TRIAL, tmp_path, interpreted=True)
    assert done.stdout == "checked 3\n", done.stderr


def test_certificate_bench_listing_and_explanation_follow_from_the_file_and_the_line(tmp_path: Path) -> None:
    done = _with_the_operator_of_the_guide(FOLLOWS, tmp_path, interpreted=False)
    assert not done.returncode, done.stderr
    assert done.stdout.startswith("certified 3\nbenched by M N\n")
    assert "GELU and a residual in one pass." in done.stdout
    assert "33.3 us by bytes" in done.stdout
    assert re.search(r"\d+ registers", done.stdout)
