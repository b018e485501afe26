"""Every op can be called from dimensions, and on meta tensors nothing is allocated."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import flat
from tilewright.op import Inputs, Op
from tilewright.ops import ALL

SMALL = {"M": 3, "N": 32, "K": 32, "T": 5, "B": 2, "KV": 40, "H": 4, "G": 2, "D": 16, "C": 6, "O": 10, "X": 9}


def small(op: Op) -> dict[str, int]:
    assert op.make is not None, f"{op.name} takes no dimensions"
    keywords = inspect.signature(op.make).parameters
    return {name: value for name, value in SMALL.items() if name in keywords}


def tensors(args: Any) -> list[Tensor]:
    """Those among the arguments, and in lists among them."""
    found = [part for a in args for part in (a if isinstance(a, list) else [a])]
    return [a for a in found if isinstance(a, Tensor)]


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_arguments_fit_the_op(op: Op) -> None:
    make: Any = op.make
    args = make(Inputs(seed=1), **small(op))
    result = flat(op.reference(*args))
    assert all(bool(t.float().isfinite().all()) for t in result if t.is_floating_point())
    numbers = [a for a in tensors(args) if a.is_floating_point() or a.dtype == torch.int8]
    numbers = numbers or tensors(args)  # of an op of integers, all of them
    data = [a for a in numbers if a.dim() > 1] or numbers
    assert data
    assert all(bool(a.any()) for a in data), "zeros are no data"
    assert op.cost(*args).bytes > 0


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_meta_arguments_look_the_same(op: Op) -> None:
    make: Any = op.make
    real, meta = make(Inputs(seed=1), **small(op)), make(Inputs("meta"), **small(op))
    for a, b in zip(tensors(real), tensors(meta), strict=True):
        assert (a.shape, a.stride(), a.dtype, a.storage_offset()) == (b.shape, b.stride(), b.dtype, b.storage_offset())
        assert b.is_meta
    for a, b in zip(real, meta, strict=True):
        if not tensors([a]):
            assert a == b


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_layouts(layout: str) -> None:
    make: Any = next(op for op in ALL if op.name == "linear").make
    x, weight, *_ = make(Inputs("meta"), M=8, N=6, K=4, layout=layout)
    assert (x.stride(), weight.stride()) == {
        "nt": ((4, 1), (4, 1)),
        "nn": ((4, 1), (1, 6)),
        "tn": ((1, 8), (1, 6)),
    }[layout]
    with pytest.raises(ValueError, match="wanted nt, nn or tn"):
        make(Inputs("meta"), M=8, N=6, K=4, layout="tt")


def test_more_queries_than_tokens() -> None:
    make: Any = next(op for op in ALL if op.name == "paged_attention").make
    with pytest.raises(ValueError, match="wanted 1 <= Q <= KV"):
        make(Inputs("meta"), B=1, KV=4, Q=5)


def test_drawn_here_is_random_too() -> None:
    x, y = (Inputs("cpu", seed=seed, here=True).randn(64) for seed in (0, 1))
    assert x.std() > 0.5
    assert not torch.equal(x, y)
