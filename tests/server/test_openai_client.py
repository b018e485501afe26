"""OpenAI's Python client against the server, in its two living majors.

One of them comes with the test extras; another is looked for in `.data/openai-<major>` of the checkout:

    pip install --target .data/openai-2 'openai>=2,<3'
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.fake_engine import running

pytestmark = pytest.mark.usefixtures("shape")

ROOT = Path(__file__).parents[2]
MAJORS = (2, 3)


def path_of(major: int) -> Path | None:
    """The folder to put before the others, or None where the environment's own client is of that major. Skips."""
    try:
        installed = importlib.metadata.version("openai")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed.partition(".")[0] == str(major):
        return None
    folder = ROOT / ".data" / f"openai-{major}"
    if not (folder / "openai").is_dir():
        command = f"pip install --target {folder.relative_to(ROOT)} 'openai>={major},<{major + 1}'"
        pytest.skip(f"openai {major} is not there (the environment has {installed}): {command}")
    return folder


@pytest.mark.parametrize("major", MAJORS)
def test_openai_client(major: int) -> None:
    folder = path_of(major)
    start = f"import sys, runpy; sys.path[:0] = {[str(folder)] if folder else []!r}; sys.argv = sys.argv[1:]; "
    script = start + "runpy.run_path(sys.argv[0], run_name='__main__')"
    with running() as server, running(api_key="sesame") as keyed:
        command = [sys.executable, "-c", script, str(Path(__file__).parent / "openai_script.py"), server.url, keyed.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{major}.")
