"""Layers of models of many kinds, and the programs made of them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tilewright.bench.compare.layers import Chain, trace
from tilewright.bench.compare.plan import plan
from tilewright.bench.compare.tracing import Untraceable
from tilewright.bench.compare.variants import Variant, candidates, variants


class Residual(nn.Module):
    """Convolutions with everything in place, a shortcut, a projection that runs after the branch it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.wide, self.project, self.fc = nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(4, 8, 1, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean()
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        y = self.relu(y)
        y = self.relu(self.wide(y) + self.project(y))
        return self.fc(y.mean((2, 3)))


class Written(nn.Module):
    """Attention as products and a softmax, the value's product after the scores'; sizes read from the input; ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.query, self.key, self.value, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        q, k = (layer(x).view(ids.shape[0], ids.size(1), 2, 8).transpose(1, 2) for layer in (self.query, self.key))
        weight = torch.softmax(q @ k.mT * scale, -1)
        v = self.value(x).view(ids.shape[0], -1, 2, 8).transpose(1, 2)
        return {"out": self.norm(x + (weight @ v).transpose(1, 2).flatten(2)), "weight": weight}


class Shared(nn.Module):
    """One layer three times, an optional argument, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        if mask is not None:
            x = x * mask
        return x, self.last(x)


class Branching(nn.Module):
    """PyTorch's own attention, which a symbolic trace does not look into: torch.export does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            x = x * 2
        return self.head(self.layers(x))


class Sized(nn.Module):
    """Python code that counts with shapes, types and devices."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.places = nn.Parameter(torch.randn(16, 24))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        assert len(x) == b
        assert x.dim() == x.ndim == 3
        h = self.project(x) + self.places[:n]
        q, k, v = h.view(b, n, 3, c).unbind(2) if n > 1 else h.chunk(3, -1)
        scores = q @ k.mT / c**0.5 + torch.zeros(n, n, dtype=x.dtype, device=x.device)
        return torch.stack([y * (1 + i / x.size(0)) for i, y in enumerate(scores.softmax(-1) @ v)])


class Depends(nn.Module):
    """What runs depends on the numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Calls(nn.Module):
    """A linear layer in a function of it."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.run, self.linear = run, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.run(self.linear, x)


def fails(linear: nn.Module, x: Tensor) -> Tensor:
    raise RuntimeError("out of ideas\nand of lines")


def through_views(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    y[:, 0] = 3.0
    y[:, 1:].mul_(2)
    return linear(y)


def stack() -> nn.Module:
    return nn.Sequential(*(part for _ in range(6) for part in (nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], list[str]]] = {
    "residual": (Residual, (torch.randn(2, 4, 8, 8),), ["mean", "conv1", "conv2", "wide", "project", "mean#2", "fc"]),
    "written": (
        Written, (torch.randint(50, (2, 5)), torch.tensor(0.3)),
        ["table", "query", "key", "matmul", "value", "matmul#2", "norm"],
    ),
    "shared": (Shared, (torch.randn(3, 8),), ["layer", "layer#2", "layer#3", "last"]),
    "stack": (stack, (torch.randn(3, 8),), [f"{4 * i + j}" for i in range(6) for j in (0, 1, 3)]),
    "sized": (Sized, (torch.randn(2, 5, 8),), ["project", "matmul"]),
    "branching": (
        Branching, (torch.randn(2, 4, 16),),
        [f"layers.layers.{i}.{part}" for i in range(3) for part in (
            "self_attn.linear", "self_attn.scaled_dot_product_attention", "self_attn.linear#2", "norm1", "linear1", "linear2",
            "norm2",
        )] + ["head"],
    ),
}  # fmt: skip


def seeded(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    make, inputs, _ = MODELS[name]
    return make().eval(), inputs


@cache
def chain_of(name: str) -> Chain:
    return trace(*seeded(name))


@cache
def all_variants(name: str) -> list[Variant]:
    return candidates(chain_of(name))


def leaves(answer: object) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(answer) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_layers(name: str) -> None:
    """Their names, and that they hold the whole graph, each node after what it reads."""
    chain = chain_of(name)
    assert [layer.name for layer in chain.layers] == MODELS[name][2]
    done: set[fx.Node] = set(chain.root.graph.find_nodes(op="placeholder")) | set(chain.root.graph.find_nodes(op="get_attr"))
    for layer in chain.layers:
        for node in layer.nodes:
            assert set(node.all_input_nodes) <= done
            done.add(node)
        assert layer.flops > 0
        assert layer.bytes > 0
    assert len(done) + 1 == len(chain.root.graph.nodes)


@pytest.mark.parametrize("name", MODELS)
def test_every_variant_runs_what_it_says_and_nothing_of_it_is_dead(name: str) -> None:
    """Beginnings answer with the model's own values; each layer is in the program as often as it counts; borders are right."""
    chain = chain_of(name)
    kept: dict[str, Tensor] = {}

    class Keeper(fx.Interpreter):
        def run_node(self, n: fx.Node):
            value = super().run_node(n)
            kept[n.name] = value
            return value

    with torch.no_grad():
        Keeper(chain.root, garbage_collect_values=False).run(*chain.inputs)
    for variant in all_variants(name):
        module, inputs = variant.module, variant.inputs
        with torch.no_grad():
            answer = leaves(module(*inputs))
        assert all(x.isfinite().all() for x in answer)
        if variant.name == "whole":
            continue
        assert isinstance(module, fx.GraphModule)
        compute = [n for n in module.graph.nodes if n.op.startswith("call")]
        assert len(compute) == sum(len(layer.nodes) * variant.counts[layer.name] for layer in chain.layers)
        assert not module.graph.eliminate_dead_code()
        assert variant.border == (sum(x.nbytes for x in inputs), sum(x.nbytes for x in answer), len(inputs), len(answer))
        if variant.name.startswith(("prefix", "only", "whole giving")) and " x" not in variant.name:
            assert all(torch.equal(x, kept[key.name]) for x, (key, _) in zip(answer, variant.program.outputs, strict=True))
        mine = {id(p) for p in chain.model.parameters()}
        foreign = [n for n, p in module.named_parameters() if id(p) not in mine]
        assert all(n.startswith("copy_") for n in foreign)
        variant.release()


KINDS = [
    ("residual", "conv2 x4", {"conv1": 1, "conv2": 4}),
    ("residual", "only wide", {"conv1": 0, "wide": 1}),
    ("stack", "1 of 6 blocks 0 ... 3", {"0": 1, "3": 1, "4": 0, "23": 0}),
    ("stack", "4 of 6 blocks 0 ... 3", {"12": 1, "16": 0}),
    ("stack", "0 ... 3 x4", {"0": 4, "3": 4, "4": 1}),
    ("stack", "without 4", {"0": 1, "4": 0, "5": 1}),
    ("shared", "layer x2", {"layer": 2, "layer#2": 1}),
    # The first layer of the first block has the doubling before it; blocks are cut where one value passes.
    ("branching", "1 of 2 blocks layers.layers.0.norm1 ... layers.layers.1.self_attn.linear#2",
     {"layers.layers.0.linear1": 1, "layers.layers.1.linear1": 0, "layers.layers.2.linear1": 1, "head": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "variant", "counts"), KINDS)
def test_variants_that_there_are(name: str, variant: str, counts: dict[str, int]) -> None:
    found = {v.name: v.counts for v in all_variants(name)}
    assert variant in found
    assert {key: found[variant][key] for key in counts} == counts


NOT_POSSIBLE = [
    ("residual", "without wide"),  # another shape
    ("residual", "project x2"),
    ("stack", "1 x2"),
    ("stack", "without 1"),
    ("written", "matmul#2 x2"),  # its values come from one side only
    ("written", "without table"),
]


@pytest.mark.parametrize(("name", "variant"), NOT_POSSIBLE)
def test_variants_that_there_cannot_be(name: str, variant: str) -> None:
    assert variant not in {v.name for v in all_variants(name)}


def test_copies_neither_vanish_nor_overflow() -> None:
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)).eval()
    small[0].weight.data.mul_(1e-3)
    (many,) = [v for v in variants(small, (torch.randn(4, 32),)) if v.name == "0 x16"]
    module = many.module
    assert isinstance(module, fx.GraphModule)
    before = small[0](many.inputs[0]).relu().square().mean().sqrt()
    node = [n for n in module.graph.nodes if n.op == "call_module"][-2]
    seen: list[Tensor] = []
    module.get_submodule(str(node.target)).register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad():
        module(*many.inputs)
    assert 0.5 < seen[0].square().mean().sqrt() / before < 2


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (nn.Linear(2, 2), (torch.randn(1, 2),), "training mode"),
        (
            Depends().eval(),
            (torch.randn(3),),
            r"symbolic: TraceError: .* \(at .*test_variants.py:\d+, in forward: return x \* 2 if.*exported: .*$",
        ),
        (
            Calls(fails).eval(),
            (torch.randn(2, 3),),
            r"on its own inputs: RuntimeError: out of ideas \(at .*test_variants.py:\d+, in",
        ),
        (
            Calls(lambda f, x: torch.dropout(f(x), 0.5, True)).eval(),
            (torch.randn(2, 3),),
            "different outputs in every call .it draws random",
        ),
        (Calls(lambda f, x: f(x).tolist()).eval(), (torch.randn(2, 3),), "returns no tensor"),
        (nn.Sequential().eval(), (torch.randn(2, 3),), "the model computes nothing"),
    ],
)
def test_what_cannot_be_cut(model: nn.Module, inputs: tuple[Tensor, ...], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Untraceable, match=said):
        trace(model, inputs)
    assert capfd.readouterr().err == "", "torch.export's half of a graph"


