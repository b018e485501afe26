"""The torch.compile backend: what goes into a launch, what stays Inductor's and why, and that the numbers are those of eager.

Most cases stop before Inductor generates code, which takes seconds: they compile with an inner compiler that runs the pass and
then calls the graph. A few go all the way.
"""

import copy
import logging
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, view_to_reshape
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.fuse import post_grad
from tilewright.fuse.backend import FusePass, explain_last
from tilewright.fuse.decisions import Decision
from tilewright.fuse.post_grad import fuse_graph
from tilewright.fuse.race import Race, _drawn
from tilewright.hw.device import device_named
from tilewright.op import invariant, on_card, prefer


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Seen:
    """Graphs as the pass left them, and what it decided."""

    def __init__(self, cpu: bool = True) -> None:
        self.cpu = cpu
        self.decisions: list[Decision] = []
        self.code: list[str] = []

    def compiled(self, model: Any, **options: Any) -> Any:
        """The model through torch.compile as far as the pass, then node by node."""

        def inner(graph: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
            view_to_reshape(graph)
            self.decisions += fuse_graph(graph.graph, cpu=self.cpu)
            graph.recompile()
            self.code.append(graph.code)
            return make_boxed_func(graph.forward)

        return torch.compile(model, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner), **options)

    def launches(self) -> list[str]:
        """What was pulled into each launch that was taken: "anchor activation residual"."""
        taken: list[str] = []
        for d in self.decisions:
            if d.kind == "anchor":
                taken += ["anchor"] * d.taken
            elif d.taken:
                taken[-1] += f" {d.reason.split()[0] if d.kind == 'activation' else d.kind}"
        return taken

    def refused(self) -> str:
        return "\n".join(f"{d.kind}: {d.reason}" for d in self.decisions if not d.taken)


class Block(nn.Module):
    """Two products with something between them, on [..., 16]."""

    def __init__(self, activation: Callable[[Tensor], Tensor], residual: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias), nn.Linear(32, 16, bias)
        self.activation, self.residual = activation, residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.activation(self.up(x)))
        return y + x if self.residual else y


class Sum(nn.Module):
    """What the operator cannot do in one launch: an activation behind a sum, and a second sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x) + x) + self.layer(x * 2) * 1.5


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.third, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.up, self.shift = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Parameter(torch.randn(8, 1, 1))
        self.head = nn.Linear(4 * 144, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x) + x)
        x = F.relu(F.conv2d(x, self.third.weight) + self.shift)
        x = F.relu(self.norm(self.third(x)) + x)
        return self.head(self.up(x).flatten(1))


class Products(nn.Module):
    """Products of two activations."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(x, x.transpose(1, 2))
        return torch.bmm(scores.tanh(), x) + x


def chain() -> nn.Module:
    return nn.Sequential(
        Block(F.gelu),
        Block(nn.GELU("tanh")),
        Block(F.silu, bias=False),
        Block(lambda x: F.relu(x), residual=False),
        Block(torch.tanh),
        Block(lambda x: F.relu(x) * x.mean()),
        Sum(),
    )


CHAIN = [
    "anchor gelu", "anchor residual", "anchor gelu_tanh", "anchor residual", "anchor silu", "anchor residual", "anchor relu",
    "anchor", "anchor", "anchor residual", "anchor", "anchor residual", "anchor residual", "anchor",
]  # fmt: skip
HALVES = ["anchor gelu", "anchor residual", "anchor silu", "anchor residual"]
ROWS, IMAGE = (2, 3, 16), (2, 3, 12, 12)
HALF, FLOAT = torch.float16, torch.float32
INFERENCE = {
    "chain": (
        chain,
        ROWS,
        FLOAT,
        CHAIN,
        ("is also read by mean", "relu: linear can apply an activation only before a residual"),
    ),
    "half": (lambda: nn.Sequential(Block(F.gelu), Block(F.silu)), ROWS, HALF, HALVES, ()),
    "convolutions": (
        Convs,
        IMAGE,
        FLOAT,
        ["anchor relu", "anchor residual relu", "anchor bias relu", "anchor", "anchor"],
        ("a transposed convolution",),
    ),
    "products": (Products, ROWS, torch.bfloat16, ["anchor", "anchor residual"], ()),
    "double": (
        lambda: Block(F.gelu),
        ROWS,
        torch.float64,
        [],
        ("the operands are float64; the operator needs one dtype for all of them",),
    ),
}
LIMITS = {FLOAT: 1e-6, HALF: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}


