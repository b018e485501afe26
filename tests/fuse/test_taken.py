"""What `optimize` takes in beyond products and convolutions: each program against itself in float64, and what launches it has.

A row is a program and the operators of its launches that are ours; what stays torch's is in the report with its reason.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
import tilewright.op
from tilewright.fuse.op_race import race

B, H, S, T, D = 4, 2, 6, 9, 8
LIMITS = {"fp32": 2e-5, "fp16": 4e-3}


class Lambda(nn.Module):
    """A function of its inputs, with parameters and buffers by name."""

    def __init__(self, function: Callable[..., Tensor], **held: Tensor | nn.Module):
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif value.is_floating_point():
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


class Case(NamedTuple):
    name: str
    function: Callable[..., Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    ours: tuple[str, ...]
    """Operators of the launches, in order, torch's left out."""
    held: dict[str, Tensor | nn.Module] = {}  # noqa: RUF012 (not changed)
    reason: str = ""
    """Words of a refusal that the report must have."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def qkv(keys: int = S, heads: int = H) -> tuple[Tensor, ...]:
    return randn(B, H, S, D), randn(B, heads, keys, D), randn(B, heads, keys, D)


def seen(*shape: int) -> Tensor:
    """True in most places, and in the first of each row."""
    mask = torch.rand(*shape) > 0.3
    mask[..., 0] = True
    return mask


def written(q: Tensor, k: Tensor, v: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:
    return bend(q @ k.transpose(-1, -2)).softmax(-1) @ v


def windows(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Swin: a bias of heads, then the mask of each window, which all images share."""
    scores = q @ k.transpose(-2, -1) + m.bias.unsqueeze(0)
    scores = scores.view(B // 2, 2, H, S, S) + torch.where(m.mask, 0.0, -100.0).to(q.dtype).unsqueeze(1).unsqueeze(0)
    return scores.view(-1, H, S, S).softmax(-1) @ v


def batches(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, alpha: float = 1.0) -> Tensor:
    """nn.MultiheadAttention where it wants the weights, and BLOOM: heads are entries of a batch, the product adds the mask."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    weights = torch.baddbmm(mask, q * D**-0.5, k.transpose(-2, -1), alpha=alpha).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (B, H))


SDPA = F.scaled_dot_product_attention
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
MASKED = ("biased_attention",)
LEAST = torch.finfo(torch.float32).min
INF = float("-inf")


def scaled_product(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return written((m.l(q.transpose(1, 2).flatten(2)) * 0.3).view(B, S, H, D).transpose(1, 2), k, v, lambda s: s + m.w)


ATTENTION = (
    Case("bool mask of keys", lambda m, q, k, v, a: SDPA(q, k, v, a), lambda: (*qkv(), seen(B, 1, 1, S)), MASKED),
    Case("bool mask of each", lambda m, q, k, v, a: SDPA(q, k, v, a), lambda: (*qkv(T), seen(B, H, S, T)), MASKED),
    Case("float mask [S, T]", lambda m, q, k, v, a: SDPA(q, k, v, a), lambda: (*qkv(T), randn(S, T)), MASKED),
    Case("scale below 0", lambda m, q, k, v, a: SDPA(q, k, v, a, scale=-0.4), lambda: (*qkv(T), randn(S, T)), MASKED),
    Case("a constant causal mask", lambda m, q, k, v: SDPA(q, k, v, m.mask), qkv, ("attention",), {"mask": CAUSAL}),
    Case(
        "a causal mask of numbers",
        lambda m, q, k, v: SDPA(q, k, v, torch.where(m.mask, 0.0, INF).to(q.dtype)),
        qkv,
        ("attention",),
        {"mask": CAUSAL},
    ),
    Case("scaled queries", lambda m, q, k, v: written(q * 0.3, k, v, lambda s: s + m.w), qkv, MASKED, {"w": randn(S, S)}),
    Case("scaled in their product", scaled_product, qkv, ("linear", *MASKED), {"w": randn(S, S), "l": nn.Linear(H * D, H * D)}),
    Case("cross attention, no mask", lambda m, q, k, v: SDPA(q, k, v), lambda: qkv(T), ("attention",)),
    Case("relative positions", lambda m, q, k, v: written(q, k, v, lambda s: s + m.w), qkv, MASKED, {"w": randn(1, H, S, S)}),
    Case(
        "scaled, then a bias",
        lambda m, q, k, v, a: written(q, k, v, lambda s: s / 3 + a),
        lambda: (*qkv(T), randn(B, 1, S, T)),
        MASKED,
    ),
    Case(
        "masked_fill -inf",
        lambda m, q, k, v, a: written(q, k, v, lambda s: (s * 0.4).masked_fill(~a, INF)),
        lambda: (*qkv(T), seen(B, 1, 1, T)),
        MASKED,
    ),
    Case(
        "masked_fill of a finite number",
        lambda m, q, k, v, a: written(q, k, v, lambda s: s.masked_fill(a, -1e4)),
        lambda: (*qkv(), ~seen(B, 1, S, S)),
        MASKED,
    ),
    Case(
        "where with the least number",
        lambda m, q, k, v: written(q, k, v, lambda s: torch.where(m.mask, s, LEAST)),
        qkv,
        MASKED,
        {"mask": seen(S, S)},
    ),
    Case(
        "a bias and a mask",
        lambda m, q, k, v, a: written(q, k, v, lambda s: (s + m.bias).masked_fill(~a, INF)),
        lambda: (*qkv(), seen(B, 1, 1, S)),
        MASKED,
        {"bias": randn(1, H, S, S)},
    ),
    Case(
        "dropout and a cast",
        lambda m, q, k, v, a: F.dropout((q @ k.mT + a).softmax(-1, dtype=torch.float32).to(q.dtype), 0.1, False) @ v,
        lambda: (*qkv(), randn(B, 1, 1, S)),
        MASKED,
    ),
    Case("windows", windows, qkv, MASKED, {"bias": randn(H, S, S), "mask": seen(2, S, S)}),
    Case("batches of heads", batches, lambda: (*qkv(), randn(1, S, S)), MASKED),
    Case("scaled batches of heads", partial(batches, alpha=0.3), lambda: (*qkv(), randn(B * H, 1, S)), MASKED),
    Case(
        "written out, a factor behind the bias",
        lambda m, q, k, v, a: written(q, k, v, lambda s: (s + a) * 2),
        lambda: (*qkv(), randn(B, 1, 1, S)),
        (),
        reason="after a bias is added, the scores are multiplied",
    ),
    Case(
        "scores that are a result too",
        lambda m, q, k, v, a: (lambda s: s.softmax(-1) @ v + s.sum())(q @ k.mT + a),
        lambda: (*qkv(), randn(B, 1, 1, S)),
        (),
        reason="the scores are read by other calls too",
    ),
)


def rms(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    """As transformers' Llama has it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return w * wide.to(x.dtype)


def image(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (randn(*shape),)


IMAGE = image(2, 8, 7, 6)
OPERATORS = (
    Case("rms norm", lambda m, x: F.rms_norm(x, (16,), m.w, 1e-5), image(2, 5, 16), ("rms_norm",), {"w": randn(16)}),
    Case("rms norm without a weight", lambda m, x: F.rms_norm(x, (16,)), image(2, 5, 16), ("rms_norm",)),
    Case("rms norm written out", lambda m, x: rms(x, m.w), image(2, 5, 16), ("rms_norm",), {"w": randn(16)}),
    Case("rms norm with 1 + w", lambda m, x: rms(x, 1 + m.w), image(2, 5, 16), ("rms_norm",), {"w": randn(16)}),
    Case(
        "a mean of another dim",
        lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)),
        image(2, 16, 16),
        (),
        {"w": randn(16)},
    ),
    Case(
        "a norm that is read twice",
        lambda m, x: (lambda y: m.w * y + y)(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        image(2, 5, 16),
        (),
        {"w": randn(16)},
    ),
    Case("group norm", lambda m, x: m.norm(x), IMAGE, ("group_norm",), {"norm": nn.GroupNorm(4, 8)}),
    Case(
        "group norm behind a convolution",
        lambda m, x: m.norm(m.conv(x)),
        IMAGE,
        ("conv", "group_norm"),
        {"norm": nn.GroupNorm(2, 12), "conv": nn.Conv2d(8, 12, 3)},
    ),
    Case("group norm, silu", lambda m, x: F.silu(m.norm(x)), IMAGE, ("group_norm",), {"norm": nn.GroupNorm(4, 8)}),
    Case(
        "a number for each channel before a group norm",
        lambda m, x: F.gelu(m.norm(m.conv(x) + m.time(x.mean((2, 3)))[:, :, None, None])),
        IMAGE,
        ("conv", "mean", "linear", "group_norm"),
        {"norm": nn.GroupNorm(2, 12), "conv": nn.Conv2d(8, 12, 3), "time": nn.Linear(8, 12)},
    ),
    Case(
        "the same sum read twice",
        lambda m, x: (lambda y: m.norm(y) + y)(x + m.time(x.mean((2, 3)))[:, :, None, None]),
        IMAGE,
        ("mean", "linear", "group_norm"),
        {"norm": nn.GroupNorm(2, 8), "time": nn.Linear(8, 8)},
    ),
    Case(
        "parameters before a group norm go into the convolution",
        lambda m, x: m.norm(m.conv(x[:1]) + m.w[None, :, None, None]),
        IMAGE,
        ("conv", "group_norm"),
        {"norm": nn.GroupNorm(2, 12), "conv": nn.Conv2d(8, 12, 3), "w": randn(12)},
    ),
    Case("instance norm", lambda m, x: m.norm(x), IMAGE, ("instance_norm",), {"norm": nn.InstanceNorm2d(8, affine=True)}),
    Case(
        "instance norm of signals", lambda m, x: m.norm(x), image(2, 8, 11), ("instance_norm",), {"norm": nn.InstanceNorm1d(8)}
    ),
    Case("average pooling", lambda m, x: F.avg_pool2d(x, 3, 2, 1, True, False), IMAGE, ("avg_pool",)),
    Case("average pooling, divisor", lambda m, x: F.avg_pool2d(x, (2, 3), divisor_override=5), IMAGE, ("avg_pool",)),
    Case("average pooling of signals", lambda m, x: F.avg_pool1d(x, 3, 2), image(2, 8, 11), ("avg_pool",)),
    Case("adaptive pooling", lambda m, x: F.adaptive_avg_pool2d(x, (3, 2)), IMAGE, ("adaptive_avg_pool",)),
    Case("adaptive pooling of signals", lambda m, x: F.adaptive_avg_pool1d(x, 4), image(2, 8, 11), ("adaptive_avg_pool",)),
    Case("nearest", lambda m, x: F.interpolate(x, scale_factor=2), IMAGE, ("upsample",)),
    Case("bilinear to a size", lambda m, x: F.interpolate(x, (9, 13), mode="bilinear"), IMAGE, ("upsample",)),
    Case(
        "bilinear with corners",
        lambda m, x: F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True),
        IMAGE,
        ("upsample",),
    ),
    Case(
        "transposed convolution", lambda m, x: m.up(x), IMAGE, ("conv_transpose",), {"up": nn.ConvTranspose2d(8, 6, 3, 2, 1, 1)}
    ),
    Case(
        "transposed, norm, relu",
        lambda m, x: F.relu(m.norm(m.up(x))),
        IMAGE,
        ("conv_transpose",),
        {"up": nn.ConvTranspose2d(8, 6, 4, 2, 1, bias=False), "norm": nn.BatchNorm2d(6)},
    ),
    Case(
        "transposed of signals, gelu",
        lambda m, x: F.gelu(m.up(x)),
        image(2, 8, 11),
        ("conv_transpose",),
        {"up": nn.ConvTranspose1d(8, 6, 3, dilation=2)},
    ),
    Case("softmax", lambda m, x: x.softmax(-1), image(3, 17), ("softmax",)),
    Case("log softmax", lambda m, x: F.log_softmax(x, 1), image(3, 17), ("log_softmax",)),
    Case(
        "softmax over another dim",
        lambda m, x: x.softmax(1),
        image(2, 5, 7),
        (),
        reason="the operator supports only the last one",
    ),
    Case(
        "hardswish behind a convolution",
        lambda m, x: F.hardswish(m.conv(x)),
        IMAGE,
        ("conv", "hardswish"),
        {"conv": nn.Conv2d(8, 8, 3)},
    ),
    Case(
        "leaky behind a product",
        lambda m, x: F.leaky_relu(m.fc(x), 0.2),
        image(3, 16),
        ("linear", "leaky_relu"),
        {"fc": nn.Linear(16, 8)},
    ),
    Case("elu of an input", lambda m, x: F.elu(x, 0.7), image(3, 16), ("elu",)),
    Case(
        "an activation beside a sum",
        lambda m, x: torch.tanh(x) + 1,
        image(3, 16),
        (),
        reason="an activation next to other pointwise calls",
    ),
    Case(
        "an embedding",
        lambda m, x: m.fc(m.table(x.argmax(-1))),
        image(3, 9),
        ("linear",),
        {"table": nn.Embedding(9, 16), "fc": nn.Linear(16, 8)},
        "a gather of rows",
    ),
    Case(
        "concatenation",
        lambda m, x: m.fc(torch.cat((x, x.relu()), -1)),
        image(3, 8),
        ("linear",),
        {"fc": nn.Linear(16, 8)},
        "a concatenation",
    ),
)


