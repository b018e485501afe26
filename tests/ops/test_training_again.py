"""Layers in training that were called before: the same gradients from the short way on any memory, none of which is kept."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import nn, ops
from tilewright.kernels.conv.checks import window_of
from tilewright.kernels.conv.cudnn import cudnn_choosing
from tilewright.kernels.conv.transpose.conv_transpose import conv_transpose_op
from tilewright.kernels.conv.weight_gradient.conv_weight_gradient import conv_weight_gradient_op
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.launch.replay import Held
from tilewright.kernels.norm.channel.batch_norm_backward import batch_norm_backward_op
from tilewright.kernels.norm.channel.batch_statistics import batch_statistics_op
from tilewright.op import Choice, Inputs, Op, scope
from tilewright.ops import channel_norms, conv_training, linear_gradient
from tilewright.ops.batch_norm_again import BatchNormAgain
from tilewright.ops.channel_norms import _batch_places

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: what is launched again has run on one")
LAST = torch.channels_last


def by_library(op: Op) -> Choice:
    """What a card would choose where cuDNN is the fastest."""
    return Choice(next(impl for impl in op.impls if impl.library), {})


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, False)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_one_call_for_all_gradients(needs: tuple[bool, bool, bool], groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's own call makes them, here on a CPU: those of torch's autograd, by the ops first, then by the call."""
    for op in (conv_transpose_op, conv_weight_gradient_op):
        chosen = by_library(op)
        monkeypatch.setattr(op, "chosen", lambda *args, found=chosen: found, raising=False)
    calls: list[Any] = []
    backward = conv_training._BACKWARD
    monkeypatch.setattr(conv_training, "_BACKWARD", lambda *args: calls.append(args[-1]) or backward(*args))

    def tensors(seed: int) -> list[Tensor]:
        inputs = Inputs(seed=seed)
        x, weight, bias = (inputs.randn(*s, dtype=torch.float64) for s in ((2, 4, 7, 6), (6, 4 // groups, 3, 3), (6,)))
        return [t.requires_grad_(n) for t, n in zip((x.contiguous(memory_format=LAST), weight, bias), needs, strict=True)]

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, 2, 1, 1, groups)

    x, weight, _ = tensors(0)
    call = conv_training.ConvTraining(forward, window_of("conv2d", x, weight, 2, 1, 1), groups)
    for seed in range(3):
        given, twin = tensors(seed), tensors(seed)
        y, want = call(given[0], given[1], given[2], None), forward(twin[0], twin[1], twin[2], None)
        dy = Inputs(seed=9).randn(*y.shape, dtype=torch.float64)
        torch.testing.assert_close(y, want)
        y.backward(dy)
        want.backward(dy)
        for mine, theirs in zip(given, twin, strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)
    assert calls == ([list(needs)] * 2 if needs[1] else []), "without a gradient of the weight the ops do it"


def test_new_choices_of_gradients_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a gradient's op forgot what it had chosen, a call that is made again asks it anew."""
    asked: list[str] = []
    for op in (conv_transpose_op, conv_weight_gradient_op):
        chosen = by_library(op)
        monkeypatch.setattr(op, "chosen", lambda *args, op=op, found=chosen: asked.append(op.name) or found, raising=False)
    x, weight = (Inputs().randn(*s, dtype=torch.float64).requires_grad_() for s in ((1, 4, 5, 5), (6, 4, 1, 1)))
    call = conv_training.ConvTraining(lambda x, w, *_: F.conv2d(x, w), window_of("conv2d", x, weight, 1, 0, 1), 1)
    for _ in range(2):
        call(x, weight, None, None).sum().backward()
    monkeypatch.setattr(conv_transpose_op, "generation", conv_transpose_op.generation + 1)
    call(x, weight, None, None).sum().backward()
    assert asked == [conv_weight_gradient_op.name, conv_transpose_op.name] * 2


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "conv again", "linear", "linear again"])
def test_results_may_be_written_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's may, and as a relu with inplace=True does; and a gradient of a gradient is refused, not wrong."""
    inputs = Inputs()
    layout = torch.contiguous_format if "linear" in name else LAST
    x = inputs.randn(2, 4, 4, 4).contiguous(memory_format=layout).requires_grad_()
    weight, rows = (inputs.randn(*shape).requires_grad_() for shape in ((4, 4, 1, 1), (4, 4)))

    def product(x: Tensor, w: Tensor, *_: Any) -> Tensor:
        return (x.detach().permute(0, 2, 3, 1) @ w.detach().flatten(1).mT).permute(0, 3, 1, 2)

    again = linear_gradient._Again(linear_op._reference)
    again.of_x = again.of_weight = linear_op._reference
    training = conv_training.ConvTraining(product, window_of("conv2d", x, weight, 1, 0, 1), 1)
    monkeypatch.setattr(training, "_learn", lambda *args: False)  # nothing is chosen on a CPU
    call, w, want = {
        "conv2d": (ops.conv2d, weight, F.conv2d),
        "conv_transpose2d": (ops.conv_transpose2d, weight, F.conv_transpose2d),
        "conv again": (lambda x, w: training(x, w, None, None), weight, F.conv2d),
        "linear": (ops.linear, rows, F.linear),
        "linear again": (lambda x, w: linear_gradient._ProductAgain.apply(x, w, None, again), rows, F.linear),
    }[name]
    y: Any = call(x, w)
    torch.relu_(y).square().sum().backward()
    twin = [t.detach().requires_grad_() for t in (x, w)]
    want(*twin).relu().square().sum().backward()
    for mine, theirs in zip((x, w), twin, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    y = call(x, w)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


def relu_norm(x: Tensor, *_: Any) -> Tensor:
    return F.batch_norm(x, None, None, training=True).relu()


MANY = ("conv2d", "conv again", "linear", "linear again", "batch_norm", "batch_norm again", "group_norm")


@pytest.mark.parametrize("name", MANY)
def test_gradients_that_stand_for_many(name: str) -> None:
    """As a Jacobian asks for: they look like any other tensor, and have no address."""
    inputs = Inputs()
    x = inputs.randn(2, 4, 4, 4).contiguous(memory_format=LAST).requires_grad_()
    weight, rows, bias = (inputs.randn(*shape).requires_grad_() for shape in ((5, 4, 1, 1), (5, 4), (5,)))
    training = conv_training.ConvTraining(lambda x, w, b, _: F.conv2d(x, w, b), window_of("conv2d", x, weight, 1, 0, 1), 1)
    product = linear_gradient._Again(linear_op._reference)
    norm: Any = object.__new__(BatchNormAgain)
    norm._scope, norm._backward, norm._eps, norm.relu = scope(), None, 1e-5, True
    norm._places = lambda t: _batch_places(t, True)
    norm.forward = lambda x, *rest: (relu_norm(x), x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0))
    call, given, want = {
        "conv2d": (ops.conv2d, (x, weight, bias), F.conv2d),
        "conv again": (lambda x, w, b: training(x, w, b, None), (x, weight, bias), F.conv2d),
        "linear": (ops.linear, (x, rows, bias), F.linear),
        "linear again": (
            lambda x, w, b: linear_gradient._ProductAgain.apply(x.contiguous(), w, b, product), (x, rows, bias), F.linear,
        ),
        "batch_norm": (lambda x: ops.batch_norm(x, None, None, training=True, activation="relu"), (x,), relu_norm),
        "batch_norm again": (lambda x: norm(x, None, None, None, None, None, 0.1), (x,), relu_norm),
        "group_norm": (lambda x: ops.group_norm(x, 2), (x,), lambda x: F.group_norm(x, 2)),
    }[name]  # fmt: skip
    y: Any = call(*given)
    dy = inputs.randn(3, *y.shape)
    found = torch.autograd.grad(y, given, dy, is_grads_batched=True)
    each = [torch.autograd.grad(want(*given), given, one) for one in dy]
    for got, right in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(right), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("again", ["conv", "linear", "batch norm"])
