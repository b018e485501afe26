"""Ceilings: measured before shipped before the data sheet, and files that are none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.hw import ceilings as module
from tilewright.hw import env
from tilewright.hw.cards import NAMED, device_named
from tilewright.hw.ceilings import Ceilings, ceilings, path_of, read, save
from tilewright.hw.device import CPU, card_slug
from tilewright.hw.roofline import Cost, roof

MINE = Ceilings(copy=3e12, read=3.1e12, write=3.2e12, l2=5e12, flops={"bf16": 7e14}, source="measured 2026-01-01 on X, 1 MHz")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path)
    ceilings.cache_clear()


def test_the_data_sheet_serves_every_named_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    for card in NAMED.values():
        found = ceilings(card)
        assert found.source == f"data sheet of {card_slug(card.name)}"
        assert not found.measured
        assert found.flops["int8"] >= found.flops["bf16"] > found.flops["fp32"]


def test_shipped_then_own(tmp_path: Path) -> None:
    h100 = device_named("h100")
    shipped = ceilings(h100)
    assert shipped.measured
    assert 2.5e12 < shipped.copy < 3.35e12
    save(MINE, path_of(h100), {"device": "X"})
    assert ceilings(h100) == MINE
    assert json.loads(path_of(h100).read_text())["device"] == "X"
    assert not list(tmp_path.rglob("*.part"))


def test_an_unknown_card_is_taken_for_the_first_of_its_architecture() -> None:
    assert ceilings(replace(device_named("l4"), name="NVIDIA XYZ 1")).source == "data sheet of l4"
    with pytest.raises(ValueError, match="no data sheet for sm_75"):
        ceilings(replace(device_named("l4"), name="T4", arch=75))
    with pytest.raises(ValueError, match="wanted a GPU"):
        ceilings(CPU)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a measurement"),
        ("[]", "not a measurement"),
        ('{"schema": 2}', "schema 2, wanted 1"),
        ('{"schema": 1, "ceilings": {"copy": "fast"}}', "not a measurement|could not convert"),
        ('{"schema": 1, "ceilings": {"copy": 0, "read": 1, "write": 1, "l2": 1, "flops": {}, "source": ""}}', "not positive"),
        (" " * (1 << 21), "bytes, wanted at most"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "h100.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read(path)


def test_roof_names_the_bound_and_the_source() -> None:
    big = roof(Cost(flops=10**15, bytes=10**6), MINE, "bf16")
    assert (big.bound, big.seconds, big.source) == ("bf16", pytest.approx(1 / 0.7), MINE.source)
    assert roof(Cost(flops=1, bytes=3 * 10**12), MINE, "bf16").bound == "bytes"
    with pytest.raises(ValueError, match="no fp8 unit; it has bf16"):
        roof(Cost(1, 1), MINE, "fp8")


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx-4090")],
)
def test_slugs(name: str, slug: str) -> None:
    assert card_slug(name) == slug
    assert device_named(name).arch >= 80


def test_nearest_card() -> None:
    with pytest.raises(ValueError, match="did you mean h100"):
        device_named("h10")
