"""The committed certificates against what the kernels compile to today, and the words for what got worse.

`make certify` compiles every case and every config, in minutes. This file compiles a sample, always the same one: of the cases
the first example of each op; of the configs one of each implementation. In `make test` cards take turns: beside sm_90 an op's
case is compiled for one other card, and an implementation's config for one card. The tests marked long take every card, and for
sm_90 an example from the middle too, which reaches hardly any implementation that the first does not.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.asm.probes import TinyOp
from tilewright.asm import certificate
from tilewright.asm.certificate import FOLDER, ConfigFacts, config_facts, config_key, load, save
from tilewright.asm.certify import certify, configs_of, sampled
from tilewright.asm.regressions import regressions
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.conv.sm90_kernel import VIEWS_REACH_ON
from tilewright.op import Inputs, Op
from tilewright.ops import ALL

CONFIGS = 1  # of an implementation and card; a config takes the compiler a second or more

needs_compiler = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")


def held(op: Op) -> Any:
    """The certificate of an op, if it was written with the Triton that is here."""
    found = load(op.name)
    if found["triton"] != triton.__version__:
        pytest.skip(f"certified with triton {found['triton']}, this is {triton.__version__}")
    return found


def lacking() -> set[str]:
    """Operators that refuse some of their certified configs with the installed Triton."""
    return set() if VIEWS_REACH_ON else {"conv", "conv_codes", "conv_transpose", "conv_weight_gradient"}


@cache
def configs_today(name: str) -> dict[str, list[tuple[str, str]]]:
    """What `configs_of` says of an op; to walk all spaces takes seconds."""
    (op,) = (op for op in ALL if op.name == name)
    return configs_of(op, Inputs)


def listed(found: list[str]) -> str:
    lines = ["not as certified; to accept it, `make certify` and commit the files:", *found[:40]]
    return "\n".join([*lines, f"and {len(found) - 40} more"] if len(found) > 40 else lines)


OTHERS = [arch for arch in CARD_OF_ARCH if arch != 90]
TUNED = [op for op in ALL if any(impl.space.axes for impl in op.impls)]


@needs_compiler
@pytest.mark.parametrize(("turn", "op"), list(enumerate(ALL)), ids=[op.name for op in ALL])
def test_no_case_got_worse(turn: int, op: Op) -> None:
    was = held(op)
    found = certify(op, Inputs, archs=[90, OTHERS[turn % len(OTHERS)]], labels=[op.examples[0].label], keep=_none)
    assert not regressions(was, found), listed(regressions(was, found))


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_no_case_from_the_middle_got_worse(op: Op) -> None:
    was = held(op)
    found = certify(op, Inputs, archs=[90], labels=[op.examples[len(op.examples) // 2].label], keep=_none)
    assert not regressions(was, found), listed(regressions(was, found))


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_no_case_got_worse_on_any_other_card(op: Op) -> None:
    was = held(op)
    found = regressions(was, certify(op, Inputs, archs=OTHERS, labels=[op.examples[0].label], keep=_none))
    assert not found, listed(found)


@needs_compiler
@pytest.mark.parametrize(("turn", "op"), list(enumerate(TUNED)), ids=[op.name for op in TUNED])
def test_no_config_got_worse(turn: int, op: Op) -> None:
    was = held(op)
    places, of_sample = taking_turns(was, turn), sampled(was, CONFIGS)
    found = certify(op, Inputs, labels=[], keep=lambda place, key: place in places and of_sample(place, key))
    assert found["configs"].keys() == places
    assert not regressions(was, found), listed(regressions(was, found))


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("op", TUNED, ids=lambda op: op.name)
def test_no_config_got_worse_on_any_card(op: Op) -> None:
    was = held(op)
    found = regressions(was, certify(op, Inputs, labels=[], keep=sampled(was, CONFIGS)))
    assert not found, listed(found)


def taking_turns(certificate: Any, turn: int) -> set[str]:
    """For each implementation one of its places (implementation/sm_90): another card for the next operator."""
    places: dict[str, list[str]] = {}
    for place in certificate["configs"]:
        places.setdefault(place.partition("/")[0], []).append(place)
    return {sorted(found)[turn % len(found)] for found in places.values()}


def test_every_implementation_has_its_turn_on_every_card() -> None:
    certificate = {"configs": dict.fromkeys(("a/sm_80", "a/sm_90", "a/sm_100", "b/sm_90"))}
    turns = [taking_turns(certificate, turn) for turn in range(3)]
    assert set().union(*turns) == set(certificate["configs"])
    assert all(len(places) == 2 for places in turns)


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_every_config_is_certified(op: Op) -> None:
    """The certificate has a line for every config of today's spaces, and for no other: nothing is compiled for this.

    With a Triton that lacks something, there may be others.
    """
    for place, wanted in configs_today(op.name).items():
        rows = load(op.name)["configs"].get(place, [])
        have, want = ({(row["at"], config_key(row["config"])) for row in rows}, set(wanted))
        assert (have >= want) if op.name in lacking() else (have == want), (
            f"{op.name} {place}: {len(want - have)} configs are not certified, {len(have - want)} are no longer there; "
            f"`make certify ARGS={op.name}` and commit the file"
        )


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_representatives_reach_every_value(op: Op) -> None:
    """Every value of every axis is in some certified config of some card: what no representative reaches is never offered."""
    if op.name in lacking():
        pytest.skip("the installed Triton has no views of shared memory that reach beyond their part, which some configs need")
    places = configs_today(op.name)
    for impl in op.impls:
        keys = [key for place, found in places.items() if place.startswith(f"{impl.name}/") for _, key in found]
        for axis, values in impl.space.axes.items():
            missing = [value for value in values if not any(_has(key, axis, value) for key in keys)]
            assert not missing, f"{op.name} {impl.name}: no representative reaches {axis} = {missing}"


def _has(key: str, axis: str, value: Any) -> bool:
    one = config_key({axis: value})[1:-1]
    return f"{one}," in key or f"{one}}}" in key


def test_no_certificate_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} <= {op.name for op in ALL}


def test_samples_are_good_and_always_the_same() -> None:
    rows = [{"config": {"BLOCK": i}, "kernels": [{"spill_bytes": 8} if i % 2 else {}]} for i in range(100)]
    rows.append({"config": {"BLOCK": 100}, "error": "no"})
    keep = sampled({"configs": {"triton/sm_90": rows}}, 5)
    kept = [i for i in range(101) if keep("triton/sm_90", config_key({"BLOCK": i}))]
    assert len(kept) == 5
    assert all(i % 2 == 0 and i < 100 for i in kept)
    again = sampled({"configs": {"triton/sm_90": rows[::-1]}}, 5)
    assert kept == [i for i in range(101) if again("triton/sm_90", config_key({"BLOCK": i}))]
    assert not keep("triton/sm_80", config_key({"BLOCK": kept[0]}))


def test_config_key_knows_no_order() -> None:
    assert config_key({"b": 1, "a": True}) == config_key({"a": True, "b": 1}) == '{"a": true, "b": 1}'


def test_config_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst kernel of a config; an error instead of numbers; nothing for what is not certified."""
    one = {"kernel": "a", "warps": 4, "registers": 80, "blocks_per_sm": 6, "limiter": "registers"}
    two = {"kernel": "b", "warps": 8, "registers": 40, "shared_bytes": 9000, "blocks_per_sm": 2, "limiter": "shared memory"}
    rows = [
        {"at": "M=1", "config": {"N": 1, "B": 2}, "kernels": [one, two]},
        {"at": "M=1", "config": {"B": 3, "N": 1}, "error": "k does not compile for sm_80: no"},
    ]
    monkeypatch.setattr(certificate, "_read", lambda name: load(name, tmp_path))
    config_facts.cache_clear()
    save({"op": "some", "triton": "3", "ptxas": {}, "cases": {}, "configs": {"triton/sm_80": rows}}, tmp_path)
    try:
        found = config_facts("some", "triton", 80)
        assert found[config_key({"B": 2, "N": 1})] == ConfigFacts(
            warps=4, registers=80, spill_bytes=0, shared_bytes=9000, blocks_per_sm=2, limiter="shared memory", error=None
        )
        assert found[config_key({"B": 3, "N": 1})].error == "k does not compile for sm_80: no"
        assert config_facts("some", "triton", 89) == found
        assert (
            config_facts("some", "triton", 90) == config_facts("some", "other", 80) == config_facts("none", "triton", 80) == {}
        )
    finally:
        config_facts.cache_clear()


