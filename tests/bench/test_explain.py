"""`explain` for cards that are not here: the choice, the reasons, the floor, the kernels, what is near."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tilewright.bench.dims import find_op
from tilewright.bench.explain import explain
from tilewright.cli import app
from tilewright.hw import env
from tilewright.hw.device import device_named
from tilewright.op import invariant, prefer

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles nothing")
H100 = device_named("h100")
E4M3 = torch.float8_e4m3fn


def test_a_matrix_product() -> None:
    dims = {"M": 64, "N": 4096, "K": 4096}
    with prefer("triton"):
        said = explain(find_op("linear"), dims, H100)
    assert (said["impl"], said["card"]["sms"]) == ("triton", 132)
    assert said["others"]["gemv"].startswith("refuses: supports one row of x only: from two rows on, ")
    assert said["others"]["vendor"] == "triton is preferred"
    assert said["roofline"]["flops"] == 2 * 64 * 4096 * 4096
    assert said["roofline"]["bytes"] == 2 * (64 * 4096 + 4096 * 4096 + 64 * 4096)
    assert said["roofline"]["bound"] == "bytes"
    (kernel,) = said["kernels"]
    assert kernel["tensor_cores"] == "wgmma"
    assert kernel["blocks"] == kernel["waves"]["blocks"] > 0
    assert kernel["blocks_per_sm"] >= 1
    assert any(line.startswith("measure it with: tilewright tune linear M=64 N=4096 K=4096") for line in said["advice"])
    json.dumps(said)


def test_neighbours_that_run_otherwise_are_cliffs() -> None:
    with prefer("triton_tma"):
        said = explain(find_op("linear"), {"M": 512, "N": 4096, "K": 4096}, H100)
    assert said["impl"] == "triton_tma"
    assert any(line.startswith("K=4095: ") and "instead of triton_tma" in line for line in said["cliffs"])


def test_scopes_and_cards() -> None:
    with invariant():
        for card, impl in ((H100, "sm90_invariant"), (device_named("a100"), "invariant")):
            assert explain(find_op("linear"), {"M": 1, "N": 256, "K": 256}, card)["impl"] == impl
    said = explain(find_op("linear"), {"M": 512, "N": 1024, "K": 1024}, device_named("a100"))
    assert "sm_90" in said["others"]["triton_tma"]
    assert "data sheet" in said["roofline"]["ceilings"]
    assert any("hw --measure" in line for line in said["advice"])


def test_costs_that_depend_on_values() -> None:
    said = explain(find_op("paged_attention"), {"B": 2, "KV": 64, "H": 4, "G": 2, "D": 64}, H100)
    assert said["roofline"]["flops"] == 4 * 2 * 64 * 4 * 64
    assert said["impl"] == "sm90"


@pytest.mark.parametrize(
    ("name", "more", "unit"),
    [
        ("scaled_linear", {"dtype": torch.float8_e4m3fn}, "fp8"),
        ("scaled_linear", {}, "int8"),
        ("block_scaled_linear", {}, "fp8"),
    ],
    ids=str,
)
def test_products_of_codes_have_the_floor_of_their_codes(name: str, more: dict[str, torch.dtype], unit: str) -> None:
    said = explain(find_op(name), {"M": 4096, "N": 4096, "K": 4096, **more}, H100)
    assert (said["impl"], said["roofline"]["bound"]) == ("sm90", unit)


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["explain", *words])
    return result.exit_code, result.stdout, result.stderr


def test_command() -> None:
    code, text, _ = run("rms_norm", "M=4096", "N=4096", "--card", "h100")
    assert code == 0
    for words in (
        "runs     triton",
        "floor",
        "by bytes",
        "kernel   _rms_norm_kernel",
        "blocks an SM",
        "measured not on this card",
    ):
        assert words in text
    code, text, _ = run("rms_norm", "M=4096", "N=4096", "--card", "h100", "--json")
    assert (code, json.loads(text)["impl"]) == (0, "triton")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rms_nrm", "M=1", "N=1", "--card", "h100"), "did you mean rms_norm"),
        (("rms_norm", "M=1", "--card", "h100"), "N is missing"),
        (("rms_norm", "M=1", "N=1", "--card", "h10"), "did you mean"),
        (("linear", "M=1", "N=1", "K=1", "--card", "h100", "--prefer", "tritn"), "did you mean triton"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str) -> None:
    code, _, error = run(*words)
    assert code == 1
    assert message in error
