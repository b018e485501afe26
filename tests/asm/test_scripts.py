"""What the scripts make of certificates: the support table, and the comparison of versions of Triton."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str) -> ModuleType:
    """A script as a module; it finds its neighbours, as it does when it is run."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel(limiter: str = "registers", **facts: Any) -> dict[str, Any]:
    return {"kernel": "k", "warps": 4, "registers": 64, "blocks_per_sm": 8, "limiter": limiter, **facts}


def case(*kernels: dict[str, Any]) -> dict[str, Any]:
    return {"config": {}, "kernels": list(kernels)}


ERROR: dict[str, Any] = {"config": {}, "error": "k does not compile for sm_90: no"}


@pytest.mark.parametrize(
    ("cases", "configs", "cell"),
    [
        ([case(kernel()), case(kernel("warps"))], [], "2 examples; registers"),
        ([case(kernel()), {"refused": "needs float32"}], [], "1 examples; registers"),
        ([{"refused": "needs sm_100, this is sm_90"}], [], "needs sm_100, this is sm_90"),
        ([case(kernel())], [case(kernel("warps")), case(kernel("warps")), case(kernel())], "3 configs; warps"),
        ([case(kernel())], [case(kernel(), kernel(spill_bytes=8)), case(kernel())], "2 configs, 1 spill; registers"),
        ([case(kernel())], [case(kernel()), ERROR], "1 of 2 configs compile; registers"),
        ([ERROR], [], "0 of 1 examples compile"),
    ],
)
def test_support_cell(cases: list[Any], configs: list[Any], cell: str) -> None:
    certificate = {
        "cases": {f"triton/{i}/sm_90": one for i, one in enumerate(cases)} | {"other/a/sm_90": case(kernel("blocks"))},
        "configs": {"triton/sm_90": configs, "triton/sm_80": [case(kernel("blocks"))]},
    }
    assert script("results_table").support_cell(certificate, "triton", "sm_90") == cell


@pytest.mark.parametrize(
    ("one", "cell"),
    [
        (None, "-"),
        ({"refused": "needs sm_100"}, "refused"),
        (ERROR, "k does not compile for sm_90: no"),
        (case(kernel()), "8 blocks"),
        (case(kernel(spill_bytes=16, wgmma=4, tma_loads=2)), "8 blocks, 16 spilled, wgmma, tma loads"),
        (case(kernel(wgmma=4, wgmma_serialised=True)), "8 blocks, wgmma, serialised"),
        (case(kernel(loads={"4": 3, "16": 1}, stores={"8": 1}), kernel()), "8 blocks, vectors 16/8; 8 blocks"),
    ],
)
def test_what_versions_are_compared_by(one: Any, cell: str) -> None:
    """Register and instruction counts move with every version, and are no difference."""
    assert script("certify_all").summary(one) == cell
    if one and "kernels" in one:
        moved = {**one, "kernels": [{**each, "registers": 60, "shared_bytes": 9} for each in one["kernels"]]}
        assert script("certify_all").summary(moved) == cell
