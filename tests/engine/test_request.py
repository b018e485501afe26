"""Sampling parameters refuse what is out of range, naming the field; requests count their tokens."""

import math
from typing import Any

import pytest

from tilewright.engine.request import Request, SamplingParams, State, sample_seed

REFUSED = [
    ("max_tokens", 0, "1 or more"),
    ("max_tokens", 1.5, "an integer"),
    ("max_tokens", True, "an integer"),
    ("min_tokens", -1, "0 to 16"),
    ("min_tokens", 17, "0 to 16"),
    ("temperature", -0.1, "0 or more"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", "hot", "a number"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.01, "0 to 1"),
    ("top_k", -1, "0 or more"),
    ("min_p", 1.1, "0 to 1"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", -2.1, "-2 to 2"),
    ("repetition_penalty", 0, "above 0"),
    ("repetition_penalty", -1.0, "0 or more"),
    ("logit_bias", {1: 101.0}, "-100 to 100"),
    ("logit_bias", {-1: 1.0}, "0 or more"),
    ("logit_bias", {"1": 1.0}, "an integer"),
    ("logit_bias", [1], "a mapping"),
    ("stop", "end", "a tuple of str"),
    ("stop", ("",), "at least one character"),
    ("stop", (3,), "a tuple of str"),
    ("stop_token_ids", (-3,), "0 or more"),
    ("stop_token_ids", 3, "a tuple of int"),
    ("logprobs", 21, "0 to 20"),
    ("prompt_logprobs", -1, "0 to 20"),
    ("n", 0, "1 or more"),
    ("seed", 2**63, "wanted"),
    ("seed", 1.0, "an integer"),
]


@pytest.mark.parametrize(("field", "value", "wanted"), REFUSED, ids=[f"{f}={v!r}" for f, v, _ in REFUSED])
def test_refused(field, value, wanted):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert wanted in str(error.value)
    assert str(error.value).startswith(field), "a server reads the field's name from the first word"


def test_accepted():
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [3]}
    params = SamplingParams(**lists, temperature=0, top_p=1, seed=-(2**63), logprobs=0, n=3)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("field", "value"), [("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("repetition_penalty", 1.1)]
)
def test_penalties_need_history(field, value):
    assert SamplingParams(**{field: value}).needs_history
    assert not SamplingParams(logit_bias={3: 1.0}, min_tokens=2).needs_history


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


def test_stop_ids_and_min_tokens():
    params = SamplingParams(stop_token_ids=(9,), min_tokens=2)
    request = Request("a", [1, 2, 3], params, eos_ids=(0,))
    assert request.stop_ids == {0, 9}
    assert [request.stop_banned(position) for position in (3, 4, 5)] == [True, True, False]
    ignoring = Request("a", [1], SamplingParams(stop_token_ids=(9,), ignore_eos=True), eos_ids=(0,))
    assert ignoring.stop_ids == {9}
