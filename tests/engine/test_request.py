"""Sampling parameters refuse what is out of range, naming the field; requests count their tokens."""

import math
from typing import Any

import pytest

from tilewright.engine.request import RANGES, Request, SamplingParams, State, sample_seed

REFUSED = [
    ("max_tokens", 0, "1 to 2147483647"),
    ("max_tokens", 1.5, "an integer"),
    ("max_tokens", True, "an integer"),
    ("min_tokens", -1, "0 to 2147483647"),
    ("min_tokens", 17, "0 to 16, which is max_tokens"),
    ("temperature", -0.1, "0 to 100"),
    ("temperature", math.nan, "nan, wanted 0 to 100"),
    ("temperature", math.inf, "inf, wanted 0 to 100"),
    ("temperature", 1e308, "0 to 100"),
    ("temperature", "hot", "a number"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.01, "0 to 1"),
    ("top_k", -2, "-1 to 2147483647"),
    ("top_k", 2**31, "-1 to 2147483647"),
    ("min_p", 1.1, "0 to 1"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", -2.1, "-2 to 2"),
    ("repetition_penalty", 0, "0.01 to 100"),
    ("repetition_penalty", 5e-324, "0.01 to 100"),
    ("repetition_penalty", 1e308, "0.01 to 100"),
    ("repetition_penalty", -1.0, "0.01 to 100"),
    ("logit_bias", {1: 101.0}, "-100 to 100"),
    ("logit_bias", {-1: 1.0}, "0 to 2147483647"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024"),
    ("logit_bias", {"1": 1.0}, "an integer"),
    ("logit_bias", [1], "a mapping"),
    ("stop", "end", "a tuple of str"),
    ("stop", ("",), "at least one character"),
    ("stop", (3,), "a tuple of str"),
    ("stop_token_ids", (-3,), "0 to 2147483647"),
    ("stop_token_ids", 3, "a tuple of int"),
    ("allowed_token_ids", (), "at least one token id"),
    ("allowed_token_ids", (1.5,), "a tuple of int"),
    ("priority", -1, "0 to 100"),
    ("max_tokens", 10**5000, "an integer of some 5000 digits, wanted 1 to"),
    ("max_tokens", "x" * 10**6, f"...{'x' * 98}', wanted an integer"),
    ("logprobs", 21, "0 to 20"),
    ("prompt_logprobs", -1, "0 to 20"),
    ("n", 0, "1 to 65536"),
    ("seed", 2**63, "wanted"),
    ("seed", 1.0, "an integer"),
]


@pytest.mark.parametrize(("field", "value", "wanted"), REFUSED, ids=lambda v: str(v)[:30] if not isinstance(v, int) else "")
def test_refused(field, value, wanted):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert wanted in str(error.value)
    assert str(error.value).startswith(field), "a server reads the field's name from the first word"
    assert len(str(error.value)) < 400


def test_accepted():
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [3]}
    params = SamplingParams(**lists, temperature=0, top_p=1, seed=-(2**63), logprobs=0, n=3)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("params", "entries", "counts"),
    [
        ({}, None, False),
        ({"min_tokens": 2, "ignore_eos": True}, None, False),
        ({"presence_penalty": 0.5}, (), True),
        ({"frequency_penalty": -0.5}, (), True),
        ({"repetition_penalty": 1.1}, (), True),
        ({"allowed_token_ids": [3]}, (), False),
        ({"logit_bias": {3: 1.5}}, ((3, 1.5, 1.5),), False),
        ({"min_tokens": 2}, ((0, -math.inf, 0.0),), False),
        ({"min_tokens": 2, "logit_bias": {0: 1, 4: 2}}, ((0, -math.inf, 1.0), (4, 2.0, 2.0)), False),
    ],
)
def test_what_a_request_does_to_its_logits(params, entries, counts):
    edits = Request("a", [1, 2, 3], SamplingParams(**params), eos_ids=(0,)).edits
    assert (edits and edits.entries) == entries
    if edits is not None:
        assert (edits.counts, edits.until) == (counts, 3 + params.get("min_tokens", 0))


def test_settings_are_what_a_device_takes():
    assert Request("a", [1], SamplingParams(top_k=-1, temperature=0)).settings == (0.0, 0, 1.0, 0.0)
    for name, (low, high) in RANGES.items():
        for value in (low, high):
            if (name, value) != ("top_p", 0.0):
                more = {"max_tokens": value} if name == "min_tokens" and value else {}
                settings = Request("a", [1], SamplingParams(**{name: value}, **more)).settings
                assert all(0 <= number <= 2**31 - 1 for number in settings)


def test_seeds():
    assert [sample_seed(7, i) for i in range(3)] == [7, 8, 9]
    assert sample_seed(2**63 - 1, 1) == -(2**63)
    drawn = {sample_seed(None, 0) for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_tokens_over_the_seam():
    request = Request("a", [1, 2, 3], SamplingParams())
    request.output_ids += [4, 5]
    whole = [1, 2, 3, 4, 5]
    for start in range(6):
        for stop in range(start, 8):
            assert request.tokens(start, stop) == whole[start:stop]
    assert len(request) == 5
    request.pending = 1
    assert request.total == 6
    assert request.state is State.WAITING


def test_stop_ids():
    params = SamplingParams(stop_token_ids=(9,), min_tokens=2)
    request = Request("a", [1, 2, 3], params, eos_ids=(0,))
    assert request.stop_ids == {0, 9}
    ignoring = Request("a", [1], SamplingParams(stop_token_ids=(9,), ignore_eos=True), eos_ids=(0,))
    assert ignoring.stop_ids == {9}
