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
        [301, 564, 260, 437, 280, 262, 957, 13, 282, 301, 564, 260, 437, 280, 262, 957, 15, 301, 564, 260, 437, 280, 262, 957],
        " I am a man of the world, and I am a man of the world. I am a man of the world",
    ),
    (
        "Call me Ishmael.",
        tw.SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7),
        [
            *(301, 1128, 3211, 387, 42, 321, 260, 1146, 499, 301, 321, 260),
            *(1146, 280, 2207, 2872, 15, 1661, 1057, 321, 290, 262, 2466, 341),
        ],
        " I've forgotten--I was a boy when I was a boy of fifteen. My mother was in the garden for",
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
