"""Whole models against recorded text: the embedded one, always; a model trained elsewhere, where its folder is present."""

import json
from pathlib import Path

import pytest
import torch

import tilewright as tw
from tests.paths import SHARED

STORIES = SHARED / "models" / "stories260K"
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]

# `tilewright run --dtype float32 --max-tokens 24 --prompt ...`: greedy, and with --temperature 0.8 --top-p 0.95 --seed 7.
GOLDEN = [
    (
        "Call me Ishmael.",
        tw.SamplingParams(max_tokens=24, temperature=0.0),
        [
            301,
            1142,
            260,
            673,
            437,
            13,
            282,
            301,
            1142,
            260,
            673,
            437,
            13,
            282,
            301,
            1142,
            260,
            673,
            437,
            13,
            282,
            301,
            1142,
            260,
        ],
        " I'm a good man, and I'm a good man, and I'm a good man, and I'm a",
    ),
    (
        "Call me Ishmael.",
        tw.SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7),
        [
            301,
            1035,
            341,
            262,
            708,
            265,
            741,
            291,
            271,
            315,
            362,
            13,
            282,
            280,
            1187,
            262,
            272,
            1689,
            460,
            1638,
            362,
            281,
            349,
            2482,
        ],
        " I felt for the old oath he bid me, and of course the morrow would bring me to Tiver",
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_embedded_model(device: str) -> None:
    llm = tw.LLM("bookworm", device=device, dtype="float32", max_seqs=4)
    for prompt, params, ids, text in GOLDEN:
        output = llm.generate([prompt], params)[0].outputs[0]
        assert output.token_ids == ids
        assert output.text == text


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no {Path(*STORIES.parts[-3:])} beside this checkout")
@pytest.mark.parametrize("device", DEVICES)
def test_stories_word_for_word(device: str) -> None:
    """200 greedy tokens after the start token, as an independent implementation in C writes them."""
    expected = json.loads((STORIES / "expected.json").read_text())
    llm = tw.LLM(str(STORIES), device=device, dtype="float32", max_seqs=4)
    params = tw.SamplingParams(max_tokens=200, temperature=0.0)
    completion = llm.generate([""], params)[0]
    assert completion.prompt_ids == expected["prompt_token_ids"]
    assert completion.outputs[0].token_ids == expected["greedy_token_ids"]
    assert completion.outputs[0].text == expected["text"]
