"""One measurement of one config: a row of the tuning database, also as a line of JSON.

A row contains the candidate (op, problem, implementation, config), the result (`status`, microseconds, spread), and the
conditions (`Environment`, the hash of the kernel's source, the date). A row never changes, and equal rows are stored once.

    {"op": "linear", "problem": {"dtype": "bfloat16", "k": 4096, "m_bucket": 64, ...}, "impl": "skinny", "us": 12.4, ...}

`parse` accepts text from any source: it checks every field, its type and its size, and executes nothing. A problem may contain
only integers, bools, strings, None, dtypes and tuples of those. This module needs torch only to read its version.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any

from tilewright.tune.ranking import Stack

__all__ = [
    "MAX_ROW_BYTES",
    "STATUSES",
    "Environment",
    "Row",
    "canonical",
    "now",
    "parse",
    "problem_json",
    "versions",
]

STATUSES = ("ok", "compile", "crash", "timeout", "wrong", "spills")
"""How a candidate ended: measured; did not compile; crashed; ran out of time; gave a wrong result; dropped for spills."""

MAX_ROW_BYTES = 32 << 10
"""Limit for a row as JSON. The largest rows that the tuner writes have about 5 KB, because of a compiler's error message."""

_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
_MAX_TEXT = 4000


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The conditions of a measurement."""

    card: str
    """The card's full name, as its driver reports it."""
    sms: int
    driver: str
    torch: str
    triton: str
    ptxas: str
    clocks: str
    """Clocks as text: "sm 1980 MHz, memory 2619 MHz, not locked"."""
    policy: str
    """How times were taken, as text: "CUDA graph, L2 flushed, median of 20"."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Raises:
        ValueError: a field has the wrong type, is too large, or contradicts the others; the message names it.
    """

    op: str
    problem: str
    """Canonical JSON of `Op.problem(*args)`, from `problem_json`."""
    dims: Mapping[str, Any]
    """The dimensions from which the arguments were made. A problem may be a bucket of sizes; this is the size that was
    timed."""
    invariant: bool
    """Measured for the invariant scope; such rows count only there."""
    impl: str
    config: Mapping[str, Any]
    status: str
    environment: Environment
    source: str
    """`tune.source.source_hash` of the implementation's module."""
    us: float | None = None
    """Median microseconds; None unless the status is "ok"."""
    us_spread: float | None = None
    """Half the distance between the 10th and the 90th percentile, microseconds."""
    verified: bool = False
    """Timed alternately with the other finalists. Such rows are ranked before others."""
    error: str = ""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Registers, spills, shared bytes, warps, occupancy: numbers and words."""
    date: str = field(default_factory=lambda: now())
    """UTC, ISO 8601 with microseconds, so that text order is time order."""

    def __post_init__(self) -> None:
        # Compilers colour their messages and quote whole files; only a bounded amount of plain text is kept.
        error = "".join(c if c.isprintable() or c == "\n" else "?" for c in self.error)
        object.__setattr__(self, "error", error[:_MAX_TEXT])
        _check(self)

    def json(self) -> str:
        """The row as one line: sorted keys, no spaces. Equal rows give equal lines."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["environment"] = {f.name: getattr(self.environment, f.name) for f in fields(Environment)}
        values["problem"] = json.loads(self.problem)
        return canonical(values)

    @property
    def key(self) -> bytes:
        """16 bytes that are equal only for equal rows."""
        return hashlib.sha256(self.json().encode()).digest()[:16]

    @property
    def stack(self) -> Stack:
        """The versions under which rows can be compared; their `source` must agree, too."""
        return Stack(self.environment.driver, self.environment.torch, self.environment.triton)


def parse(text: str | bytes) -> Row:
    """Parse a row from one line of JSON, from any source.

    Raises:
        ValueError: it is not a valid row; the message has the field, its value and what was wanted.
    """
    if len(text) > MAX_ROW_BYTES:
        raise ValueError(f"a row is {len(text)} bytes, wanted {MAX_ROW_BYTES} or fewer")
    values = parse_object(text)
    values["environment"] = Environment(**_exactly(Environment, values.get("environment"), "environment"))
    values = _exactly(Row, values, "a row")
    _wanted(isinstance(values["problem"], dict | list), "problem", values["problem"], "an object")
    return Row(**{**values, "problem": canonical(values["problem"])})


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object with finite numbers. Raises ValueError if the text is anything else."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not a JSON number")

    try:
        values = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as error:  # includes undecodable bytes
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"is a JSON {type(values).__name__}, wanted an object")
    return values


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values give equal text. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def problem_json(problem: Any) -> str:
    """A problem as canonical JSON: a NamedTuple is an object, another tuple a list, a dtype its name ("bfloat16").

    Raises:
        ValueError: it contains anything else.
    """
    return canonical(_plain(problem))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return [_plain(v) for v in value] if names is None else {n: _plain(v) for n, v in zip(names, value, strict=True)}
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    raise ValueError(
        f"a problem holds {value!r} of {type(value).__name__}; wanted integers, bools, strings, None, dtypes or tuples of those"
    )