def is_taken_and_right(case: Case, precision: str) -> None:
    """Assert it of a program."""
    torch.manual_seed(0)
    model = Lambda(case.function, **case.held).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean, module.running_var = torch.randn(module.num_features), torch.rand(module.num_features) + 0.5
    inputs = case.inputs()
    fast = tilewright.optimize(model, inputs, precision, compiled=False, tolerance=1.0)
    ours = [row["op"] for row in fast.report.launches if "." not in row["op"]]
    assert tuple(ours) == case.ours, fast.report.text()
    assert case.reason in " ".join(d.reason for d in fast.report.decisions if not d.taken)
    exact = Lambda(
        case.function,
        **{n: v.double() if isinstance(v, nn.Module) or v.is_floating_point() else v for n, v in case.held.items()},
    )
    exact.eval()
    with torch.no_grad():
        want = exact(*(t.double() if t.is_floating_point() else t for t in inputs))
    for module in (v for v in case.held.values() if isinstance(v, nn.Module)):
        module.float()
    got = fast(*inputs)
    assert got.shape == want.shape
    assert float((got - want).norm() / want.norm()) < LIMITS[precision]


@pytest.mark.parametrize(
    ("case", "precision"),
    [(case, "fp32") for case in ATTENTION] + [(case, "fp16") for case in (*ATTENTION, *OPERATORS)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_taken_and_right(case: Case, precision: str) -> None:
    is_taken_and_right(case, precision)


@pytest.mark.parametrize(
    ("function", "nan"),
    [
        (lambda m, q, k, v, a: SDPA(q, k, v, a), False),
        (lambda m, q, k, v, a: written(q, k, v, lambda s: s.masked_fill(~a, INF)), True),
        (lambda m, q, k, v, a: written(q, k, v, lambda s: s + torch.where(a, 0.0, INF)), True),
        (lambda m, q, k, v, a: written(q, k, v, lambda s: s.masked_fill(~a, LEAST)), False),
    ],
)
def test_rows_that_see_nothing_are_what_the_model_makes_of_them(function: Callable[..., Tensor], nan: bool) -> None:
    """Of a mask that the examples do not have: zeros or NaN, or the average of all keys."""
    torch.manual_seed(1)
    model, (*operands, mask) = Lambda(function).eval(), (*qkv(), seen(B, 1, S, S))
    fast = tilewright.optimize(model, (*operands, mask), "fp32", compiled=False)
    mask[1, 0, 2] = False
    want, got = model(*operands, mask), fast(*operands, mask)
    assert bool(want[1, :, 2].isnan().all()) == nan
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_the_faster_way_is_written_into_the_graph() -> None:
    """Where torch's kernel wins by more than two timings differ, and nowhere else; each problem is timed once."""
    model = Lambda(
        lambda m, x: F.avg_pool2d(x.softmax(-1) @ m.w, 2) + F.avg_pool2d(x.softmax(-1) @ m.w, 2), w=randn(6, 6)
    ).eval()
    fast = tilewright.optimize(model, (randn(2, 8, 6, 6),), "fp32", compiled=False)
    x, problems = randn(2, 8, 6, 6), []

    def timed(ways: Any) -> list[float]:
        results = [way(0) for way in ways]
        torch.testing.assert_close(*results)
        problems.append(results[0].shape)
        return [10.0, 9.0] if results[0].dim() == 4 and results[0].shape[-1] == 3 else [10.0, 9.9]

    want = fast.fused(x)
    rows = race(fast.fused, [x], timed)
    assert {row["op"]: row["taken"] for row in rows} == {"softmax": "tilewright", "avg_pool": "torch"}
    assert [row["times"] for row in rows] == [len(rows_of(fast.fused, row["op"])) for row in rows]
    assert all(node.args[-1] is (row["taken"] == "torch") for row in rows for node in rows_of(fast.fused, row["op"]))
    torch.testing.assert_close(fast.fused(x), want)
    with tilewright.op.invariant():
        assert race(fast.fused, [x], timed) == []


def rows_of(module: Any, op: str) -> list[Any]:
    """Calls of an operator in a graph."""
    return [n for n in module.graph.nodes if getattr(n.target, "__name__", "") == op]
