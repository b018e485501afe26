"""The dispatcher: which implementation and config a call gets, by refusals, scopes and measured rows.

The card and the implementations are stand-ins: what is tested is the choice.
"""

import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.tune.rows import CARD
from tests.tune.test_lookup import Places, at
from tests.tune.test_lookup import places as places  # a fixture
from tilewright import op as op_module
from tilewright.hw.device import CPU, INTERPRETER, Device
from tilewright.hw.roofline import Cost
from tilewright.op import Choice, Example, Impl, Inputs, Op, Refused, Scope, invariant, prefer, scope, strict
from tilewright.ops import ALL
from tilewright.tune import lookup
from tilewright.tune.lookup import NoRecord, counters
from tilewright.tune.record import problem_json
from tilewright.tune.space import Space

H100 = Device(kind="cuda", name=CARD, arch=90, sms=132, smem_bytes=232448)


class Problem(NamedTuple):
    dtype: torch.dtype
    m: int
    k: int


SMALL, LARGE = Problem(torch.bfloat16, 4, 4096), Problem(torch.bfloat16, 64, 4096)


def space(default: int) -> Space:
    return Space(default=lambda device, problem: {"BLOCK": default}, axes={"BLOCK": (16, 32, 64)})


def impl(name: str, **more: Any) -> Impl:
    return Impl(name=name, launch=lambda config, x: (name, dict(config)), **more)


def reference(x: Tensor) -> Tensor:
    return x.clone()


def op_of(name: str, *impls: Impl, **more: Any) -> Op:
    return Op(
        name=f"test_{name}",
        reference=reference,
        problem=lambda x: Problem(x.dtype, x.m, x.k),
        cost=lambda x: Cost(0, 0),
        examples=(Example("one", lambda inputs: (inputs.randn(2, 2),)),),
        impls=impls,
        **more,
    )


OP = op_of(
    "choice",
    impl("few", space=space(16), refuse=lambda device, problem: "more than 16 rows" if problem.m > 16 else None),
    impl("vendor", interpretable=False),
    impl("triton", space=space(32), batch_invariant=True),
    impl("next", space=space(64), min_arch=100),
)
ROWS = op_of("rows", impl("triton", space=space(32), batch_invariant=True), rows_in_problem=True)
ONE = op_of("one", impl("vendor"))


def chosen(op: Op, problem: Problem, device: Device = H100) -> tuple[str, int | None, str]:
    choice = op.choose(device, problem)
    return choice.impl.name, choice.config.get("BLOCK"), choice.source


# ---- without rows


@pytest.mark.parametrize(
    ("problem", "device", "scopes", "wanted"),
    [
        (SMALL, H100, (), ("few", 16, "default")),
        (LARGE, H100, (), ("vendor", None, "default")),
        (LARGE, H100, (prefer("triton"),), ("triton", 32, "default")),
        (LARGE, H100, (prefer("few"),), ("vendor", None, "default")),
        (LARGE, H100, (prefer("reference"),), ("reference", None, "fixed")),
        (LARGE, H100, (invariant(),), ("triton", 32, "default")),
        (LARGE, INTERPRETER, (), ("triton", 32, "fixed")),
        (SMALL, CPU, (prefer("triton"),), ("reference", None, "fixed")),
    ],
)
def test_the_first_that_does_not_refuse(
    places: Places, problem: Problem, device: Device, scopes: tuple[Any, ...], wanted: tuple[Any, ...]
) -> None:
    with scopes[0] if scopes else nullcontext():
        assert chosen(OP, problem, device) == wanted
    assert counters()["default"] == (wanted[2] == "default")


def test_an_op_may_put_an_implementation_before_the_others(places: Places) -> None:
    op = op_of("first", *OP.impls, first=lambda device, problem: "triton" if problem.k == 4096 else None)
    assert chosen(op, SMALL) == ("triton", 32, "default")
    assert chosen(op, Problem(torch.bfloat16, 4, 64)) == ("few", 16, "default")
    with prefer("few"):
        assert chosen(op, SMALL) == ("few", 16, "default")
    with prefer("sm90"):  # of other ops
        assert chosen(op, SMALL) == ("triton", 32, "default")


