"""The committed certificates against what the kernels compile to today, and the words for what got worse.

`make certify` compiles every case, in minutes. This file compiles a sample: the first examples of each op for sm_90, the very
first for the other cards.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.asm.probes import TinyOp
from tilewright.asm.certificate import FOLDER, certify, load, regressions, save
from tilewright.asm.compile import CARDS
from tilewright.hw import env
from tilewright.op import Inputs, Op
from tilewright.ops import ALL

SAMPLE = 6  # examples an op; 90 s in all on one core

needs_compiler = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")


@needs_compiler
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_nothing_got_worse(op: Op) -> None:
    held = load(op.name)
    if held["triton"] != triton.__version__:
        pytest.skip(f"certified with triton {held['triton']}, this is {triton.__version__}")
    labels = [example.label for example in op.examples[:SAMPLE]]
    others = [arch for arch in CARDS if arch != 90]
    found = regressions(held, certify(op, Inputs, archs=[90], labels=labels))
    found += regressions(held, certify(op, Inputs, archs=others, labels=labels[:1]))
    assert not found, "\n".join(["not as certified; to accept it, `make certify` and commit the files:", *found])


def test_no_certificate_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} <= {op.name for op in ALL}


KERNEL = {
    "kernel": "k", "warps": 4, "registers": 64, "shared_bytes": 1024, "wgmma": 8, "tma_loads": 2, "tma_stores": 1,
    "loads": {"16": 4, "4": 1}, "stores": {"16": 1},
}  # fmt: skip
CASE = {"config": {"BLOCK": 64}, "kernels": [KERNEL]}


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"registers": 65, "wgmma": 4, "loads": {"16": 2, "2": 5}, "shared_bytes": 99}, None),
        ({"spill_bytes": 8, "registers": 255}, "k spill_bytes 0 -> 8 (255 registers)"),
        ({"local_bytes": 40}, "k local_bytes 0 -> 40 (64 registers)"),
        ({"wgmma": None, "mma": 32}, "k had 8 wgmma instructions, now none"),
        ({"tma_loads": None}, "k had 2 TMA load instructions, now none"),
        ({"tma_stores": None}, "k had 1 TMA store instructions, now none"),
        ({"wgmma_serialised": True}, "k wgmma instructions are serialised"),
        ({"loads": {"8": 8}}, "k widest of the global loads: 16 -> 8 bytes"),
        ({"stores": None}, "k widest of the global stores: 16 -> 0 bytes"),
        ({"kernel": "j"}, "launched k, now j"),
    ],
)
def test_words_for_a_kernel(change: dict[str, Any], finding: str | None) -> None:
    kernel = {name: value for name, value in {**KERNEL, **change}.items() if value is not None}
    now = {**CASE, "kernels": [kernel]}
    assert compare(CASE, now) == ([] if finding is None else [f"op triton/a/sm_90: {finding}"])


@pytest.mark.parametrize(
    ("was", "now", "finding"),
    [
        (CASE, {"config": {}, "error": "no"}, ": ran, now no"),
        (CASE, {"refused": "needs sm_100"}, ": ran, now needs sm_100"),
        ({"refused": "old"}, {"config": {}, "error": "new"}, None),
        ({"refused": "old"}, CASE, ": runs now, certified as old"),
        (None, CASE, ": is not certified"),
        (CASE, {**CASE, "config": {"BLOCK": 32}}, ": default config has changed: BLOCK 64 -> 32"),
        (CASE, copy.deepcopy(CASE), None),
    ],
)
def test_words_for_a_case(was: Any, now: Any, finding: str | None) -> None:
    assert compare(was, now) == ([] if finding is None else [f"op triton/a/sm_90{finding}"])


def compare(was: Any, now: Any) -> list[str]:
    certificates = [{"op": "op", "cases": {} if case is None else {"triton/a/sm_90": case}} for case in (was, now)]
    return regressions(*certificates)


@needs_compiler
def test_a_certificate_round_trips_and_finds_a_spill(tmp_path: Path) -> None:
    """From an op with one good and one spilling config: certify, save, load, compare."""
    good = certify(TinyOp({}), Inputs, archs=[80])
    assert set(good["cases"]) == {"triton/only/sm_80", "later/only/sm_80"}
    assert good["cases"]["later/only/sm_80"] == {"refused": "needs sm_90, this is sm_80"}
    save(good, tmp_path)
    assert load("tiny", tmp_path) == good
    assert regressions(good, good) == []
    (config, spill) = regressions(load("tiny", tmp_path), certify(TinyOp({"maxnreg": 64}), Inputs, archs=[80]))
    assert "default config has changed: maxnreg None -> 64" in config
    assert "_matmul_kernel spill_bytes 0 -> " in spill
    broken = certify(TinyOp({"num_stages": 40}), Inputs, archs=[80])["cases"]["triton/only/sm_80"]
    assert "bytes of shared memory, sm_80 has 166912" in broken["error"]


def test_no_certificate_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make certify"):
        load("absent", tmp_path)
