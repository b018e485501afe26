"""Every class of docs/torch_nn.md against torch.nn: random configurations, values, gradients, state dicts, refusals."""

import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.torch_table import PAGE, ROWS, TORCH, Drawn, Row, page, parameters
from tilewright import nn

CASES = [pytest.param(name, seed, id=f"{name}-{seed}") for name in ROWS for seed in range(4)]


def drawn(name: str, seed: int) -> Drawn:
    return ROWS[name].draw(random.Random(f"{name} {seed}"))


def run(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What comes out, and the gradients of a weighted sum of it, of the parameters and of the first input if it has one."""
    module.requires_grad_()
    first = inputs[0].detach().clone(memory_format=torch.preserve_format)
    leaves = dict(module.named_parameters())
    if first.is_floating_point():
        leaves["the input"] = first.requires_grad_()
    found = module(first, *inputs[1:])
    found = list(found) if isinstance(found, tuple) else [found]
    weight = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad(found[0], list(leaves.values()), weight) if leaves else ()
    return found, dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_equals_torch(name: str, seed: int) -> None:
    options, inputs = drawn(name, seed)
    torch.manual_seed(seed)
    theirs = getattr(torch.nn, name)(**options).double()
    ours = getattr(nn, name)(**options).double()
    ours.load_state_dict(theirs.state_dict())
    for training in (True, False):
        theirs.train(training)
        ours.train(training)
        (want, want_grads), (got, got_grads) = run(theirs, inputs), run(ours, inputs)
        for g, w in zip(got, want, strict=True):
            # Sizes of bags are counted in float32.
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)
        assert got_grads.keys() == want_grads.keys()
        for leaf, w in want_grads.items():
            torch.testing.assert_close(got_grads[leaf], w, rtol=1e-6, atol=1e-6, msg=lambda m, leaf=leaf: f"{leaf}: {m}")
    for buffer, w in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[buffer], w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "row"), ROWS.items(), ids=ROWS)
def test_every_argument_is_supported_or_refused(name: str, row: Row) -> None:
    ours, theirs = inspect.signature(getattr(nn, name).__init__).parameters, parameters(name)
    assert [argument for argument in theirs if argument not in ours] == [], "an argument of torch.nn is not known at all"
    for refused in row.refused:
        with pytest.raises(ValueError, match=next(iter(refused))):
            getattr(nn, name)(**row.needed, **refused)


@pytest.mark.parametrize("home", [nn, torch.nn])
def test_padding_that_no_stride_has_is_refused_when_it_is_made(home: Any) -> None:
    with pytest.raises(ValueError, match="padding='same'"):
        home.Conv2d(4, 4, 3, stride=(1, 2), padding="same")


@pytest.mark.parametrize("name", ROWS)
def test_initialised_as_torch(name: str) -> None:
    """The same names, shapes and spread of parameters, made where asked."""
    options, _ = drawn(name, 0)
    theirs = getattr(torch.nn, name)(**options)
    if not list(theirs.parameters()):
        return
    ours = getattr(nn, name)(**options)
    if not next(ours.parameters()).requires_grad:
        ours.reset_parameters()
    for (key, w), (our_key, g) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert (key, w.shape, w.dtype) == (our_key, g.shape, g.dtype)
        assert float(g.detach().abs().max()) <= 4 * float(w.detach().abs().max())
    placed = getattr(nn, name)(**options, device="meta", dtype=torch.bfloat16)
    assert all((p.device.type, p.dtype) == ("meta", torch.bfloat16) for p in placed.parameters())


def test_the_page_is_what_the_table_says() -> None:
    if f"against torch.nn {TORCH}," not in PAGE.read_text():
        pytest.skip(f"the page is written with another torch than {TORCH}")
    assert PAGE.read_text() == page(), "stale: python -m tests.nn.torch_table"
