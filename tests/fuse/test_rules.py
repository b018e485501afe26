"""The rules of fusion on programs that are nearly of a known form: the numbers, and the reason for what is left.

Each row goes through both back ends: `optimize`, and the pass inside torch.compile.
"""

import copy
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tests.fuse.test_backend import Seen
from tilewright.fuse import calls
from tilewright.fuse.check import compare_outputs, layer_errors
from tilewright.fuse.lower import Lowering
from tilewright.fuse.report import Report
from tilewright.fuse.trace import trace
from tilewright.fuse.walk import plan

sdpa = F.scaled_dot_product_attention


class Program(nn.Module):
    """Parameters of all kinds, and a forward that is given."""

    def __init__(self, run: Callable[["Program", Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(16, 16) for _ in range(5))
        self.wide, self.conv, self.one = nn.Linear(16, 32), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.up, self.norm, self.image_norm = nn.ConvTranspose2d(3, 8, 2), nn.BatchNorm1d(16), nn.BatchNorm2d(8)
        self.table, self.group = nn.Embedding(11, 16), nn.GroupNorm(2, 8)
        self.v, self.u = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.square, self.row = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.rand(1, 4) + 0.5)
        self.mask = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def heads(x: Tensor, count: int = 2) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def differential(m: Program, x: Tensor) -> Tensor:
    q, p, k, v = heads(m.a(x)), heads(m.b(x)), heads(m.c(x)), heads(m.d(x))
    return sdpa(q, k, v) - 0.5 * sdpa(p, k, v)


def two_attentions(m: Program, x: Tensor) -> Tensor:
    q, k, v = heads(m.a(x)), heads(m.b(x)), heads(m.c(x))
    return sdpa(q, q, v) - sdpa(k, q, q) + sdpa(heads(m.d(x)), heads(m.e(x)), v)


def excited(m: Program, x: Tensor) -> Tensor:
    y = m.conv(x)
    gate = torch.sigmoid(F.linear(F.silu(F.linear(y.mean((2, 3)), m.u[:, :, 0].repeat(1, 8))), m.u[:, :, 0].repeat(1, 8)))
    return y * gate[:, :, None, None]


def normed(m: Program, x: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm(x, m.norm.running_mean, m.norm.running_var, weight, m.norm.bias)


ROWS, IMAGE = (2, 5, 16), (2, 3, 6, 6)


class Row(NamedTuple):
    """A program, and what is done with it."""

    run: Callable[[Program, Tensor], Any]
    taken: dict[str, int]
    """Decisions of each kind that `optimize` takes."""
    refused: tuple[str, ...] = ()
    """Words of its refusals."""
    shape: tuple[int, ...] = ROWS
    inductor: str = ""
    """Why the row says nothing about the pass inside Inductor's graphs."""


CASES = {
    # Products that several read.
    "overlapping attentions": Row(differential, {"merge": 1}),
    "attentions that share all": Row(two_attentions, {"merge": 1}),
    "one linear twice": Row(lambda m, x: F.relu(m.a(x)) + m.a(x * 2), {"activation": 1, "residual": 1}),
    "tied weights": Row(lambda m, x: F.linear(F.linear(x, m.table.weight), m.table.weight.t()) * 2, {"scale": 1}),
    "a table that is a weight too": Row(
        lambda m, x: F.linear(m.table((x[..., 0] > 0).long()), m.table.weight), {}, ("a gather of rows",)
    ),
    # Folds: which axis a factor belongs to.
    "computed bias, scale": Row(lambda m, x: F.linear(x, m.square, m.v.exp()) * 0.5, {"scale": 1}),
    "bias of the input, scale": Row(
        lambda m, x: F.linear(x, m.square, x[0, 0]) * 0.5, {}, ("the weight or the bias is not a constant of the graph",)
    ),
    "weight of the input, scale": Row(
        lambda m, x: F.linear(x, x[0] * 1.5) * 0.5, {}, ("the weight or the bias is not a constant of the graph",)
    ),
    "weight of the input, bias": Row(lambda m, x: F.linear(x, torch.cat([x[0], x[1]])[:9]) + m.v[:9], {"bias": 1}),
    "scale, transpose, factors": Row(lambda m, x: m.a(x).transpose(1, 2) * 0.5 * m.v[:5], {"scale": 1}, ("does not have one",)),
    "transpose, factors of columns": Row(lambda m, x: m.a(x).transpose(1, 2) * m.v[:, None], {"scale": 1}),
    "factors of heads": Row(lambda m, x: m.a(x).view(2, 5, 2, 8) * m.v.view(2, 8) + m.v[:8] * 2, {"scale": 1, "bias": 1}),
    "factors of one head": Row(lambda m, x: m.a(x).view(2, 5, 4, 4).transpose(2, 3) * m.row, {"scale": 1}),
    "factors of rows": Row(lambda m, x: m.a(x) * m.v[:5, None], {}, ("does not have one",)),
    "a square result, transposed": Row(
        lambda m, x: m.a(x).transpose(0, 1) * m.v, {}, ("does not have one",), (16, 16)
    ),
    "a full factor": Row(lambda m, x: m.a(x) * m.mask[:5, :1], {}, ("does not have one",)),
    "factors on the left": Row(lambda m, x: m.v * m.a(x), {"scale": 1}),
    "divided": Row(lambda m, x: m.a(x) / 4, {"scale": 1}),
    "divided by it": Row(lambda m, x: 4 / (m.a(x).square() + 1) + 4 / m.a(x).exp(), {}),
    "rounded": Row(lambda m, x: torch.div(m.a(x), 0.5, rounding_mode="floor"), {}, ("aten.div.Tensor_mode",)),
    "number added": Row(lambda m, x: F.relu(m.a(x) + 0.25), {"bias": 1, "activation": 1}),
    "biases and factors in turns": Row(lambda m, x: ((m.a(x) + m.v) * 2 + 1) * m.v - 1, {"bias": 2, "scale": 2}),
    "factors behind an activation": Row(
        lambda m, x: F.relu(m.a(x)) * m.v, {"activation": 1}, ("factor or bias only before an activation",)
    ),
    # Batch norms.
    "norm of rows": Row(lambda m, x: m.norm(m.a(x)), {"batch_norm": 1}, shape=(4, 16)),
    "norm of columns, transposed": Row(lambda m, x: m.norm(m.a(x).transpose(1, 2)), {"batch_norm": 1}),
    "norm of the other axis": Row(lambda m, x: m.norm(m.a(x)), {}, shape=(2, 16, 16)),
    "computed gamma": Row(lambda m, x: normed(m, m.a(x), m.v.exp()), {"batch_norm": 1}, shape=(4, 16)),
    "gamma of the input": Row(
        lambda m, x: normed(m, m.a(x), x[0] + 2), {}, ("its statistics or parameters are computed",), (4, 16)
    ),
    "norm in training": Row(lambda m, x: F.batch_norm(m.a(x), None, None, m.v, training=True), {}, ("batch_norm",), (4, 16)),
    "two norms": Row(lambda m, x: m.norm(m.norm(m.a(x)) * 0.5), {"batch_norm": 2, "scale": 1}, shape=(4, 16)),
    "image": Row(
        lambda m, x: F.silu(m.image_norm(m.conv(x) * m.u) + m.one(x)),
        {"batch_norm": 1, "scale": 1, "residual": 1, "activation": 1}, shape=IMAGE,
    ),
    "image, factors of pixels": Row(lambda m, x: m.conv(x) * m.v[:6], {}, ("does not have one",), IMAGE),
    "image, a sum behind a copy": Row(
        lambda m, x: F.dropout(m.conv(x), 0.1, False).clone() + m.one(x).relu(), {"residual": 1, "activation": 1}, shape=IMAGE
    ),
    "image, a gate": Row(
        lambda m, x: F.relu(m.conv(x)) * m.one(x).mean((2, 3), True), {"activation": 1}, ("computed in every call",), IMAGE
    ),
    "image, a sum behind a view": Row(
        lambda m, x: m.conv(x).flatten(2) * m.u[:, :, 0] + m.one(x).flatten(2).relu(), {"scale": 1, "activation": 1},
        ("there are views between",), IMAGE,
    ),
    "one image": Row(lambda m, x: F.relu(m.conv(x) * m.u + 1), {"scale": 1, "bias": 1, "activation": 1}, shape=IMAGE[1:]),
    # Sums.
    "twice the same": Row(lambda m, x: (y := m.a(x)) + y, {}, ("both operands are the same value",)),
    "squared": Row(lambda m, x: (y := m.a(x)) * y, {}, ("both operands are the same value",)),
    "alpha": Row(lambda m, x: torch.add(m.a(x), x, alpha=2), {}, ("alpha=2",)),
    "residual on the left": Row(lambda m, x: x + m.a(x), {"residual": 1}),
    "broadcast residual": Row(lambda m, x: m.a(x) + x[:1], {}, ("another shape",)),
    "broadcast product": Row(lambda m, x: m.a(x[:1]) + x, {}, ("its result has another dtype or shape",)),
    "two sums": Row(lambda m, x: m.a(x) + x + x.exp(), {"residual": 1}, ("linear can apply only one residual",)),
    "sum, activation": Row(
        lambda m, x: F.relu(m.a(x) + x), {"residual": 1}, ("linear can apply an activation only before a residual",)
    ),
    "views and a residual": Row(
        lambda m, x: F.gelu(m.a(x).view(2, 5, 4, 4)) + x.view(2, 5, 4, 4), {"activation": 1, "residual": 1}
    ),
    "a residual in another order": Row(
        lambda m, x: F.gelu(m.a(x).view(2, 5, 4, 4)).transpose(1, 2) + x.view(2, 4, 5, 4), {"activation": 1},
        ("has its rows in another order",),
    ),
    "a product with a parameter on the left": Row(lambda m, x: m.square @ x.transpose(1, 2), {}, ("batches of matrices",)),
    "a transposed parameter": Row(lambda m, x: x @ m.square.t() + (x @ m.square.t()[:, ::2]).sum(), {}),
    "a vector": Row(lambda m, x: F.linear(x, m.v) + x @ m.v, {}, ("the second operand is a vector",)),
    "one row": Row(lambda m, x: F.relu(m.a(x) + x), {"residual": 1}, shape=(16,)),
    "nothing": Row(lambda m, x: m.a(x), {}, ("an operand is empty",), (0, 16)),
    # Activations.
    "in place": Row(lambda m, x: (F.relu_(y := m.a(x).clone()), y, m.b(y))[2], {"activation": 1}),
    "in place, read before": Row(lambda m, x: ((y := m.a(x)).sum(), F.relu_(y))[0] + y, {}, ()),
    "others": Row(
        lambda m, x: F.hardswish(m.a(x)) + F.relu6(m.b(x)) + F.leaky_relu(m.c(x), 0.2) + m.d(x).tanh() + m.e(x).sigmoid(), {},
        ("linear has no hardswish in its epilogue", "no relu6", "no leaky_relu", "no tanh", "no sigmoid"),
    ),
    "dropout in evaluation": Row(lambda m, x: F.relu(F.dropout(m.a(x), 0.5, False)), {"activation": 1}),
    "a cast between": Row(lambda m, x: F.relu(m.a(x).double()).to(x.dtype) + x, {}, ("aten._to_copy",)),
    "a cast to its own type": Row(lambda m, x: F.relu(m.a(x).to(x.dtype)), {"activation": 1}),
    # Gates.
    "halves": Row(lambda m, x: F.silu((h := m.wide(x))[..., :16]) * h[..., 16:], {"gate": 1}),
    "halves, gate last": Row(lambda m, x: (h := m.wide(x).split(16, -1))[0] * F.gelu(h[1]), {"gate": 1}),
    "halves that overlap": Row(lambda m, x: F.silu((h := m.wide(x))[..., :16]) * h[..., 8:24], {}),
    "halves with steps": Row(lambda m, x: F.silu((h := m.wide(x))[..., ::2]) * h[..., 1::2], {}),
    "one half twice": Row(lambda m, x: F.silu((h := m.wide(x))[..., :16]) * h[..., :16] + h[..., 16:], {}),
    "halves of rows": Row(lambda m, x: F.silu((h := m.wide(x))[:1]) * h[1:], {}),
    "three parts": Row(lambda m, x: F.silu((h := m.wide(x).split([16, 8, 8], -1))[0]) * torch.cat(h[1:], -1), {}),
    "halves, one is returned": Row(lambda m, x: (F.silu((h := m.wide(x).chunk(2, -1))[0]) * h[1], h[1]), {}),
    "gate of two, broadcast": Row(lambda m, x: F.silu(m.a(x[:1])) * m.b(x), {"activation": 1}),
    "gate of itself": Row(lambda m, x: F.silu(y := m.a(x)) * y, {}, ("is also read by",)),
    # Attention.
    "causal, other lengths": Row(
        lambda m, x: sdpa(heads(m.a(x)), heads(m.b(x[:, :3])), heads(m.c(x[:, :3])), is_causal=True), {},
        ("aligns the mask with the first key",),
    ),
    "broadcast keys": Row(lambda m, x: sdpa(heads(x), heads(m.b(x[:1])), heads(x)), {}, ("must broadcast",)),
    "broadcast heads": Row(lambda m, x: sdpa(heads(x), heads(m.b(x)[..., :8], 1), heads(m.c(x)[..., :8], 1)), {}),
    "more values than keys": Row(lambda m, x: sdpa(heads(x), heads(x)[:, :1], heads(x)), {}, ("must broadcast",)),
    "negative scale": Row(lambda m, x: sdpa(heads(x), heads(x), heads(m.a(x)), scale=-0.5), {}, ("a scale of -0.5",)),
    "no scale": Row(lambda m, x: sdpa(heads(x), heads(x), heads(m.a(x)), scale=0.0), {}, ("a scale of 0",)),
    "a mask": Row(lambda m, x: sdpa(heads(m.a(x)), heads(m.b(x)), heads(x), m.mask), {"merge": 1}),
    "no heads": Row(lambda m, x: sdpa(m.a(x), m.b(x), x), {}, ("do not have four dims [B, H, S, D]",)),
    "written out, softmax in double": Row(
        lambda m, x: (heads(x) @ heads(m.a(x)).mT).softmax(-1, torch.float64).to(x.dtype) @ heads(x), {},
        ("batches of matrices",),
    ),
    "written out over queries": Row(
        lambda m, x: (heads(x) @ heads(m.a(x)).mT).softmax(-2) @ heads(x), {}, ("batches of matrices",),
        inductor="torch 2.13 itself takes a softmax over queries for attention",
    ),
    "written out, factor first": Row(
        lambda m, x: (0.3 * (heads(x) @ heads(m.a(x)).mT)).softmax(-1) @ heads(m.b(x)), {"merge": 1}
    ),
    # Others.
    "squeeze and excitation": Row(excited, {"activation": 1}, ("no sigmoid",), IMAGE),
    "group norm": Row(lambda m, x: F.relu(m.group(m.conv(x))), {"activation": 1}, shape=IMAGE),
    "transposed convolution": Row(lambda m, x: F.relu(m.up(x)), {"activation": 1}, shape=IMAGE),
    "integers": Row(
        lambda m, x: m.a((x.long() @ x.long()[0].mT).to(x.dtype)[..., :1].expand(-1, -1, 16)), {}, ("the operands are int64",)
    ),
    "a pool of one image": Row(lambda m, x: F.max_pool2d(m.conv(x), 2), {}, ("not [N, C, H, W]",), IMAGE[1:]),
    "strides as traced": Row(
        lambda m, x: torch.as_strided(F.relu(m.conv(x)), (4, 8), (8, 1), 3), {"activation": 1}, shape=IMAGE
    ),
}  # fmt: skip


def _program(case: Row) -> tuple[Program, Tensor, Any]:
    torch.manual_seed(0)
    model, x = Program(case.run), torch.randn(case.shape)
    for norm in (model.norm, model.image_norm):
        nn.init.uniform_(norm.running_mean, -1, 1)  # pyright: ignore[reportArgumentType]
        nn.init.uniform_(norm.running_var, 0.5, 2)  # pyright: ignore[reportArgumentType]
    model.eval()
    with torch.no_grad():
        return model, x, copy.deepcopy(model).double()(x.double())


@pytest.mark.parametrize("name", CASES)
def test_own_graph(name: str) -> None:
    case = CASES[name]
    model, x, right = _program(case)
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    for apart in compare_outputs(right, done(x)):
        assert apart.rms <= 3e-6, f"{apart}\n{done.report}"
    kinds = {d.kind for d in done.report.decisions if d.taken}
    assert {kind: done.report.count(kind) for kind in kinds} == case.taken, str(done.report)
    said = "\n".join(d.reason for d in done.report.decisions if not d.taken)
    assert "could not be built" not in said
    for words in case.refused:
        assert words in said


@pytest.mark.parametrize("name", CASES)
def test_inside_of_inductors_graphs(name: str) -> None:
    if why := CASES[name].inductor:
        pytest.skip(why)
    model, x, right = _program(CASES[name])
    torch.compiler.reset()
    with torch.no_grad():
        got = Seen().compiled(model)(x)
    for apart in compare_outputs(right, got):
        assert apart.rms <= 3e-6, str(apart)


def lowered(
    model: nn.Module, x: Tensor, refused: frozenset[str] = frozenset(), dtype: torch.dtype = torch.float32
) -> tuple[Any, Report]:
    """(what the lowered graph returns, the report)."""
    traced, report = trace(model.to(dtype), (x.to(dtype),)), Report()
    exact = {name: value.float() for name, value in traced.state.items()}
    module = Lowering(traced, exact, report, refused).run()
    with torch.no_grad():
        return module(x.to(dtype))[0], report


def block(m: Program, x: Tensor) -> Tensor:
    y = sdpa(heads(m.a(x)), heads(m.b(x)), heads(m.c(x))).transpose(1, 2).flatten(2)
    return F.relu(m.d(y)) + x + F.silu(m.e(x)) * F.linear(x, m.square, m.v)


def test_every_call_has_one_decision() -> None:
    """Taken by an anchor, in a view, constant, or left with its reason; the plan is plain data."""
    for case in [Row(block, {}), *(CASES[name] for name in ("image", "halves", "others", "a mask", "computed gamma"))]:
        model, x, _ = _program(case)
        traced = trace(model, (x,))
        found = plan(traced.graph)
        calls = [n for n in traced.graph.nodes if n.op == "call_function"]
        assert sorted(found.decisions, key=calls.index) == calls
        assert all(d.reason for d in found.decisions.values())
        fused = [n for group in found.groups for n in group.nodes]
        assert len(set(fused)) == len(fused), "no call is in two groups"
        kinds = {"view", "constant", "unread"}
        assert all(found.decisions[n].taken for n in fused if found.decisions[n].kind not in kinds)
        assert json.loads(json.dumps(found.to_json()))["calls"].keys() == {n.name for n in calls}


@pytest.mark.parametrize(
    ("refused", "gone", "calls"),
    [
        ((), "", {"linear": 3, "attention": 1}),
        (("relu",), "activation", {"linear": 3, "attention": 1}),
        (("d",), "anchor", {"linear": 2, "attention": 1}),
        (("scaled_dot_product_attention",), "anchor", {"linear": 5}),
        (("mul", "silu"), "gate", {"linear": 4, "attention": 1}),
    ],
)
def test_refused_by_name(refused: tuple[str, ...], gone: str, calls: dict[str, int]) -> None:
    """Layers and calls that the caller names stay torch's; everything else is fused as ever."""
    model, x, right = _program(Row(block, {}))
    got, report = lowered(model, x, frozenset(refused))
    assert compare_outputs(right, got)[0].rms < 3e-6
    ours = [launch["op"] for launch in report.launches if not launch["op"].startswith("aten")]
    assert {op: ours.count(op) for op in ours} == calls, str(report)
    words = [d for d in report.decisions if "excluded from fusion" in d.reason]
    assert bool(words) == bool(refused)


def test_what_cannot_be_built_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that refuses one product: its steps are tried without, then its calls are torch's; the rest is fused."""
    model, x, right = _program(Row(block, {}))
    real = calls.linear

    def picky(*args: Any) -> Tensor:
        if args[4] == "relu":
            raise ValueError("no relu today")
        if args[1].shape[0] > 32:
            raise ValueError("no wide products today")
        return real(*args)

    monkeypatch.setattr(calls, "linear", picky)
    got, report = lowered(model, x)
    assert compare_outputs(right, got)[0].rms < 3e-6
    said = {d.kind: d.reason for d in report.decisions if not d.taken}
    assert said["activation"] == "it could not be built: no relu today"
    assert said["merge"] == "it could not be built: no wide products today"
    assert report.count("gate") == 1


def test_folds_that_the_type_cannot_hold() -> None:
    """A factor that takes weights below what float16 has is not folded."""
    model, x, right = _program(Row(lambda m, x: F.relu(m.a(x) * 2e-6) * 1e6, {}))
    got, report = lowered(model, x, dtype=torch.float16)
    assert compare_outputs(right, got)[0].rms < 0.1  # what comes out of the product times 2e-6 is a subnormal number
    assert any(d.kind == "scale" and d.reason.endswith("that float16 cannot represent") for d in report.decisions)
    assert lowered(model, x)[1].count("scale") == 1


def test_each_fusion_has_an_error_of_its_own() -> None:
    """What merged, gated and reordered products compute is compared where it stands; a wrong one is named."""
    model, x, _ = _program(Row(block, {}))
    traced = trace(model, (x,))
    module = Lowering(traced, traced.state, Report()).run()
    found = layer_errors(traced.module, module, (x,))
    assert {e.layer for e in found} >= {"a", "b", "c", "d", "e"}
    assert all(e.own < 1e-6 for e in found)
    merged = next(b for name, b in module.named_buffers() if name.startswith("a_weight"))
    merged[16:32] *= 1.5  # the second of the three products in one
    wrong = [e.layer for e in layer_errors(traced.module, module, (x,)) if e.own > 1e-3]
    assert wrong == ["b"]
