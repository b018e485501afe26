"""Launches that are made again: the same arguments with other addresses, and nothing kept alive."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import ops
from tilewright.hw import env, here
from tilewright.kernels.elementwise.activation import activation_op
from tilewright.kernels.launch import replay as of_prepared
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import Held, Prepared, call_key, pointer_kind

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: what is launched again has run on one")
KERNEL = SimpleNamespace(arg_names=["x_desc", "x_ptr", "bias_ptr", "y_ptr", "N", "BLOCK"])


class Compiled:
    """What Triton gives for a launch, as far as it is used: indexing by a grid gives a function of all arguments."""

    def __init__(self) -> None:
        self.grid: Any = None
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self.grid = grid
        return lambda *arguments: self.launches.append(arguments)


def described(x: Tensor) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    box = [8, 32]
    layout: Any = gl.NVMMASharedLayout.get_default_for(box, gl.float16)
    return TensorDescriptor(x[1:], list(x[1:].shape), list(x.stride()), box, layout)


@pytest.mark.skipif(env.interpreting(), reason="Gluon's descriptors are not for the interpreter")
def test_other_memory_same_launch() -> None:
    compiled: Any = Compiled()
    first = [torch.zeros(16, 64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16)]
    x, y = first
    arguments = (described(x), x[2:], None, y, 7)
    prepared = Prepared(
        KERNEL, compiled, (5, 2), arguments, {"BLOCK": 32}, (0, 0, None, 1), [x.data_ptr(), y.data_ptr()]
    )  # fmt: skip
    kept = weakref.ref(x)
    shape, strides = list(arguments[0].shape), list(arguments[0].strides)
    del x, y, first, arguments
    gc.collect()
    assert kept() is None
    for start in (4096, 8192):
        prepared((start, 512))
    assert compiled.grid == (5, 2, 1)
    for start, (descriptor, *rest) in zip((4096, 8192), compiled.launches, strict=True):
        assert descriptor.base.data_ptr() == start + 128
        assert (list(descriptor.shape), list(descriptor.strides), descriptor.padding) == (shape, strides, "zero")
        assert rest == [start + 256, None, 512, 7, 32]


@needs_gpu
def test_launched_again() -> None:
    """Through an op whose launcher has nothing else: numbers that are equal but of another type are another launch."""
    for i, alpha in enumerate((1, 1.0, 1, 2.5, 1.0)):
        x = torch.randn(999 + i % 2, generator=torch.Generator().manual_seed(i)).cuda()
        torch.testing.assert_close(activation_op(x, "elu", alpha), torch.nn.functional.elu(x, alpha))


def test_the_oldest_go() -> None:
    held = Held(most=2)
    for key in "abc":
        held.keep(key, key.upper())
    assert [held.get(key) for key in "abc"] == [None, "B", "C"]


def test_threads_keep_at_once() -> None:
    """Backward passes run in threads of their own."""
    held, before = Held(most=2), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(lambda i=i: [held.keep((i, n), n) for n in range(30000)]) for i in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(before)


def test_kept_again_pushes_nothing_out() -> None:
    held = Held(most=2)
    for key in "abb":
        held.keep(key, key)
    assert held.get("a") == "a"


class Resident(Tensor):
    """A CPU's tensor that says it is a card's."""

    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]


@pytest.mark.skipif(env.interpreting(), reason="the interpreter makes no launch again")
def test_factors_are_no_part_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cumulative average has another one in every step."""
    monkeypatch.setattr(of_prepared, "_LAUNCHED", Held())
    again: Any = Compiled()
    x = torch.zeros(16).as_subclass(Resident)
    kernel: Any = type("Kernel", (), {"arg_names": ["x_ptr", "n", "factor", "BLOCK"]})()
    direct: list[Any] = []
    monkeypatch.setattr(
        type(kernel), "__getitem__", lambda self, grid: lambda *a, **k: direct.append(a) or again, raising=False
    )
    for step in range(1, 5):
        prepared = of_prepared.launch(kernel, (3,), (x,), (16,), {"BLOCK": 8}, (1.0 / step,))
    assert prepared is not None
    prepared((x.data_ptr(), 0.75))
    assert len(of_prepared._LAUNCHED._kept) == 1
    assert direct == [(x, 16, 1.0)]
    assert again.launches == [(x.data_ptr(), 16, factor, 8) for factor in (0.5, 1 / 3, 0.25, 0.75)]
    of_prepared.launch(kernel, (3,), (x,), (17,), {"BLOCK": 8}, (1.0,))
    assert len(direct) == 2, "another number is another launch"


class OnCard:
    """As much of a tensor of card 0 as a key is made of; no address where there is none."""

    is_cuda, shape, dtype = True, torch.Size([8]), torch.float16

    def __init__(self, start: int | None = 4096):
        self.start = start

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        if self.start is None:
            raise AssertionError("the address of a tensor that has none was asked for")
        return self.start


class Another(OnCard):
    """A subclass."""


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(of_prepared, "_PLAIN", (OnCard,))
    monkeypatch.setattr(here, "_current_card", lambda: 0)
    return OnCard


