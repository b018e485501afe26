"""Parser tests of another project on tilewright's parsers; `python -m tests.server.tools.third_party` says how they are had."""

import os
from pathlib import Path

import pytest

from tests.server.tools.third_party.__main__ import files_in, judged, report

VARIABLE = "TILEWRIGHT_PARSER_TESTS"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_vllms_tests_of_parsers_pass() -> None:
    """Folders with tool_parsers and reasoning, with a colon between."""
    folders = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    if not folders:
        pytest.skip(f"{VARIABLE} is not set: the tests of vLLM's parsers are not there")
    for folder in folders:
        assert files_in(folder), f"{folder} has no such tests"
        assert report(folder, judged(folder)), "the lines above say which tests failed"
