"""Where the tests find what is not in the repository."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Reference models and data, read-only; a test that needs one skips, with its path as the reason, where it is absent."""