@pytest.mark.parametrize("case", INFERENCE)
def test_inference(case: str) -> None:
    make, shape, dtype, wanted, refused = INFERENCE[case]
    model = make().to(dtype).eval()
    x = torch.randn(shape).to(dtype)
    seen = Seen()
    with torch.no_grad():
        got = seen.compiled(model)(x)
        right = model.double()(x.double())
    assert seen.launches() == wanted
    for words in refused:
        assert words in seen.refused()
    error = (got.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
    assert error <= LIMITS[dtype]


@pytest.mark.parametrize(("kind", "causal"), [("flash", True), ("efficient", False)])
def test_attention_as_a_gpu_has_it(kind: str, causal: bool) -> None:
    """A CPU has an attention of its own, which is no anchor: a graph with a GPU's is written here."""
    graph = torch.fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    q, k, v = (torch.randn(2, 5, 3 * 2 * 16).split(32, -1)[i].unflatten(-1, (2, 16)).transpose(1, 2) for i in range(3))
    for node, value in zip(operands, (q, k, v), strict=True):
        node.meta["val"] = value
    aten = torch.ops.aten
    if kind == "flash":
        both = graph.call_function(aten._scaled_dot_product_flash_attention.default, (*operands, 0.0, causal), {"scale": 0.3})
    else:
        both = graph.call_function(
            aten._scaled_dot_product_efficient_attention.default, (*operands, None, False, 0.0, causal), {"scale": 0.3}
        )
    first = graph.call_function(operator.getitem, (both, 0))
    first.meta["val"] = v
    graph.output(graph.call_function(aten.mul.Tensor, (first, 2)))
    (decision,) = fuse_graph(graph, cpu=True)
    assert decision.taken, decision.reason
    got = torch.fx.GraphModule(nn.Module(), graph)(q, k, v)
    torch.testing.assert_close(got, 2 * F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3))


@pytest.mark.parametrize(
    ("model", "shape", "kept"),
    [
        (
            lambda: nn.Sequential(Block(F.gelu), Block(lambda x: F.relu(x))),
            ROWS,
            "gelu: addmm is a result of this graph, or kept",
        ),
        (Convs, IMAGE, ""),
    ],
)
def test_training_is_that_of_eager(model: Callable[[], nn.Module], shape: tuple[int, ...], kept: str) -> None:
    """GELU keeps its input for the backward pass, and stays Inductor's; ReLU keeps its result, and is taken."""
    eager = model()
    copied = copy.deepcopy(eager)
    x = torch.randn(shape, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    seen = Seen()
    got, right = seen.compiled(copied)(x), eager(twin)
    torch.testing.assert_close(got, right)
    got.square().sum().backward()
    right.square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(copied.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4, msg=name)
    for a, b in zip(copied.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert "anchor relu" in seen.launches()
    assert len(seen.code) == 2
    assert all("tilewright" in code for code in seen.code), "forward and backward"
    assert kept in seen.refused()


def test_sizes_that_are_not_known() -> None:
    """One graph for all batches: products go through the operator, convolutions over unknown pixels do not."""
    seen, model = Seen(), nn.Sequential(Block(F.gelu), Block(F.silu))
    compiled = seen.compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 7, 64):
            x = torch.randn(2, rows, 16)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(seen.code) == 1
    assert seen.launches() == ["anchor gelu", "anchor residual", "anchor silu", "anchor residual"]
    seen, model = Seen(), nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 9, 11)
    with torch.no_grad():
        torch.testing.assert_close(seen.compiled(model, dynamic=True)(x), model(x))
    assert seen.launches() == []
    assert "the number of pixels or channels is not known" in seen.refused()


def meta_graph(rows: int, activation: bool) -> torch.fx.Graph:
    """A product of [rows, 1024] and [4096, 1024] on no device, with a GELU if wanted."""
    x, weight, bias = (torch.empty(shape, dtype=HALF, device="meta") for shape in ((rows, 1024), (4096, 1024), (4096,)))

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return F.gelu(y) if activation else y

    graph = make_fx(forward, decomposition_table=select_decomp_table())(x, weight, bias).graph
    for node in graph.nodes:
        if (value := node.meta.get("val")) is not None:
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return graph


