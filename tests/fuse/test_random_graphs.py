"""Random programs through both back ends, and the tools that draw, judge and minimise them (random_graphs.py).

A program that fails is printed with the command that shows it again.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fuse import random_graphs
from tests.fuse.random_graphs import BAD, Verdict, draw, judge, minimise
from tests.fuse.random_program import Input, Program, error

SEED, COUNT, PARTS, LONG = 20_000, 185, 5, 2200


def _failures(seeds: range, backend: str, sizes_every: int) -> list[str]:
    """What fails, each with its command."""
    found = []
    for seed in seeds:
        verdict = judge(draw(seed), seed, backend, sizes=seed % sizes_every == 0)
        if verdict.kind in BAD:
            again = (
                f"python -m tests.fuse.random_graphs --count 1 --seed {seed} --backend {backend} --sizes-every {sizes_every}"
            )
            found.append(f"{again}\n    {verdict.kind}: {verdict.words}")
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_through_optimize(part: int) -> None:
    first = SEED + part * COUNT // PARTS
    found = _failures(range(first, first + COUNT // PARTS), "own", sizes_every=5)
    assert not found, "\n".join(found)


def test_programs_through_the_pass() -> None:
    found = _failures(range(SEED, SEED + 15), "pass", sizes_every=5)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["own", "pass"])
def test_many_programs(backend: str) -> None:
    found = _failures(range(SEED + COUNT, SEED + COUNT + LONG), backend, sizes_every=1)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_programs_through_inductor() -> None:
    """All the way to compiled code: seconds each."""
    found = _failures(range(SEED, SEED + 40), "inductor", sizes_every=4)
    assert not found, "\n".join(found)


# ---- the tools


def test_a_seed_gives_one_program() -> None:
    assert draw(7).source() == draw(7).source() != draw(8).source()


def test_what_is_drawn() -> None:
    """Every family comes up in a few programs."""
    text = "\n".join(draw(seed).source() for seed in range(120))
    families = (
        "nn.Linear(", "nn.Conv2d(", "nn.ConvTranspose", "groups=2", 'padding="same"', "nn.Embedding(", "nn.BatchNorm",
        "nn.LayerNorm(", "nn.RMSNorm(", "nn.GroupNorm(", "nn.InstanceNorm", "scaled_dot_product_attention", "attn_mask=",
        "is_causal=True", "enable_gqa", "scale=-0.5", ".softmax(", ".chunk(", ".permute(", ".expand(", "torch.cat(",
        "torch.stack(", "alpha=", "inplace=True", "_(", "max_pool", ".exp()", "::2", "return {", "return (",
    )  # fmt: skip
    assert not [family for family in families if family not in text]


PROGRAM = Program(
    (Input("a0", ((2, 4), (3, 4))),),
    {"m0": "nn.Linear(4, 4)", "m1": "nn.Parameter(torch.randn(4))"},
    (("v0", "self.m0(a0)"), ("v1", "F.relu(v0)"), ("v2", "v1 * self.m1"), ("v3", "v2 + v0"), ("v4", "torch.cat([v3, v3], 1)")),
    "(v4, v1)",
)


def _backend(make: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., Any]:
    return lambda module, given: (make(module), "")


def _raises(*given: Tensor) -> Tensor:
    raise ValueError("nothing here")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda m: m, "right"),
        (lambda m: lambda x: tuple(y * 1.0001 for y in m(x)), "wrong"),
        (lambda m: lambda x: tuple(y + 1e-3 * (torch.arange(y.numel()) == 1).view_as(y) for y in m(x)), "wrong"),
        (lambda m: lambda x: list(m(x)), "wrong"),
        (lambda m: lambda x: tuple(y.double() for y in m(x)), "wrong"),
        (lambda m: lambda x: tuple(y[:2] for y in m(x)), "wrong"),
        (lambda m: lambda x: tuple(y.clone().fill_(torch.nan) for y in m(x)), "wrong"),
        (lambda m: _raises, "raised"),
    ],
)
def test_verdicts(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], kind: str) -> None:
    monkeypatch.setitem(random_graphs.BACKENDS, "own", _backend(make))
    assert judge(PROGRAM, 0, "own").kind == kind


def test_another_batch_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that is right for the example's batch alone."""
    wrong = _backend(lambda m: lambda x: tuple(y * (1 if len(x) == 2 else 2) for y in m(x)))
    monkeypatch.setitem(random_graphs.BACKENDS, "own", wrong)
    assert judge(PROGRAM, 0, "own").words.startswith("other sizes")
    assert judge(PROGRAM, 0, "own", sizes=False) == Verdict("right")


def test_minimising_keeps_what_fails() -> None:
    small = minimise(PROGRAM, 0, lambda p: "F.relu" in p.source())
    assert [text for _, text in small.steps] == [f"F.relu({small.inputs[0].name})"]
    assert not small.layers


def test_an_exact_zero_is_compared() -> None:
    zeros = torch.zeros(2, dtype=torch.float64)
    assert error(zeros.float(), zeros).rms == 0
    assert error(zeros.float() + 1e-9, zeros).rms > 1