def now() -> str:
    """The current time in the format of a row's date."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


# ---- versions


@cache
def versions() -> dict[str, str]:
    """Versions of the driver ("" without one), torch, triton and ptxas in this process; the keys are `Environment`'s fields."""
    import torch
    import triton
    from triton import knobs

    from tilewright.hw.nvml import NoDriver, driver_version

    try:
        driver = driver_version()
    except NoDriver:
        driver = ""
    ptxas = knobs.nvidia.ptxas.version or ""
    return {"driver": driver, "torch": str(torch.__version__), "triton": triton.__version__, "ptxas": ptxas}


# ---- checks


def _exactly(kind: type, values: Any, what: str) -> dict[str, Any]:
    """`values` if its keys are exactly the fields of a dataclass. Raises ValueError."""
    _wanted(isinstance(values, dict), what, values, "an object")
    names = [f.name for f in fields(kind)]
    for name in names:
        if name not in values:
            raise ValueError(f"{what} has no {name}; wanted {', '.join(names)}")
    for name in values:
        if name not in names:
            raise ValueError(f"{what} has {_short(name)}, which is not known; wanted {', '.join(names)}")
    return values


def _check(row: Row) -> None:
    for name in ("op", "impl"):
        value = getattr(row, name)
        _wanted(isinstance(value, str) and _NAME.fullmatch(value), name, value, "a name of letters, digits and _.+-")
    _wanted(row.status in STATUSES, "status", row.status, f"one of {', '.join(STATUSES)}")
    for name in ("invariant", "verified"):
        _wanted(isinstance(getattr(row, name), bool), name, getattr(row, name), "true or false")
    _wanted(isinstance(row.problem, str) and row.problem[:1] in ("{", "["), "problem", row.problem, "what problem_json gives")
    problem = json.loads(row.problem)
    _wanted(_is_tree(problem), "problem", row.problem, "integers, bools, strings, null, lists and objects")
    _wanted(canonical(problem) == row.problem, "problem", row.problem, "sorted names and no spaces, as problem_json gives")
    for name in ("dims", "config", "resources"):
        _wanted(_is_flat(getattr(row, name)), name, getattr(row, name), "up to 64 names with numbers, strings, bools or null")
    if row.status == "ok":
        for name, least in (("us", 1e-6), ("us_spread", 0.0)):
            value = getattr(row, name)
            _wanted(_is_number(value) and least <= value < 1e9, name, value, "microseconds, more than 0")
    else:
        for name in ("us", "us_spread"):
            _wanted(getattr(row, name) is None, name, getattr(row, name), f"none, as the status is {row.status}")
    _wanted(re.fullmatch(r"([0-9a-f]{16})?", row.source), "source", row.source, "16 hex digits, or nothing")
    _wanted(_is_utc(row.date), "date", row.date, "an ISO 8601 date and time in UTC with microseconds")
    sms = row.environment.sms
    _wanted(type(sms) is int and 0 < sms < 10000, "environment.sms", sms, "a count of SMs")
    for f in fields(Environment):
        value = getattr(row.environment, f.name)
        if f.name != "sms":
            short = isinstance(value, str) and len(value) <= 200 and value.isprintable()
            _wanted(short, f"environment.{f.name}", value, "printable text of at most 200 characters")


def _wanted(good: Any, name: str, value: Any, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} is {_short(value)}, wanted {wanted}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT and value.isprintable()
    return value is None or isinstance(value, bool) or (_is_number(value) and abs(value) < 2**63)


def _is_flat(values: Any) -> bool:
    return (
        isinstance(values, Mapping)
        and len(values) <= 64
        and all(isinstance(k, str) and _NAME.fullmatch(k) and _is_scalar(v) for k, v in values.items())
    )


def _is_tree(value: Any, depth: int = 4) -> bool:
    if isinstance(value, dict):
        return depth > 0 and _is_flat(dict.fromkeys(value)) and all(_is_tree(v, depth - 1) for v in value.values())
    if isinstance(value, list):
        return depth > 0 and len(value) <= 64 and all(_is_tree(v, depth - 1) for v in value)
    return not isinstance(value, float) and _is_scalar(value)


def _is_utc(text: Any) -> bool:
    return isinstance(text, str) and bool(re.fullmatch(r"\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\d\.\d{6}\+00:00", text))