def test_saved_tensors_that_come_back_otherwise(again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `save_on_cpu(pin_memory=True)` brings them: dense, but in torch's own order. Launches count on the forward pass's."""
    inputs = Inputs()
    x = inputs.randn(2, 4, 3, 5).contiguous(memory_format=LAST).requires_grad_()
    weight, rows = inputs.randn(6, 4, 1, 1).contiguous(memory_format=LAST), inputs.randn(5, 6).t()
    seen: list[tuple[int, ...]] = []

    def gradients(self: Any, dy: Tensor, *given: Any) -> list[Any]:
        seen.extend(t.stride() for t in given[:2])
        return [given[0], None, None, None]

    class Norm(BatchNormAgain):
        def __init__(self) -> None:
            self.relu = True

        def forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
            return relu_norm(x), x.mean((0, 2, 3)), x.var((0, 2, 3))

        backward = gradients  # pyright: ignore[reportAssignmentType]

    training = conv_training.ConvTraining(lambda x, w, b, _: F.conv2d(x, w), window_of("conv2d", x, weight, 1, 0, 1), 1)
    product = linear_gradient._Again(linear_op._reference)
    for cls in (conv_training.ConvTraining, linear_gradient._Again):
        monkeypatch.setattr(cls, "backward", lambda self, *a: gradients(self, *a)[:3])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
        y: Any = {
            "conv": lambda: training(x, weight, None, None),
            "linear": lambda: linear_gradient._ProductAgain.apply(x.contiguous(), rows, None, product),
            "batch norm": lambda: Norm()(x, None, None, None, None, None, 0.1),
        }[again]()
        y.sum().backward()
    expected = {"conv": [x, weight], "linear": [x.contiguous(), rows], "batch norm": [x, x]}[again]
    assert seen == [t.stride() for t in expected]


def test_the_wish_for_the_same_bits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for wanted in (False, True):
        with cudnn_choosing(deterministic=wanted):
            assert torch.backends.cudnn.deterministic
            assert torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.benchmark


def no_summary(*args: Any) -> None:
    raise AssertionError("the call was summarised again")


def image(seed: int, *shape: int) -> Tensor:
    return Inputs("cuda", seed).randn(*shape, dtype=torch.float16).contiguous(memory_format=LAST)


def close(got: Tensor | None, want: Tensor | None) -> None:
    assert got is not None
    assert want is not None
    assert float((got.double() - want).norm() / want.norm()) < 2e-3


@needs_gpu
@pytest.mark.parametrize(("activation", "added"), [("none", False), ("relu", False), ("relu", True), ("none", True)])
def test_batch_norm(activation: str, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a call again is made by the first one, and that of the backward pass by the second one's."""
    kept = None
    for i in range(5):
        x, residual, dy = (image(seed, 4, 24, 7, 5) for seed in (i, i + 7, i + 13))
        momentum = 1 / (i + 1)
        w, b, m, v = (Inputs("cuda", i + s).randn(24).square() + 0.5 for s in range(4))
        twin = [t.double().requires_grad_() for t in (x, w, b, residual)]
        mean, variance = m.double(), v.double()
        mine = [t.requires_grad_() for t in (x, w, b, residual)]
        y = ops.batch_norm(x, m, v, w, b, True, momentum, activation=activation, residual=residual if added else None)
        want = F.batch_norm(twin[0], mean, variance, twin[1], twin[2], True, momentum) + (twin[3] if added else 0)
        want = want if activation == "none" else torch.where(y.detach() > 0, want, 0.0)
        y.backward(dy)
        want.backward(dy.double())
        close(y, want)
        for t in range(3 + added):
            close(mine[t].grad, twin[t].grad)
        close(m, mean)
        close(v, variance)
        assert kept is None or kept() is None, "memory of the call before is still held"
        kept = weakref.ref(x)
        del x, residual, dy, twin, mine, y, want
        gc.collect()
        for op in (batch_statistics_op, batch_norm_backward_op) if i else ():
            monkeypatch.setattr(op, "problem", no_summary)


@needs_gpu
@pytest.mark.parametrize("cols", [24, 4096, 16504, 16505])
def test_layer_norm(cols: int) -> None:
    """Rows of one program, of several, and read twice: what one call launched is right for the memory of the next."""
    kept = None
    for i in range(4):
        shapes = ((5, cols), (cols,), (cols,), (5, cols))
        x, w, b, dy = (Inputs("cuda", i + s).randn(*shape, dtype=torch.float16) for s, shape in enumerate(shapes))
        twin = [t.double().requires_grad_() for t in (x, w, b)]
        mine = [t.requires_grad_() for t in (x, w, b)]
        y, want = ops.layer_norm(x, w, b), F.layer_norm(twin[0], (cols,), twin[1], twin[2])
        y.backward(dy)
        want.backward(dy.double())
        close(y, want)
        for got, exact in zip(mine, twin, strict=True):
            close(got.grad, exact.grad)
        assert kept is None or kept() is None, "memory of the call before is still held"
        kept = weakref.ref(x)
        del x, dy, twin, mine, y, want
        gc.collect()


@needs_gpu
@pytest.mark.parametrize("dims", [(2, 64, 14, 128, 3, 1), (1, 128, 7, 64, 3, 2), (2, 64, 9, 64, 1, 1)], ids=str)
def test_convolution(dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a call again is made by the first one; the short way of its backward pass is found by the second one's."""
    n, c, h, o, k, stride = dims
    p = (h + 2 * (k // 2) - k) // stride + 1
    for i in range(5):
        x, weight, dy = image(i, n, c, h, h), image(i + 9, o, c, k, k) / (c * k * k) ** 0.5, image(i + 5, n, o, p, p)
        given = [t.contiguous(memory_format=LAST).requires_grad_() for t in (x, weight)]
        twin = [t.detach().double().requires_grad_() for t in given]
        y = ops.conv2d(given[0], given[1], None, stride, k // 2)
        want = F.conv2d(twin[0], twin[1], None, stride, k // 2)
        y.backward(dy)
        want.backward(dy.double())
        for got, exact in ((y, want), *((a.grad, b.grad) for a, b in zip(given, twin, strict=True))):
            close(got, exact)
        for op in (conv_transpose_op, conv_weight_gradient_op) if i else ():
            monkeypatch.setattr(op, "problem", no_summary)


class Cumulative(BatchNormAgain):
    """A call to be made again whose launches are torch's."""

    def __init__(self) -> None:
        self.momenta: list[float] = []

    def forward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, _, _, _, mean, variance, momentum = args
        self.momenta.append(momentum)
        return F.batch_norm(x, mean, variance, training=True, momentum=momentum), x[0], x[0]


def test_a_cumulative_average_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With momentum=None every step has a factor of its own: no part of the key, and given to the call."""
    monkeypatch.setattr(channel_norms, "call_key", lambda options, *tensors: options)
    monkeypatch.setattr(channel_norms, "_AGAIN", Held())
    again = Cumulative()
    monkeypatch.setattr(channel_norms, "_trained", lambda *args: again)
    mine, twin = nn.BatchNorm2d(3, momentum=None, affine=False), torch.nn.BatchNorm2d(3, momentum=None, affine=False)
    for seed in range(4):
        x = Inputs(seed=seed).randn(2, 3, 4, 4)
        torch.testing.assert_close(mine(x), twin(x))
    assert again.momenta == [1 / 2, 1 / 3, 1 / 4]
    assert len(channel_norms._AGAIN._kept) == 1
    torch.testing.assert_close(mine.running_mean, twin.running_mean)
    torch.testing.assert_close(mine.running_var, twin.running_var)
