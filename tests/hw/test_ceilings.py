"""Ceilings: measured before shipped before the data sheet, and files that are none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewright.hw import ceilings as module
from tilewright.hw import env
from tilewright.hw.ceilings import Ceilings, ceilings, path_of, read, save
from tilewright.hw.device import CARD_OF_ARCH, CARDS, CPU, card_slug, device_named, device_of
from tilewright.hw.links import measure_links
from tilewright.hw.measure import measure
from tilewright.hw.roofline import Cost, roof

MINE = Ceilings(copy=3e12, read=3.1e12, write=3.2e12, l2=5e12, flops={"bf16": 7e14}, source="measured 2026-01-01 on X, 1 MHz")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path)
    ceilings.cache_clear()


def test_the_data_sheet_serves_every_named_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    for slug, card in CARDS.items():
        found = ceilings(card)
        assert card_slug(found.source.removeprefix("data sheet of ")) == slug
        assert not found.measured
        assert found.flops["int8"] >= found.flops["bf16"] > found.flops["fp32"]
        assert ("fp8" in found.flops) == (card.arch >= 89)


def test_own_before_shipped_before_the_data_sheet(tmp_path: Path) -> None:
    h100 = device_named("h100")
    shipped = ceilings(h100)
    assert shipped.measured
    assert 2.5e12 < shipped.copy < 3.35e12
    assert shipped.unmeasured == ()
    save(MINE, path_of(h100), {"device": "X"})
    found = ceilings(h100)
    assert (found.copy, found.flops["bf16"], found.source) == (MINE.copy, MINE.flops["bf16"], MINE.source)
    assert json.loads(path_of(h100).read_text())["device"] == "X"
    assert not list(tmp_path.rglob("*.part"))


def test_a_unit_that_was_not_measured_is_the_data_sheets_and_says_so() -> None:
    h100 = device_named("h100")
    save(MINE, path_of(h100), {})
    found = ceilings(h100)
    assert (found.flops["fp8"], found.source_of("fp8")) == (1979e12, "data sheet")
    assert found.source_of("bf16") == found.source_of("copy") == MINE.source
    assert roof(Cost(flops=10**15, bytes=1), found, "fp8").source == "data sheet"
    assert roof(Cost(flops=1, bytes=10**9), found, "fp8").source == MINE.source


@pytest.mark.parametrize(
    ("facts", "counts"),
    [
        ({}, True),
        ({"sms": 108, "memory_bytes": 84 << 30}, True),
        ({"sms": 108, "memory_bytes": 40 << 30}, False),
        ({"sms": 54, "memory_bytes": 80 << 30}, False),
    ],
)
def test_a_measurement_is_of_one_model(facts: dict[str, int], counts: bool) -> None:
    a100 = device_named("a100")
    save(MINE, path_of(a100), facts)
    assert ceilings(a100).measured == counts


def test_an_unknown_card_is_taken_for_one_of_its_architecture() -> None:
    assert ceilings(replace(device_named("l4"), name="NVIDIA XYZ 1")).source == "data sheet of L4"
    with pytest.raises(ValueError, match="no data sheet for sm_75"):
        ceilings(replace(device_named("l4"), name="T4", arch=75))
    with pytest.raises(ValueError, match="needs a GPU"):
        ceilings(CPU)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "ceilings").write_text("a file in the way")
    with pytest.raises(OSError, match="ceilings"):
        save(MINE, path_of(device_named("h100")), {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a measurement"),
        ("[]", "not a measurement"),
        ('{"schema": 2}', "schema 2, wanted 1"),
        ('{"schema": 1, "ceilings": {"copy": "fast"}}', "not a measurement.*could not convert"),
        ('{"schema": 1, "ceilings": {"copy": 0, "read": 1, "write": 1, "l2": 1, "flops": {}, "source": ""}}', "not a positive"),
        (
            '{"schema": 1, "ceilings": {"copy": NaN, "read": 1, "write": 1, "l2": 1, "flops": {}, "source": ""}}',
            "not a positive",
        ),
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
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_slugs(name: str, slug: str) -> None:
    assert card_slug(name) == slug
    assert device_named(name).arch >= 80


def test_a_slice_of_a_card_is_another_card() -> None:
    assert card_slug("NVIDIA H100 80GB HBM3 MIG 1g.10gb") not in CARDS


def test_a_card_stands_for_each_certified_architecture() -> None:
    assert {arch: card.arch for arch, card in CARD_OF_ARCH.items()} == {80: 80, 90: 90, 100: 100}


def test_nearest_card() -> None:
    with pytest.raises(ValueError, match="did you mean h100"):
        device_named("h10")


# ---- on GPUs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: nothing to measure")
def test_a_card_reaches_much_of_its_data_sheet_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    sheet = ceilings(device_of(0))
    found, facts = measure(0, lambda words: None)
    assert (facts["sms"], bool(facts["driver"]), bool(facts["date"])) == (device_of(0).sms, True, True)
    assert 0.6 * sheet.copy < found.copy < sheet.copy
    assert found.l2 > found.copy
    for unit, value in found.flops.items():
        assert 0.4 * sheet.flops[unit] < value < sheet.flops[unit], unit
    assert set(found.flops) | set(facts["failed"]) == {"bf16", "fp16", "tf32", "fp32", "fp8", "int8"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here: no links to measure")
def test_links_are_measured_by_size() -> None:
    found = measure_links(lambda words: None)
    assert found["failed"] == {}
    assert all((rate is None) == (i == j) for i, row in enumerate(found["peer_copy_bytes_per_s"]) for j, rate in enumerate(row))
    for what in ("copies_0_to_1", "all_reduce"):
        sizes, times = [row["bytes"] for row in found[what]], [row["us"] for row in found[what]]
        assert sizes == sorted(sizes)
        assert times[-1] > times[0] > 0
