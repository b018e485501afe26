"""A row: its canonical text, what is refused of text from elsewhere, and the hash of a kernel's source."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

from tests.source import ROOT
from tests.tune.rows import row
from tilewright.tune.record import MAX_ROW_BYTES, Row, canonical, parse, problem_json


class Inner(NamedTuple):
    heads: int
    window: int | None


class Problem(NamedTuple):
    dtype: torch.dtype
    rows: int
    bias: bool
    name: str
    inner: Inner
    pair: tuple[int, int]


def test_a_problem_has_one_canonical_text() -> None:
    made = Problem(torch.float8_e4m3fn, 64, True, "k", Inner(8, None), (1, 2))
    wanted = '{"bias":true,"dtype":"float8_e4m3fn","inner":{"heads":8,"window":null},"name":"k","pair":[1,2],"rows":64}'
    assert problem_json(made) == wanted
    assert problem_json(made._replace(bias=1)) != wanted, "1 is not true"


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}, torch.device("cpu"), (1, object())], ids=repr)
def test_a_problem_of_other_things_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="wanted integers, bools, strings, None, dtypes"):
        problem_json((value,))


def test_text_and_row_are_one() -> None:
    for made in (row(12.5), row(None, error="no\nluck"), row(config={"A": True, "B": None, "C": "x"}, verified=True)):
        assert parse(made.json()) == made
        assert parse(made.json().encode()).key == made.key
    assert row(1.0).key != row(1.0000001).key


def test_a_compilers_colours_and_length_are_cut() -> None:
    made = row(None, error="\x1b[31mred\x00" + "x" * 10000)
    assert made.error.startswith("?[31mred?x")
    assert len(made.error) == 4000
    assert len(row(None, error="\U0001f600" * 10000).json().encode()) < MAX_ROW_BYTES


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"op": "a b"}, "op is 'a b', wanted a name"),
    ({"op": 3}, "op is 3"),
    ({"impl": "x\x1b[0m"}, "impl is"),
    ({"status": "fine"}, "status is 'fine', wanted one of ok, compile, crash"),
    ({"us": -1.0}, "us is -1.0, wanted microseconds"),
    ({"us": None}, "us is None, wanted microseconds"),
    ({"us": True}, "us is True"),
    ({"us": 1e300}, r"us is 1e\+300"),
    ({"us_spread": -0.1}, "us_spread is -0.1"),
    ({"status": "crash"}, "us is 10.0, wanted none"),
    ({"invariant": 1}, "invariant is 1, wanted true or false"),
    ({"problem": "x"}, "problem is 'x', wanted an object"),
    ({"problem": {"a": 1.5}}, "problem is"),
    ({"problem": {"a": [[[[[1]]]]]}}, "problem is"),
    ({"problem": {"a": 2**70}}, "problem is"),
    ({"config": {"a": [1]}}, "config is"),
    ({"config": {"a b": 1}}, "config is"),
    ({"config": {str(i): i for i in range(65)}}, "config is"),
    ({"dims": []}, r"dims is \[\]"),
    ({"source": "../../etc"}, "source is"),
    ({"date": "yesterday"}, "date is 'yesterday', wanted an ISO 8601"),
    ({"extra": 1}, "a row has 'extra', which is not known"),
    ({"environment": None}, "environment is None, wanted an object"),
)


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda v: canonical(v)[:40] if isinstance(v, dict) else "")
def test_what_is_no_row_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(canonical({**json.loads(row().json()), **changes}))


@pytest.mark.parametrize("name", [f.name for f in Row.__dataclass_fields__.values()])
def test_every_field_is_needed(name: str) -> None:
    values = json.loads(row().json())
    del values[name]
    with pytest.raises(ValueError, match=name):
        parse(canonical(values))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "is a JSON list, wanted an object"),
        ('{"us": NaN}', "NaN is not a JSON number"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 20000, "nested too deeply|not JSON"),
        ("{" + " " * MAX_ROW_BYTES + "}", "wanted 32768 or fewer"),
        (row().json().replace('"sms":132', '"sms":-1'), "environment.sms is -1"),
        (row().json().replace('"driver":"580.1"', '"driver":"\\u001b"'), "environment.driver is"),
    ],
    ids=range(8),
)
def test_text_from_anywhere(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_reading_rows_needs_no_torch() -> None:
    script = "import sys; from tilewright.tune import frozen, database; print(sorted({'torch', 'triton'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"