KERNEL = {
    "kernel": "k", "warps": 4, "registers": 64, "shared_bytes": 1024, "wgmma": 8, "tma_loads": 2, "tma_stores": 1,
    "blocks_per_sm": 5, "limiter": "registers",
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
        (
            {"registers": 128, "blocks_per_sm": 4},
            "k blocks an SM 5 -> 4, limited by registers (64 registers, 1024 bytes shared, 4 warps, "
            "now 128 registers, 1024 bytes shared, 4 warps)",
        ),
        ({"blocks_per_sm": 9}, None),
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
    certificates = [
        {"op": "op", "cases": {} if case is None else {"triton/a/sm_90": case}, "configs": {}} for case in (was, now)
    ]
    return regressions(*certificates)


def test_words_for_a_config() -> None:
    """A config is known by its representative and its choices, in any order."""
    row = {"at": "M=1", "config": {"A": 1, "B": 2}, "kernels": [KERNEL]}
    was, now = ({"op": "op", "cases": {}, "configs": {"triton/sm_90": rows}} for rows in ([row], []))
    now["configs"]["triton/sm_90"] = [{**row, "config": {"B": 2, "A": 1}}]
    assert regressions(was, now) == []
    now["configs"]["triton/sm_90"] = [
        {**row, "kernels": [{**KERNEL, "spill_bytes": 8}]},
        {**row, "at": "M=2"},
        {"at": "M=1", "config": {"A": 1, "B": 2}, "error": "k does not compile for sm_90: no"},
    ]
    assert regressions(was, now) == [
        "op triton/sm_90 A=1 B=2 at M=1: k spill_bytes 0 -> 8 (64 registers)",
        "op triton/sm_90 A=1 B=2 at M=2: is not certified",
        "op triton/sm_90 A=1 B=2 at M=1: ran, now k does not compile for sm_90: no",
    ]


@needs_compiler
@pytest.mark.parametrize("workers", [0, 2])
def test_a_certificate_round_trips(tmp_path: Path, workers: int) -> None:
    found = certify(TinyOp({}), Inputs, archs=[80, 90], workers=workers)
    save(found, tmp_path)
    assert load("tiny", tmp_path) == found
    assert regressions(found, found) == []
    assert set(found["cases"]) == {f"{impl}/only/sm_{arch}" for impl in ("triton", "later") for arch in (80, 90)}
    assert found["cases"]["later/only/sm_80"] == {"refused": "needs sm_90, this is sm_80"}
    assert set(found["configs"]) == {"triton/sm_80", "triton/sm_90", "later/sm_90"}
    spilling, good, too_big = found["configs"]["triton/sm_80"]
    assert spilling["config"] == {"maxnreg": 64, "num_stages": 2}
    assert spilling["kernels"][0]["spill_bytes"] > 0
    assert good["kernels"][0]["blocks_per_sm"] >= 1
    assert "bytes of shared memory, sm_80 has 166912" in too_big["error"]


@needs_compiler
def test_planted_regressions_are_found() -> None:
    """The same op with worse defaults, a worse space, or a kernel that no longer compiles: each is a finding, in words."""
    good = certify(TinyOp({}), Inputs, archs=[80])
    spilled = certify(TinyOp({"maxnreg": 64}), Inputs, archs=[80], keep=_none)
    config, spill, *_ = regressions(good, spilled)
    assert "default config has changed: maxnreg None -> 64" in config
    assert "_matmul_kernel spill_bytes 0 -> " in spill
    too_big = certify(TinyOp({"num_stages": 12}), Inputs, archs=[80], keep=_none)
    assert "ran, now _matmul_kernel needs" in regressions(good, too_big)[0]
    # The same configs, by a kernel that holds twice as much.
    (heavier, *_) = regressions(good, certify(TinyOp({}, wide=True), Inputs, archs=[80], labels=[]))
    assert "maxnreg=64 num_stages=2 at only: _matmul_kernel spill_bytes" in heavier
    (fewer,) = regressions(good, certify(TinyOp({}, wide=True), Inputs, archs=[80], labels=[], keep=_unlimited))
    assert "maxnreg=None num_stages=2 at only: _matmul_kernel blocks an SM 3 -> 2, limited by registers" in fewer
    # The space grows by configs that nobody certified.
    grown = certify(TinyOp({}, stages=(2, 3)), Inputs, archs=[80], labels=[], keep=_unlimited)
    assert [f for f in regressions(good, grown) if f.endswith("num_stages=3 at only: is not certified")]


def _none(place: str, key: str) -> bool:
    return False


def _unlimited(place: str, key: str) -> bool:
    """Not the configs that spill on purpose."""
    return '"maxnreg": null' in key


@needs_compiler
def test_vanished_tensor_cores_are_found() -> None:
    """What was certified on sm_90 with wgmma, compiled without."""
    good = certify(TinyOp({}), Inputs, archs=[90], keep=_none)
    slow = certify(TinyOp({"num_warps": 2}), Inputs, archs=[90], keep=_none)
    assert any("wgmma instructions, now none" in finding for finding in regressions(good, slow))


def test_no_certificate_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make certify"):
        load("absent", tmp_path)