@pytest.mark.parametrize(
    ("rows", "activation", "reason"),
    [
        (1, False, "linear, gemv"),
        (256, True, "linear, sm90"),
        (4096, False, "linear would use the vendor's library here, as Inductor does"),
    ],
)
def test_what_the_operator_would_hand_to_cublas_stays(rows: int, activation: bool, reason: str) -> None:
    with on_card(device_named("h100")):
        decisions = fuse_graph(meta_graph(rows, activation))
    anchor = next(d for d in decisions if d.kind == "anchor")
    assert anchor.reason == reason
    assert anchor.taken == ("vendor" not in reason)
    saved = sum(d.bytes_saved for d in decisions)
    assert saved == (2 * 2 * rows * 4096 if activation else 0)


@pytest.mark.parametrize("times", [Race(20.0, 10.0), Race(10.0, 20.0)], ids=["slower", "faster"])
def test_a_gpu_takes_what_is_measured_to_be_faster(times: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_grad, "race", lambda op, choice, args, free: times._replace(choice=choice))
    with on_card(device_named("h100")):
        decisions = fuse_graph(meta_graph(256, True))
        anyway = [prefer("triton"), invariant()]
        for scope in anyway:
            with scope:
                assert fuse_graph(meta_graph(256, True))[0].taken
    assert decisions[0].taken == times.won
    assert decisions[0].reason == f"linear, sm90: {times}"
    assert "with the calls after it" in str(times)


# ---- all the way through Inductor


class Note(CustomGraphPass):
    """A user's pass."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(str(graph))

    def uuid(self) -> str:
        return "note"


def test_through_inductor(caplog: pytest.LogCaptureFixture) -> None:
    """By its name, with a pass of the user's, which sees the graph before ours; nothing global is left behind."""
    note, model = Note(), Block(F.gelu).eval()
    x = torch.randn(ROWS)
    before = config.post_grad_custom_pre_pass
    options = {"tilewright.cpu": True, "post_grad_custom_pre_pass": note, "force_disable_caches": True}
    with torch.no_grad(), caplog.at_level(logging.INFO, "tilewright.fuse.backend"):
        torch.testing.assert_close(torch.compile(model, backend="tilewright", options=options)(x), model(x))
    assert config.post_grad_custom_pre_pass is before
    assert len(note.seen) == 1
    assert "addmm" in note.seen[0]
    assert "tilewright" not in note.seen[0]
    explanation = explain_last()
    assert explanation is not None
    assert explanation.to_json()["taken"] == 4
    assert [d.kind for d in explanation.decisions] == ["anchor", "activation", "anchor", "residual"]
    assert "+ up    activation gelu" in str(explanation)
    assert "4 taken, 0 refused" in caplog.text


def test_decisions_outlive_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compile that Inductor's cache answers does not run the pass: what was decided is kept beside it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = Block(F.gelu).eval(), torch.randn(ROWS)
    texts = []
    for _ in range(2):
        with torch.no_grad():
            torch.compile(model, backend="tilewright", options={"tilewright.cpu": True})(x)
        explanation = explain_last()
        assert explanation is not None
        texts.append((len(explanation.graphs), str(explanation)))
        torch.compiler.reset()
    assert texts[0] == (1, texts[1][1])
    assert texts[1][0] == 0, "the second compile was to come from the cache"
    assert len(list((tmp_path / "tilewright").iterdir())) == 1


def test_a_cpu_is_left_to_inductor() -> None:
    seen, model = Seen(cpu=False), Block(F.gelu)
    x = torch.randn(ROWS)
    with torch.no_grad():
        torch.testing.assert_close(seen.compiled(model)(x), model(x))
    assert seen.launches() == []
    assert "on a CPU the operator is torch's own call" in seen.refused()
    assert "tilewright" not in seen.code[0]


def test_the_cache_key() -> None:
    """It names the user's passes, and is none where one of them has no name."""
    plain = FusePass().uuid()
    assert plain == FusePass().uuid() != FusePass(cpu=True).uuid()
    assert FusePass((Note(),)).uuid() not in (None, plain)
    assert FusePass((lambda graph: None,)).uuid() is None
    assert "cache" in str(FusePass().explanation)


def test_an_unknown_option() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="tilewright", options={"tilewright.gpu": True})
    with pytest.raises(Exception, match=r"unknown option 'tilewright\.gpu'; wanted tilewright\.cpu"):
        model(torch.randn(1, 2))


def test_expanded_operands_are_drawn_for_a_race() -> None:
    given = torch.randn(8).expand(4, 8)
    made = _drawn(given, torch.Generator().manual_seed(0))
    assert (made.shape, made.stride()) == (given.shape, given.stride())
    assert made.count_nonzero() == 32
