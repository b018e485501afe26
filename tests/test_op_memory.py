"""Where an op launches, and what it gives its launchers: memory of the card that is current then."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_op import H100, LARGE, ONE, OnCard
from tests.test_op import card as card  # a fixture
from tests.test_op import places as places  # a fixture
from tests.tune.test_lookup import Places
from tilewright import op as op_module
from tilewright import ops
from tilewright.hw import here
from tilewright.hw.roofline import Cost
from tilewright.op import Impl, Inputs, Op


class Current:
    """The current card, and torch's scope that makes another one so."""

    def __init__(self, index: int, monkeypatch: pytest.MonkeyPatch):
        self.index, self.entered = index, list[int]()
        monkeypatch.setattr(here, "_current_card", lambda: self.index)
        monkeypatch.setattr(torch.cuda, "device", self.other)

    @contextmanager
    def other(self, index: int) -> Iterator[None]:
        before, self.index = self.index, index
        self.entered.append(index)
        yield
        self.index = before


@pytest.mark.parametrize("way", ["op", "a choice that was made before"])
def test_a_launch_is_on_the_card_of_its_tensors(way: str, card: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current card, which may not be theirs."""
    found: list[int] = []
    on_it = Impl(name="vendor", launch=lambda config, x: found.append(current.index))
    monkeypatch.setattr(ONE, "impls", (on_it,))
    ONE.forget()
    current, x = Current(3, monkeypatch), OnCard(LARGE)
    for index in (3, 3, 0):
        current.index = index
        ONE.run(x) if way == "op" else op_module.launch(on_it, {}, (x,))
        assert current.index == index
    ONE.forget()
    assert (found, current.entered) == ([0] * 3, [0, 0]), "nothing is entered for the current card"


# ---- tensors without memory of their own

PLAIN = (Tensor, torch.nn.Parameter)


def memory(x: Tensor, more: Tensor) -> Tensor:
    """The reference of an op whose implementation reads addresses, as launchers do."""
    return x + more


def taken(x: Tensor, more: Tensor) -> Tensor:
    assert type(x) in PLAIN, type(x)
    assert type(more) in PLAIN, type(more)
    assert x.data_ptr(), "RuntimeError where there is no storage"
    assert more.data_ptr()
    return x + more


READS = Op(
    name="test_reads_memory", reference=memory, problem=lambda x, more: None, cost=lambda *args: Cost(0, 0), examples=(),
    impls=(Impl(name="triton", launch=lambda config, *args: taken(*args)),),
)  # fmt: skip


class Doubled(Tensor):
    """A subclass that stands for twice what it holds, and has no address of its own."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Doubled":
        made: Any = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[2 * a.held if isinstance(a, Doubled) else a for a in args], **(kwargs or {}))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def batched_gradients(x: Tensor, more: Tensor) -> Tensor:
    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return READS(grads[0], more)

    leaf = torch.zeros(x.shape[1:], requires_grad=True)
    y: Any = Gradient.apply(leaf)
    return torch.autograd.grad(y, leaf, x, is_grads_batched=True)[0]


@pytest.mark.parametrize(
    ("call", "want"),
    [
        (lambda x, more: torch.func.vmap(READS)(x, more), 2),
        (lambda x, more: torch.func.vmap(READS, (None, 0))(x[0], more), 2),
        (lambda x, more: torch.func.vmap(torch.func.vmap(READS))(x, more), 2),
        (lambda x, more: torch.func.functionalize(READS)(x, more), 2),
        (lambda x, more: batched_gradients(x, more[0]), 2),
        (lambda x, more: READS(Doubled(x), more), 3),
        (lambda x, more: READS(x, Doubled(more)), 3),
    ],
    ids=["vmap", "vmap of the second", "vmap twice", "functionalize", "batched gradients", "subclass", "subclass second"],
)
def test_addresses_are_those_of_real_tensors(call: Any, want: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers are used here as on a card, whose tensors look like any other inside of transforms."""
    monkeypatch.setattr(op_module, "_CPU_IS_CPU", False)
    monkeypatch.setattr(op_module, "device_of", lambda index: H100)
    READS.forget()
    got = call(ones(3, 4), ones(3, 4))
    assert torch.equal(got, torch.full((3, 4), float(want)))


# ---- dtypes


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv_transpose2d", "matmul"])
def test_autocast_changes_no_dtype(name: str, compiled: bool) -> None:
    """An op gives what it promises, forward and backward, whichever implementation is torch's own."""
    inputs = Inputs()
    x = inputs.randn(2, 4, 8, 8).requires_grad_()
    shapes = {"linear": (5, 8), "conv2d": (5, 4, 3, 3), "conv_transpose2d": (4, 5, 3, 3), "matmul": (8, 5)}
    weight = inputs.randn(*shapes[name]).requires_grad_(name != "matmul")
    plain = getattr(ops, name)
    call = torch.compile(plain, backend="aot_eager", fullgraph=True) if compiled else plain
    given = (x, weight) if name != "matmul" else (x.detach(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(*given)
        if y.requires_grad:
            y.square().sum().backward()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, plain(*given))
    for t in given:
        assert t.grad is None or t.grad.dtype == torch.float32