def test_what_cannot_be_cut_is_one_layer_where_nobody_asks_for_more() -> None:
    inputs = (torch.randn(3),)
    only, *_ = plan(Depends().eval(), inputs, whole=True).variants
    assert only.name == "whole"
    assert only.chain.layers[0].name == "model"
    assert torch.equal(only.module(*inputs), Depends()(*inputs))
    with pytest.raises(Untraceable, match="on its own inputs"):
        plan(Calls(fails).eval(), (torch.randn(2, 3),), whole=True)


def test_what_is_written_through_views_is_cut_too() -> None:
    torch.manual_seed(0)
    model, x = Calls(through_views).eval(), torch.randn(4, 3)
    chain = trace(model, (x,))
    assert torch.allclose(chain.root(x), model(x))
    assert [layer.kind for layer in chain.layers] == ["linear", "linear"]


def test_places_that_are_not_finite_are_no_difference() -> None:
    model, x = nn.Linear(3, 3).eval(), torch.randn(4, 3)
    model.weight.data[0, 0] = torch.nan
    model.bias.data[1] = torch.inf
    assert [layer.kind for layer in trace(model, (x,)).layers] == ["linear"]


@pytest.mark.parametrize("length", [1, 5])
def test_code_that_counts_with_shapes_is_followed(length: int) -> None:
    """Its modules and functions stay what the user calls: eager's programs cost the host what the model does."""
    x = torch.randn(2, length, 8)
    model = Sized().eval()
    chain = trace(model, (x,))
    assert torch.equal(chain.root(x), model(x))
    assert [node.target for node in chain.root.graph.find_nodes(op="call_module")] == ["project"]
    assert not any(isinstance(node.target, torch._ops.OpOverload) for node in chain.root.graph.nodes)


def test_the_model_stays_as_it_is() -> None:
    model, inputs = seeded("residual")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted, given = model(*inputs), inputs[0].clone()
    for variant in plan(model, inputs).variants:
        assert variant.module is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(inputs[0], given)
    assert torch.equal(model(*inputs), wanted)
    assert [name for name, _ in model.named_modules() if "out_of_place" in name] == []


@pytest.mark.parametrize("name", ["residual", "written", "shared", "stack"])
def test_a_plan_tells_every_layer_apart(name: str) -> None:
    """The needed variants have full rank in the layers; fewer are a beginning of them; `more` goes on behind."""
    import numpy as np

    from tilewright.bench.compare.attribution import FIRST, columns

    model, inputs = seeded(name)
    found = plan(model, inputs)
    names = [v.name for v in found.needed]
    x = columns(found.design, names, [])
    assert names[0] == "whole"
    assert np.linalg.matrix_rank(np.delete(x, range(1, FIRST), axis=1)) == 1 + x.shape[1] - FIRST
    assert [v.name for v in plan(model, inputs, 3).variants] == names[:3]
    assert not {v.name for v in found.more(5)} & {v.name for v in found.variants}
    with pytest.raises(ValueError, match="at least 1"):
        plan(model, inputs, 0)
