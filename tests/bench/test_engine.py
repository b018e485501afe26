"""The workloads of `bench engine`, and the limits that stand beside their times."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tilewright.bench.engine import WORKLOADS, run_engine
from tilewright.bench.engine_limits import Limits, Pass, Weights, limits, shares, step_limit, weights_of
from tilewright.engine.config import EngineConfig
from tilewright.hw.ceilings import Ceilings
from tilewright.models import SHAPES, empty_model, kv_bytes_per_token

FOUND = Ceilings(
    copy=1e12, read=1e12, write=1e12, l2=1e13, flops={"bf16": 1e14, "tf32": 1e13, "int8": 2e14}, source="measured on paper"
)
TINY = replace(
    SHAPES["qwen3-0.6b"], num_hidden_layers=2, windows=(None, None), hidden_size=64, intermediate_size=128, vocab_size=256
)


def test_w1_has_the_lengths_of_the_public_benchmark() -> None:
    lengths = WORKLOADS["W1"].lengths(random.Random(7))
    assert (len(lengths), sum(told for told, _ in lengths), sum(asked for _, asked in lengths)) == (256, 142_827, 133_966)
    assert all(100 <= length <= 1024 for pair in lengths for length in pair)
    # That benchmark's own two lines.
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    assert lengths == [(len(prompt), random.randint(100, 1024)) for prompt in prompts]


def test_weights_of_a_model() -> None:
    config = replace(SHAPES["qwen3-0.6b"], tie_word_embeddings=False)
    model = empty_model(config, device="meta", dtype=torch.bfloat16)
    found = weights_of(model)
    hidden, heads, groups = 1024, 16 * 128, 8 * 128
    layer = hidden * (heads + 2 * groups) + heads * hidden + 3 * hidden * 3072
    assert found.flops_a_token == 28 * 2 * layer
    assert found.flops_a_sample == 2 * hidden * config.vocab_size
    norms = 2 * (28 * (2 * hidden + 2 * 128) + hidden)
    assert found.bytes_a_pass == 2 * (28 * layer + hidden * config.vocab_size) + norms
    tied = weights_of(empty_model(SHAPES["qwen3-0.6b"], device="meta", dtype=torch.bfloat16))
    assert tied == found, "the one table is read, as the head"


def limit(requests: list[tuple[int, int]], passes: int, windows: tuple[int | None, ...] = (None, None), **more: Any) -> Limits:
    options = {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16, **more}
    return limits(replace(TINY, windows=windows), Weights(bytes_a_pass=1000, flops_a_token=10, flops_a_sample=7), requests,
                  passes, FOUND, **options)  # fmt: skip


@pytest.mark.parametrize("windows", [(None, None), (4, None), (2, 3)])
def test_a_pass_takes_the_longer_of_its_times_twice(windows: tuple[int | None, ...]) -> None:
    """Products, then attention: of a pass in which arithmetic decides both, and of one in which bytes do."""
    config, weights = replace(TINY, windows=windows), Weights(bytes_a_pass=10**6, flops_a_token=10**9, flops_a_sample=7 * 10**9)
    prompts = Pass(np.array([0, 3]), np.array([5, 4]), 2)
    decoding = Pass(np.array([9, 1]), np.array([1, 1]), 2)
    kv, scores = kv_bytes_per_token(TINY, torch.bfloat16) / 2, 4.0 * 16 * 128
    want = 0.0
    for one in (prompts, decoding):
        tokens = int(one.counts.sum())
        want += max(10**6 / 1e12, (tokens * 10**9 + 2 * 7 * 10**9) / 1e14)
        moved = seen = 0.0
        for window in windows:
            for start, count in zip(one.starts.tolist(), one.counts.tolist(), strict=True):
                positions = [set(range(max(0, p + 1 - (window or p + 1)), p + 1)) for p in range(start, start + count)]
                moved += kv * (len(set[int]().union(*positions)) + count)
                seen += sum(map(len, positions))
        want += max(moved / 1e12, scores * seen / 1e14)
    found = step_limit(config, weights, [prompts, decoding], FOUND, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    assert found == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("windows", [(None, None), (4, None), (2, 3)])
@pytest.mark.parametrize("decode_only", [False, True])
def test_limits_count_every_token_as_a_loop_would(windows: tuple[int | None, ...], decode_only: bool) -> None:
    requests = [(3, 4), (5, 1), (1, 2)]
    kv, bytes_moved, flops = kv_bytes_per_token(TINY, torch.bfloat16), 9 * 1000, 0
    for told, asked in requests:
        if not decode_only:
            bytes_moved += told * kv
        for position in range(1, told + asked):
            if decode_only and position <= told:
                continue
            bytes_moved += kv + (position * kv if position > told else 0)
            flops += 10 + sum(4 * 16 * 128 * min(position, window or position) for window in windows)
        flops += 7 * (asked - decode_only)
    found = limit(requests, 9, windows, decode_only=decode_only)
    assert (found.bytes_s, found.flops_s) == pytest.approx((bytes_moved / 1e12, flops / 1e14))


def test_codes_have_their_own_unit_and_attention_that_of_its_dtype() -> None:
    plain, quantized = limit([(8, 8)], 8), limit([(8, 8)], 8, format="int8")
    products = (15 * 10 + 8 * 7) / 1e14
    assert plain.flops_s - quantized.flops_s == pytest.approx(products / 2)
    assert limit([(8, 8)], 8, format="int4") == plain
    assert shares(plain, 10 * plain.bytes_s)["of_bytes_limit"] == 0.1


def test_a_run_has_its_shares_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("tilewright.bench.engine.ceilings", lambda device: replace(FOUND, read=2e10, flops={"tf32": 1e10}))
    said: list[str] = []
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=512, kv_cache_bytes=64 << 20)
    (row,) = run_engine("tiny", ["B1"], runs=1, config=config, progress=said.append)
    assert (row["tokens_in"], row["tokens_out"]) == (128, 256)
    assert 0 < row["of_bytes_limit"] < 1
    assert row["bytes_limit_s"] * 0.9 < row["steps_limit_s"]
    assert row["of_steps_limit"] < 1
    assert 0 < row["of_flops_limit"] < 1
    assert row["kernels"] == {}, "on a CPU the definitions run"
    assert any("of the limit by bytes" in line for line in said)
