"""Rows for the tests of the tuning database: of an H100 that is not there."""

from typing import Any

from tilewright.tune.record import Environment, Row, canonical

__all__ = ["CARD", "NOW", "environment", "problem", "row"]

CARD = "NVIDIA H100 80GB HBM3"
NOW = {"driver": "580.1", "torch": "2.13.0", "triton": "3.7.1", "ptxas": "12.8"}
"""The versions of this process, as the tests set them."""


def environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {"card": CARD, "sms": 132, "clocks": "sm 1980 MHz", "policy": "CUDA graph", **NOW}
    return Environment(**{**values, **changes})


def problem(**fields: Any) -> str:
    return canonical(fields or {"dtype": "bfloat16", "k": 4096, "m": 64})


def row(us: float | None = 10.0, *, versions: dict[str, Any] | None = None, second: int = 0, **changes: Any) -> Row:
    """A row, measured `second` seconds after midnight."""
    values: dict[str, Any] = {
        "op": "linear",
        "problem": problem(),
        "dims": {"M": 60, "dtype": "bfloat16"},
        "invariant": False,
        "impl": "triton",
        "config": {"BLOCK": 64},
        "status": "ok" if us else "crash",
        "us": us,
        "us_spread": 0.1 if us else None,
        "environment": environment(**(versions or {})),
        "source": "0123456789abcdef",
        "resources": {"registers": 96, "spills": 0},
        "date": f"2026-03-01T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.000000+00:00",
    }
    return Row(**{**values, **changes})
