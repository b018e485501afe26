"""What `bench attention-8bit` measures, and what it refuses."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tilewright.bench import attention_8bit
from tilewright.hw.device import device_named


def test_shapes() -> None:
    usual = attention_8bit.shapes_of(["fp8"], None)
    assert len(usual) == 12
    assert {dims["KV"] for _, dims in usual} == {8192, 16384, 32768}
    assert attention_8bit.shapes_of(["int8"], "B=2,KV=64 causal=true; ") == [
        ("B=2 KV=64 causal=true", {"B": 2, "KV": 64, "causal": True})
    ]


@pytest.mark.parametrize(
    ("formats", "shapes", "message"),
    [
        (["fp9"], None, "no format 'fp9'"),
        (["fp8"], "B=2 KZ=3", "has no dimension 'KZ'"),
        (["fp8"], "B=2", "KV is missing"),
        (["fp8"], "B=2 KV=64 format=int8", "cannot be given here"),
        (["fp8"], "B=2 KV=64 dtype=fp16", "the 16-bit side is bfloat16"),
        (["fp8"], " ; ", "no shape"),
    ],
)
def test_bad_input(formats: list[str], shapes: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_8bit.shapes_of(formats, shapes)


def test_the_quantiser_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = []

    def timed(calls: Sequence[Callable[[int], Any]], *, sets: int, settle: float, call_us: float) -> list[tuple[float, float]]:
        assert (sets, settle) == (64, 0.5)
        assert 0 < call_us < 1
        results.extend(call(sets - 1) for call in calls)
        return [(300.0, 1.0), (200.0, 2.0), (150.0, 3.0)]

    monkeypatch.setattr(attention_8bit, "interleaved_us", timed)
    monkeypatch.setattr(attention_8bit, "device_of", lambda index: device_named("h100"))
    monkeypatch.setattr(attention_8bit, "_normal", lambda size: torch.randn(size, dtype=torch.bfloat16))
    said: list[str] = []
    shapes = attention_8bit.shapes_of(["fp8", "int8"], "B=1 KV=33 Q=5 H=2 G=1 D=32 causal=true")
    rows = list(attention_8bit.rows(["fp8", "int8"], shapes, said.append, settle=0.5))
    assert [(row["format"], row["us"], row["bf16_us"], row["ratio"]) for row in rows] == [
        ("fp8", 200.0, 300.0, 1.5),
        ("int8", 150.0, 300.0, 2.0),
    ]
    bf16, *quantized = results
    assert bf16.shape == (1, 5, 2, 32)
    assert all(0 < float((one - bf16).abs().max()) < 0.5 for one in quantized), "three ways of one attention"
    assert "1.5" in said[1]
