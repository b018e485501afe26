"""`tilewright hw`: what it prints with and without GPUs, and of a kernel."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.hw.fake_nvml import FakeNvml
from tilewright.cli import app
from tilewright.hw import device, env, links, measure, nvml
from tilewright.hw.ceilings import Ceilings, ceilings

OPTIONS = {
    "hw": {"--measure", "--json"},
    "occupancy": {"--arch", "--threads", "--registers", "--shared", "--barriers", "--json"},
    "waves": {"--blocks", "--sms", "--blocks-per-sm", "--json"},
}
H100 = replace(device.device_named("h100"), name="NVIDIA H100 80GB HBM3")


def run(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    result = CliRunner().invoke(app, ["hw", *arguments], prog_name="tilewright")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path)
    ceilings.cache_clear()
    yield
    ceilings.cache_clear()


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def session() -> Iterator[Any]:
        raise nvml.NoDriver("no NVIDIA driver answers here (NVML Shared Library Not Found)")
        yield

    monkeypatch.setattr(nvml, "session", session)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two H100s joined by 18 links, of which CUDA shows both."""

    @contextmanager
    def session() -> Iterator[Any]:
        yield FakeNvml([["switch"] * 18] * 2)

    monkeypatch.setattr(nvml, "session", session)
    for module in (device, links, measure):
        monkeypatch.setattr(module, "cuda_count", lambda: 2)
        monkeypatch.setattr(module, "device_of", lambda index: H100)
    monkeypatch.setattr(device, "pci_id", lambda index: f"0000:{index + 1:02x}:00.0")


def test_the_options_are_frozen() -> None:
    group = get_command(app).commands["hw"]  # type: ignore[attr-defined]
    for name, command in {"hw": group, **group.commands}.items():
        options = {o for p in command.params if p.param_type_name == "option" for o in (*p.opts, *p.secondary_opts)}
        assert options - {"--help", "-h"} == OPTIONS[name]


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver() -> None:
    code, out, _ = run()
    assert code == 0
    assert "CPU" in out
    assert "none: no NVIDIA driver answers here" in out
    code, out, _ = run("--json")
    found = json.loads(out)
    assert (code, found["driver"]) == (0, None)
    assert found["cpu"]["cores"] >= 1
    code, out, err = run("--measure")
    assert (code, out) == (1, "")
    assert "nothing to measure" in err
    assert "--card h100" in err


@pytest.mark.usefixtures("two_gpus")
def test_with_gpus() -> None:
    code, out, _ = run()
    assert code == 0
    for words in (
        "driver 580.159.04, supports CUDA up to 13.0",
        "NVIDIA H100 80GB HBM3",
        "NV18",
        "NVLink 0 to 17: active, version 4.0, 26.6 GB/s each way, to switch",
        "every pair: read, write, nvlink, atomics",
        "measured 20",  # the file that ships
        "TFLOP/s",
    ):
        assert words in out, words
    found = json.loads(run("--json")[1])
    assert found["topology"]["matrix"] == [["X", "NV18"], ["NV18", "X"]]
    assert [g["sms"] for g in found["gpus"]] == [132, 132]
    assert len(found["gpus"][0]["links"]) == 18
    assert len(found["ceilings"]) == 1


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_cuda_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_count", lambda: 0)
    code, out, _ = run()
    assert code == 0
    assert "GPU1 (hidden)" in out
    code, _, err = run("--measure")
    assert code == 1
    assert "torch sees no GPU" in err


@pytest.mark.usefixtures("two_gpus")
def test_measuring_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = Ceilings(copy=3e12, read=3e12, write=3e12, l2=5e12, flops={"bf16": 7e14}, source="measured 2026-01-01 on X, 1 MHz")
    rows = [{"bytes": 1024, "us": 10.0, "bus_gb_per_s": 0.1}]
    monkeypatch.setattr(measure, "measure", lambda index, say: (mine, {"sms": 132, "failed": {"int8": "no such thing"}}))
    monkeypatch.setattr(links, "peer_copies", lambda: [[None, 4e11], [4e11, None]])
    monkeypatch.setattr(links, "copies_by_size", lambda: [{"bytes": 4096, "us": 5.0, "gb_per_s": 0.8}])
    monkeypatch.setattr(links, "all_reduce", lambda say: rows)
    monkeypatch.setattr(links, "software", lambda: {"date": "2026-01-01T00:00:00"})
    code, out, err = run("--measure")
    assert code == 0
    assert "not measured: int8: no such thing" in err
    assert {p.name for p in (tmp_path / "ceilings").iterdir()} == {"h100.json", "links-2x-h100.json"}
    for output in (out, run()[1]):  # at once, and whenever it is asked again
        assert "measured 2026-01-01 on X" in output
        assert "(data sheet)" in output
        assert "GPU0 copies to each, GB/s: -  400" in output
        assert "all reduce" in output
    (tmp_path / "ceilings/links-2x-h100.json").write_text("[")
    (tmp_path / "ceilings/h100.json").write_text("[")
    ceilings.cache_clear()
    code, out, _ = run()
    assert code == 0
    assert out.count("measure again: tilewright hw --measure") == 2


@pytest.mark.usefixtures("two_gpus")
def test_links_that_fail_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(say: Any) -> Any:
        raise TimeoutError("no all-reduce over 2 GPUs within 45 s")

    monkeypatch.setattr(links, "peer_copies", lambda: [[None, 4e11], [4e11, None]])
    monkeypatch.setattr(links, "copies_by_size", list)
    monkeypatch.setattr(links, "all_reduce", hangs)
    monkeypatch.setattr(links, "software", dict)
    found = links.measure_links(lambda words: None)
    assert found["failed"] == {"all_reduce": "no all-reduce over 2 GPUs within 45 s"}
    assert "peer_copy_bytes_per_s" in found


def test_occupancy() -> None:
    asked = ("occupancy", "--arch", "90", "--threads", "128", "--registers", "168", "--shared", "65536")
    code, out, _ = run(*asked)
    assert code == 0
    assert out.splitlines()[0] == "3 blocks, 12 of 64 warps an SM (19%); limited by registers"
    found = json.loads(run(*asked, "--json")[1])
    assert (found["blocks"], found["limiter"]) == (3, "registers")
    assert found["cliffs"][0]["words"] in out
    code, _, err = run("occupancy", "--arch", "91", "--threads", "128", "--registers", "168")
    assert code == 1
    assert "the nearest is sm_90" in err


def test_waves() -> None:
    assert run("waves", "--blocks", "120", "--sms", "108")[:2] == (
        0,
        "2 waves, the last with 12 of 108 blocks; 55.6% of the card's time is used\n",
    )
    found = json.loads(run("waves", "--blocks", "98", "--sms", "108", "--json")[1])
    assert (found["waves"], found["tail"]) == (1, 98)
    assert run("waves", "--blocks", "-1")[0] == 1