def test_a_key_is_of_memory_on_the_current_card(on_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, no_memory = on_card(), on_card(None)
    key = call_key(("op",), x, None, on_card(8192))
    assert key is not None
    assert key == call_key(("op",), on_card(160), None, on_card(16)), "the memory alone differs"
    assert call_key(("op",), x, on_card(8)) is None, "unaligned"
    assert call_key((["a list"],), x) is None
    other: Any = Another(None)
    assert call_key(("op",), other, x) is None
    assert call_key(("op",), x, other) is None, "no subclass, whichever operand"
    assert torch.func.vmap(lambda t: t if call_key(("op",), no_memory) is None else -t)(torch.ones(2)).eq(1).all()
    assert torch.func.functionalize(lambda t: t if call_key(("op",), no_memory) is None else -t)(torch.ones(2)).eq(1).all()
    with FakeTensorMode():
        assert call_key(("op",), no_memory) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert call_key(("op",), x) is None, "what was chosen may be torch's own"
    monkeypatch.setattr(here, "_current_card", lambda: 1)
    assert call_key(("op",), x) is None, "on another card: Triton would launch on the current one"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
def test_tensors_of_another_card() -> None:
    """Calls, the second and third of which could be made again, on the card that is not current."""
    with torch.cuda.device(0):
        for current in (1, 0, 0, 1):
            torch.cuda.set_device(current)
            x, weight = (
                torch.randn(*shape, device="cuda:1", dtype=torch.float16) for shape in ((4, 64, 14, 14), (64, 64, 3, 3))
            )
            x, weight = (t.contiguous(memory_format=torch.channels_last).requires_grad_() for t in (x, weight))
            scale, shift = (torch.randn(64, device="cuda:1", requires_grad=True) for _ in range(2))
            twins = [t.detach().double().requires_grad_() for t in (x, weight, scale, shift)]
            y = ops.batch_norm(ops.conv2d(x, weight, None, 1, 1), None, None, scale, shift, True, activation="relu")
            want = F.batch_norm(F.conv2d(twins[0], twins[1], None, 1, 1), None, None, twins[2], twins[3], True).relu()
            y.sum().backward()
            want.sum().backward()
            for got, right in ((y, want), *((t.grad, u.grad) for t, u in zip((weight, scale, shift), twins[1:], strict=True))):
                assert got is not None
                assert right is not None
                assert float((got.double() - right).norm() / right.norm()) < 2e-2


def test_kinds_of_pointers() -> None:
    x = torch.zeros(16, dtype=torch.float16)
    assert pointer_kind(None) is None
    assert pointer_kind(x) != pointer_kind(x[1:]) == pointer_kind(x[2:])
    assert pointer_kind(x) == pointer_kind(x[8:]) != pointer_kind(x.view(torch.bfloat16))


# ---- plans of calls


def test_a_plan_launches_on_its_operands_and_memory() -> None:
    """Launches that share memory see one allocation; joined plans have memory of their own."""
    seen: list[tuple[str, list[int]]] = []
    made: list[Tensor] = []

    def memory(device: torch.device) -> tuple[Tensor | None, ...]:
        made.append(torch.empty(4, device=device))
        return made[-1], None

    def launch(name: str) -> Any:
        return lambda starts: seen.append((name, list(starts)))

    x, y = torch.zeros(3), torch.zeros(3)
    first, second = Plan(launch("a"), launch("b"), memory=memory), Plan(launch("c"))
    Plan.joined([first, second, first]).run(x, None, y)
    plain = [x.data_ptr(), 0, y.data_ptr()]
    assert [name for name, _ in seen] == ["a", "b", "c", "a", "b"]
    assert len(made) == 2
    for (_, starts), scratch in zip(seen, (made[0], made[0], None, made[1], made[1]), strict=True):
        assert starts == (plain if scratch is None else [*plain, scratch.data_ptr(), 0])


def test_a_call_is_planned_once() -> None:
    """By its key; what no card has run is not kept."""
    ran: list[Any] = []

    class OnACard(Tensor):
        is_cuda = True  # pyright: ignore[reportAssignmentType]

    def first(config: Any, y: Tensor, x: Tensor, scale: float) -> Plan:
        ran.append(("first", scale))
        launch: Any = lambda starts: ran.append(("again", scale, starts))  # noqa: E731
        return Plan(launch)

    planned = Planned(lambda config, x, scale: (x.shape, scale, *config.values()), first)
    x, y = torch.zeros(3), torch.zeros(3)
    for _ in range(2):
        planned.fill({"BLOCK": 1}, y, (x, 2.0), (x, y))
    assert ran == [("first", 2.0)] * 2
    assert planned.plan({"BLOCK": 1}, x, 2.0) is None
    here = x.as_subclass(OnACard)
    for scale, config in ((2.0, {"BLOCK": 1}), (2.0, {"BLOCK": 1}), (3.0, {"BLOCK": 1}), (2.0, {"BLOCK": 2})):
        planned.fill(config, y, (here, scale), (here, y))
    assert [each[0] for each in ran[2:]] == ["first", "again", "first", "first"]
    assert ran[3] == ("again", 2.0, [x.data_ptr(), y.data_ptr()])
    assert planned.plan({"BLOCK": 1}, here, 2.0) is not None