@pytest.mark.parametrize(
    ("arch", "reason"),
    [(80, "needs sm_90, this is sm_80"), (90, None), (100, "is written for sm_90, this is sm_100")],
)
def test_what_is_written_for_one_architecture(arch: int, reason: str | None) -> None:
    card = Device(kind="cuda", name="card", arch=arch)
    assert impl("sm90", written_for=90).refusal(card, LARGE) == reason


def test_a_refusal_names_every_reason(places: Places) -> None:
    old = Device(kind="cuda", name="V100", arch=70)
    with pytest.raises(Refused, match=r"(?s)few: needs sm_80, this is sm_70.*vendor: needs sm_80.*next: needs sm_100"):
        OP.choose(old, LARGE)
    with invariant(), pytest.raises(Refused, match="vendor: is not batch-invariant"):
        ONE.choose(H100, LARGE)


def test_scopes_nest_and_end() -> None:
    with prefer("few"), invariant(), strict(), prefer("triton"):
        assert scope() == Scope(preferred="triton", invariant=True, strict=True)
    assert scope() == Scope()


def test_a_name_that_no_op_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no op has an implementation called 'sm9O': did you mean sm90.*there are .*triton"):
        prefer("sm9O")
    with pytest.raises(ValueError, match=r"called '': there are "):
        prefer("")
    assert scope() == Scope()


# ---- with rows


def measure(places: Places, op: Op, *rows: tuple[Any, ...]) -> None:
    """Rows as (problem, implementation, BLOCK or None, us, invariant)."""
    places.measured(
        *(at(p, us, op=op.name, impl=name, config={"BLOCK": b} if b else {}, invariant=inv) for p, name, b, us, inv in rows)
    )


def test_a_row_decides_implementation_and_config(places: Places) -> None:
    measure(
        places, OP, (LARGE, "triton", 64, 9.0, False), (LARGE, "vendor", None, 10.0, False), (SMALL, "vendor", None, 5.0, False)
    )
    assert chosen(OP, LARGE) == ("triton", 64, "exact")
    assert chosen(OP, SMALL) == ("vendor", None, "exact"), "though another stands before it"
    assert chosen(OP, LARGE._replace(k=5000)) == ("triton", 64, "bucket")
    assert chosen(OP, LARGE._replace(k=50000)) == ("vendor", None, "default")
    assert {**counters(), "stale": 0} == {"exact": 2, "bucket": 1, "default": 1, "stale": 0, "ignored": 0}
    entry = OP.choose(H100, LARGE).entry
    assert entry is not None
    assert entry.us == 9.0


def test_a_row_counts_only_where_scope_and_refusals_let_it(places: Places) -> None:
    measure(
        places, OP,
        (LARGE, "few", 64, 1.0, False), (LARGE, "next", 64, 2.0, False), (LARGE, "vendor", None, 8.0, False),
        (LARGE, "triton", 16, 9.0, False), (LARGE, "triton", 64, 20.0, True), (SMALL, "vendor", None, 1.0, True),
    )  # fmt: skip
    assert chosen(OP, LARGE) == ("vendor", None, "exact"), "few and next refuse"
    with prefer("triton"):
        assert chosen(OP, LARGE) == ("triton", 16, "exact")
        assert chosen(OP, LARGE, CPU) == ("reference", None, "fixed")
    with invariant():
        assert chosen(OP, LARGE) == ("triton", 64, "exact")
        assert chosen(OP, SMALL) == ("triton", 32, "default"), "the vendor's library is not batch-invariant"


def test_a_problem_with_rows_in_it_keeps_its_default_in_the_invariant_scope(places: Places) -> None:
    measure(places, ROWS, (LARGE, "triton", 64, 1.0, True), (LARGE, "triton", 16, 1.0, False))
    assert chosen(ROWS, LARGE) == ("triton", 16, "exact")
    with invariant():
        assert chosen(ROWS, LARGE) == ("triton", 32, "fixed")


