"""Measured speed of layers in each format relative to bf16, by rows of the activation, for the report of `quantize`.

The figures are those of docs/results.md; `scripts/results_table.py` writes both docs/results.md and speed.json from one file.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Speed", "speed_of", "speed_text"]

_SIXTEEN_BIT = ("int4", "int8-weight")
"""Formats whose activations, and therefore products, have 16 bits."""
_FASTER_AT_MANY = "int8"


class Speed(NamedTuple):
    """The speed of one format on one card."""

    card: str
    measured: str
    """The day of the measurement, ISO 8601."""
    ratios: dict[int, float]
    """Rows of the activation -> geometric mean of time of the bf16 layer / time of this one; above 1 is faster than bf16."""


@cache
def speed_of(format: str) -> Speed | None:
    """The measured speed of a format; None if there is none."""
    found = json.loads(Path(__file__).with_name("speed.json").read_text())
    ratios = found["ratios"].get(format)
    if ratios is None:
        return None
    return Speed(found["card"], found["measured"], {int(rows): ratio for rows, ratio in ratios.items()})


def speed_text(format: str) -> str:
    """The same as text, with an alternative if the format is slower than bf16; "" if there is no measurement."""
    speed = speed_of(format)
    if speed is None:
        return ""
    each = ", ".join(f"{rows}: {ratio:.2f}" for rows, ratio in speed.ratios.items())
    lines = [
        f"speed of {format} layers against bf16 by rows of their input (tokens of a step), geometric means over projections of "
        f"8B to 70B models, measured on {speed.card}, {speed.measured}: {each}"
    ]
    slower = [rows for rows, ratio in speed.ratios.items() if ratio < 1]
    if slower:
        span = f"{min(slower)} rows" if len(slower) == 1 else f"{min(slower)} to {max(slower)} rows"
        worst = min(speed.ratios.values())
        why = "its product runs in 16 bits, for which the codes have to be converted first" if format in _SIXTEEN_BIT else ""
        lines.append(
            f"at {span} (prompts, large batches) {format} is slower than bf16, down to {worst:.2f} times its speed"
            f"{f': {why}' if why else ''}. It saves memory there, not time"
        )
        other = speed_of(_FASTER_AT_MANY)
        if other is not None and (shared := [rows for rows in slower if rows in other.ratios]):
            least = min(other.ratios[rows] for rows in shared)
            lines.append(
                f"if such steps dominate, use {_FASTER_AT_MANY}, which is at least {least:.2f} times as fast as bf16 there"
            )
    return "\n".join(lines)
