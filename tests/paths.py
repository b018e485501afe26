"""Where the tests find what is not in the repository."""

import os
from pathlib import Path

SHARED = Path(os.environ.get("TILEWRIGHT_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared")
"""Reference models and data, read-only, in the folder that TILEWRIGHT_TEST_DATA names or beside the repository.

A test that needs one skips, with its path as the reason, where it is absent.
"""