def test_strict_raises_where_nobody_measured(places: Places) -> None:
    measure(places, OP, (LARGE, "triton", 64, 9.0, False))
    measure(places, ONE, (LARGE, "vendor", None, 9.0, False))
    with strict():
        assert chosen(OP, LARGE) == ("triton", 64, "exact")
        near = LARGE._replace(k=5000)
        words = rf'the strict scope needs a measurement of .*"k":5000.* on {CARD}, .*run `tilewright tune test_choice`'
        with pytest.raises(NoRecord, match=words):
            OP.choose(H100, near)
        assert chosen(ONE, near) == ("vendor", None, "fixed"), "there is nothing to choose"
        assert chosen(OP, near, CPU) == ("reference", None, "fixed")
        with invariant():
            assert chosen(ROWS, near) == ("triton", 32, "fixed")
    assert chosen(OP, near) == ("triton", 64, "bucket")


# ---- a call


class OnCard:
    """As much of an argument as `run` and the stand-ins ask for."""

    def __init__(self, problem: Problem) -> None:
        self.dtype, self.m, self.k = problem

    def get_device(self) -> int:
        return 0


@pytest.fixture
def card(places: Places, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(op_module, "device_of", lambda index: H100)
    OP._choices.clear()
    return places


def test_a_choice_is_made_once_for_a_problem_a_scope_and_a_process(card: Places) -> None:
    measure(card, OP, (LARGE, "triton", 64, 9.0, False))
    assert OP.run(OnCard(LARGE)) == ("triton", {"BLOCK": 64})
    measure(card, OP, (LARGE, "vendor", None, 1.0, False))
    assert OP.run(OnCard(LARGE)) == ("triton", {"BLOCK": 64}), "a graph that was captured stays right"
    with prefer("vendor"):
        assert OP.run(OnCard(LARGE)) == ("vendor", {})
    with strict():
        assert OP.run(OnCard(LARGE)) == ("vendor", {}), "a scope of its own: a choice of its own"
    assert counters()["exact"] == 2, "with the vendor alone there was nothing to choose"
    assert len(OP._choices) == 3


def test_a_repeated_problem_costs_less_than_a_microsecond(card: Places) -> None:
    """What `run` does beside the summary of the arguments and the launch. It takes about 0.3 us; a busy machine gets 3."""
    x = OnCard(LARGE)
    OP.run(x)
    launch = OP._choices[LARGE, 0, scope()].impl.launch
    whole, parts = float("inf"), float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            OP.run(x)
        middle = time.perf_counter()
        for _ in range(1000):
            launch({}, x)
            OP.problem(x)
        end = time.perf_counter()
        whole, parts = min(whole, (middle - start) / 1000), min(parts, (end - middle) / 1000)
    assert whole - parts < 3e-6


# ---- the real ops


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_an_op_says_whether_its_problem_holds_the_rows(op: Op) -> None:
    """A batch cut to one row has the same problem, unless the op says otherwise."""
    for example in op.examples:
        args = example.make(Inputs())
        rows = args[0].shape[0]
        if args[0].dim() < 2 or rows < 2:
            continue
        alone = tuple(a[:1] if isinstance(a, Tensor) and a.dim() and a.shape[0] == rows else a for a in args)
        if op.problem(*alone) != op.problem(*args):
            assert op.rows_in_problem, f"{example.label}: {op.problem(*args)} against {op.problem(*alone)} for its first row"


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_every_real_problem_can_be_a_record(op: Op) -> None:
    for example in op.examples:
        assert problem_json(op.problem(*example.make(Inputs()))).startswith("{")


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_a_real_op_takes_a_rows_word(places: Places, op: Op) -> None:
    """Through the real spaces: the first config of the last implementation that takes an example."""
    problem = op.problem(*op.examples[0].make(Inputs()))
    able = [impl for impl in op.impls if impl.refusal(H100, problem) is None]
    last = able[-1]
    space = last.space
    config = next(iter(space.configs(H100, problem))) if space.axes else space.default(H100, problem)
    places.measured(at(problem, op=op.name, impl=last.name, config=dict(config)))
    choice = op.choose(H100, problem)
    assert choice == Choice(last, config, *(("exact", choice.entry) if len(able) > 1 or last.space.axes else ()))
    assert lookup.counters()["ignored"] == 0
