"""Grouped products and what surrounds them, beyond the examples of conformance: ragged groups at tile edges, bounds that are
wrong, rows that do not know their batch, who is chosen on which card.

With TRITON_INTERPRET=1 the kernels run, else the definitions, where that says something.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import conformance
from tilewright import nn, ops
from tilewright.hw.device import CARD_OF_ARCH, device_of
from tilewright.kernels.gemm.grouped.block_scaled import grouped_block_scaled_linear_op
from tilewright.kernels.gemm.grouped.linear import grouped_linear_op
from tilewright.kernels.gemm.grouped.problem import GROUPED_ACTIVATIONS, most_tiles
from tilewright.kernels.gemm.grouped.row_scaled import grouped_scaled_linear_op
from tilewright.kernels.gemm.grouped.weight_gradient import grouped_weight_gradient_op
from tilewright.kernels.gemm.grouped.weight_only import grouped_mixed_linear_op
from tilewright.op import Inputs, Op, invariant
from tilewright.quant import quantize
from tilewright.tune.tolerance import Poisoned

needs_kernels = pytest.mark.skipif(device_of(-1).kind != "interpret", reason="needs TRITON_INTERPRET=1")
PRODUCTS = [grouped_linear_op, grouped_block_scaled_linear_op, grouped_mixed_linear_op, grouped_scaled_linear_op]
H100, A100 = CARD_OF_ARCH[90], CARD_OF_ARCH[80]

SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 7, 15, 16, 17, 40]), min_size=1, max_size=5)


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)


def impl_of(op: Op, name: str) -> Any:
    return next(impl for impl in op.impls if impl.name == name)


# ---- products


@needs_kernels
@settings(max_examples=8, deadline=None, derandomize=True)
@given(SIZES, st.integers(0, 9), st.sampled_from([24, 34]), st.sampled_from([16, 41]), st.sampled_from([*GROUPED_ACTIVATIONS]))
def test_any_groups(sizes: list[int], tail: int, n: int, k: int, activation: str) -> None:
    inputs, rows = Inputs(seed=sum(sizes)), sum(sizes) + tail
    args = (
        inputs.randn(rows, k, dtype=torch.bfloat16), inputs.randn(len(sizes), n, k, dtype=torch.bfloat16, scale=k**-0.5),
        offsets_of(sizes), inputs.randn(len(sizes), n, dtype=torch.bfloat16), activation, None, 1,
    )  # fmt: skip
    impl = impl_of(grouped_linear_op, "triton")
    config = impl.space.default(H100, grouped_linear_op.problem(*args))
    conformance.check(grouped_linear_op, impl, config, args)
    dy = inputs.randn(rows, n, dtype=torch.bfloat16)
    gradient = impl_of(grouped_weight_gradient_op, "triton")
    config = gradient.space.default(H100, grouped_weight_gradient_op.problem(dy, args[0], args[2]))
    conformance.check(grouped_weight_gradient_op, gradient, config, (dy, args[0], args[2]))


@needs_kernels
@pytest.mark.parametrize("bounds", [[0, 90, 3, 5], [-7, 2, 2, 9], [5, 5, 5, 5], [2**30, 0, -(2**30), 2**31 - 1]], ids=str)
def test_wrong_bounds_stay_inside(bounds: list[int]) -> None:
    """Rows come out wrong; memory beside the result is as it was."""
    inputs = Inputs()
    x, weight = inputs.randn(20, 16, dtype=torch.float16), inputs.randn(3, 8, 16, dtype=torch.float16)
    impl = impl_of(grouped_linear_op, "triton")
    whole = torch.full((60, 8), 7.0, dtype=torch.float16)
    empty = torch.empty

    def inside(*shape: Any, **options: Any) -> Tensor:
        return whole[20:40] if shape == ((20, 8),) else empty(*shape, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", inside)
        args = (x, weight, torch.tensor(bounds, dtype=torch.int32), None, "none", None, 1, True)
        impl.launch(impl.space.default(H100, grouped_linear_op.problem(*args)), *args)
    assert (whole[:20] == 7.0).all()
    assert (whole[40:] == 7.0).all()


@needs_kernels
@pytest.mark.parametrize("layout", ["sorted", "masked"])
@pytest.mark.parametrize("op", PRODUCTS, ids=lambda op: op.name)
def test_rows_that_belong_to_nobody_are_left_alone(op: Op, layout: str) -> None:
    """Without `clear`; all others are as with it."""
    make: Any = op.make
    skew = {} if layout == "masked" else {"skew": "tail"}
    args = make(Inputs(seed=2), X=3, M=120, N=40, K=64, layout=layout, **skew)
    impl = impl_of(op, "triton")
    config = impl.space.default(H100, op.problem(*args))
    want = impl.launch(config, *args)
    with Poisoned():
        got = impl.launch(config, *args[:-1], False)
    bounds = next(a for a in args if isinstance(a, Tensor) and a.dtype == torch.int32)
    if layout == "masked":
        used = torch.arange(want.shape[1])[None] < bounds[:, None]
    else:
        used = torch.arange(want.shape[0]) < bounds[-1]
    assert torch.equal(got[used], want[used])
    assert not want[~used].any()
    assert got[~used].isnan().all()
    assert (~used).any()


@needs_kernels
@pytest.mark.parametrize("sizes", [[3, 0, 5, 0], [0, 0], [70, 0, 30]], ids=str)
def test_what_torch_leaves_unwritten_is_zero(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`vendor` behind a `grouped_mm` that writes what it has to, and nothing else."""
    inputs, rows, offsets = Inputs(seed=3), sum(sizes) + 9, offsets_of(sizes)
    x, dy = inputs.randn(rows, 24), inputs.randn(rows, 16)
    weight = inputs.randn(len(sizes), 16, 24)

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (len(sizes), a.shape[0], b.shape[1])
        y, start = torch.full(shape, torch.nan), 0
        for e, end in enumerate(offs.tolist()):
            if end > start and b.dim() == 3:
                y[start:end] = a[start:end] @ b[e]
            elif end > start:
                y[e] = a[:, start:end] @ b[start:end]
            start = end
        return y

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm, raising=False)
    args = (x, weight, offsets, None, "none", None, 1)
    want = grouped_linear_op.reference(*args)
    torch.testing.assert_close(impl_of(grouped_linear_op, "vendor").launch({}, *args), want)
    want = grouped_weight_gradient_op.reference(dy, x, offsets)
    torch.testing.assert_close(impl_of(grouped_weight_gradient_op, "vendor").launch({}, dy, x, offsets), want)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 100), st.sampled_from([16, 64, 128]))
def test_programs_for_all_tiles(sizes: list[int], tail: int, block: int) -> None:
    tiles = sum(-(-size // block) for size in (*sizes, tail))
    assert tiles <= most_tiles(sum(sizes) + tail, len(sizes), block)


# ---- invariance


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_row_does_not_know_its_batch(dtype: torch.dtype) -> None:
    """A token of a mixture of experts alone, and among others, bitwise; every operator of it says that it is invariant."""
    routing = nn.Routing(method="greedy", experts=5, chosen=2, normalise=True)
    layer = nn.MoE(32, 16, shared=8, routing=routing, device="cpu", dtype=dtype)
    x = Inputs(seed=4).randn(21, 32, dtype=dtype)
    with torch.no_grad(), invariant():
        whole = layer(x)
        for row in (0, 20):
            assert torch.equal(layer(x[row : row + 1])[0], whole[row])
        assert torch.equal(layer(x[5:16]), whole[5:16])


@needs_kernels
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_row_of_quantised_experts_does_not_know_its_batch(format: str) -> None:
    routing = nn.Routing(method="greedy", experts=3, chosen=2, normalise=True)
    layer = nn.MoE(64, 64, shared=0, routing=routing, device="cpu", dtype=torch.bfloat16)
    quantize(layer, format)
    x = Inputs(seed=4).randn(34, 64, dtype=torch.bfloat16)
    with torch.no_grad(), invariant():
        whole = layer(x)
        assert torch.equal(layer(x[:1])[0], whole[0])
        assert torch.equal(layer(x[33:])[0], whole[33])


# ---- routing and sorting


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(0, 99))
def test_sorting(tokens: int, count: int, chosen: int, seed: int) -> None:
    experts = torch.randint(0, count, (tokens, chosen), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    offsets, order, places = ops.sort_by_expert(experts, count)
    pairs = sorted((expert, row) for row, expert in enumerate(experts.flatten().tolist()))
    assert order.tolist() == [row for _, row in pairs]
    assert [order[place] for place in places.flatten()] == list(range(tokens * chosen))
    for expert in range(count):
        assert all(e == expert for e, _ in pairs[offsets[expert] : offsets[expert + 1]])


@pytest.mark.parametrize("values", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_routing_takes_distinct_experts_whatever_the_logits(values: float) -> None:
    """Numbers that are none still name experts that exist: nothing behind them reads outside of a weight."""
    logits = torch.full((3, 7), values)
    logits[1, 4] = 1.0
    for softmax in (True, False):
        _, experts = ops.route_experts(logits, 4, softmax=softmax)
        assert all(len(set(row)) == 4 and set(row) <= set(range(7)) for row in experts.tolist())
    assert ops.route_experts(torch.zeros(1, 7), 3)[1].tolist() == [[0, 1, 2]]


# ---- choices and refusals


def problem(**dims: Any) -> Any:
    assert grouped_linear_op.make is not None
    args = grouped_linear_op.make(Inputs("meta"), **{"X": 8, "M": 4096, "N": 512, "K": 512, **dims})
    return grouped_linear_op.problem(*args)


def refusal(name: str, card: Any, **dims: Any) -> str | None:
    return impl_of(grouped_linear_op, name).refusal(card, problem(**dims))


def test_who_is_chosen() -> None:
    assert grouped_linear_op.choose(H100, problem()).impl.name == "sm90"
    assert grouped_linear_op.choose(H100, problem(M=64)).impl.name == "triton"
    assert grouped_linear_op.choose(H100, problem(M=128)).impl.name == "sm90"
    assert grouped_linear_op.choose(H100, problem(dtype=torch.float32)).impl.name == "triton"
    assert grouped_linear_op.choose(CARD_OF_ARCH[100], problem()).impl.name == "vendor"
    assert grouped_linear_op.choose(A100, problem()).impl.name == "triton"
    with invariant():
        assert grouped_linear_op.choose(H100, problem()).impl.name == "invariant"


def test_refusals_say_why() -> None:
    assert refusal("sm90", H100) is None
    assert refusal("sm90", A100) == "needs sm_90, this is sm_80"
    assert refusal("sm90", H100, dtype=torch.float32) == "does not support torch.float32"
    assert "multiples of 16 bytes" in str(refusal("sm90", H100, K=513))
    assert "a multiple of 64" in str(refusal("sm90", H100, w_major="n", K=520))
    assert "clamped_silu_mul" in str(refusal("sm90", H100, activation="clamped_silu_mul"))
    assert "sm_90 and sm_100" in str(refusal("vendor", A100))
    assert "bfloat16 only" in str(refusal("vendor", H100, dtype=torch.float16))
    assert "support a bias" in str(refusal("vendor", H100, bias=True))
    assert "masked layout" in str(refusal("vendor", H100, layout="masked"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": torch.zeros(6, 32, dtype=torch.float64)}, "x must be bfloat16 or float16"),
        ({"codes": torch.zeros(2, 8, 16, dtype=torch.uint8)}, r"weight \[X, N, K\]"),
        ({"codes": torch.zeros(2, 8, 32, dtype=torch.int8)[..., ::2]}, r"weight \[X, N, K\]"),
        ({"scales": torch.zeros(2, 8, 2)}, r"scales must be \[2, 8\]"),
        ({"zeros": torch.zeros(2, 8, dtype=torch.uint8)}, "only int4 codes have zero points"),
        ({"bounds": torch.zeros(2, dtype=torch.int32)}, r"wanted offsets \[X \+ 1\], int32 \[3\]"),
        ({"bias": torch.zeros(2, 8).half()}, "bias must be of the output's dtype"),
        ({"order": torch.zeros(6), "chosen": 1}, "order must be int32"),
        ({"block_cols": 16}, "a scale is for a row"),
    ],
)
def test_weight_only_refuses(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(6, 32).bfloat16(), "codes": torch.zeros(2, 8, 32, dtype=torch.int8), "scales": torch.ones(2, 8),
        "zeros": None, "bounds": torch.tensor([0, 2, 6], dtype=torch.int32),
    }  # fmt: skip
    assert ops.grouped_mixed_linear(**given).shape == (6, 8)
    with pytest.raises(ValueError, match=words):
        ops.grouped_mixed_linear(**given | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": torch.zeros(6, 32)}, "x and weight must be int8, float8_e4m3fn or float8_e5m2"),
        ({"x_scales": torch.ones(5)}, r"x_scales must be \[6\]"),
        ({"w_scales": torch.ones(2, 1)}, r"w_scales must be \[2, 8\]"),
        ({"dtype": torch.float64}, "dtype must be bfloat16 or float16"),
        ({"chosen": 0, "order": torch.zeros(6, dtype=torch.int32)}, "order must be int32"),
        ({"activation": "tanh"}, "activation must be one of"),
    ],
)
def test_scaled_by_rows_refuses(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(6, 32, dtype=torch.int8), "weight": torch.zeros(2, 8, 32, dtype=torch.int8), "x_scales": torch.ones(6),
        "w_scales": torch.ones(2, 8), "bounds": torch.tensor([0, 2, 6], dtype=torch.int32),
    }  # fmt: skip
    assert ops.grouped_scaled_linear(**given).shape == (6, 8)
    with pytest.raises(ValueError, match=words):
        ops.grouped_scaled_linear(**given | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": torch.zeros(6, 32)}, "x and weight must be float8_e4m3fn or float8_e5m2"),
        ({"x_scales": torch.zeros(6, 2)}, r"x_scales must be \[6, 1\]"),
        ({"w_scales": torch.zeros(2, 8, 1)}, r"w_scales must be \[2, 1, 1\]"),
        ({"bounds": torch.zeros(2, dtype=torch.int32)}, r"wanted offsets \[X \+ 1\], int32 \[3\]"),
        ({"dtype": torch.float64}, "dtype must be bfloat16 or float16"),
        ({"bias": torch.zeros(2, 8).half()}, "bias must be of the output's dtype"),
    ],
)
def test_scaled_by_blocks_refuses(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(6, 32).to(torch.float8_e4m3fn), "weight": torch.zeros(2, 8, 32).to(torch.float8_e4m3fn),
        "x_scales": torch.ones(6, 1), "w_scales": torch.ones(2, 1, 1), "bounds": torch.tensor([0, 2, 6], dtype=torch.int32),
    }  # fmt: skip
    assert ops.grouped_block_scaled_linear(**given).shape == (6, 8)
    with pytest.raises(ValueError, match=words):
        ops.grouped_block_scaled_linear(**given | changed)


# ---- on a card


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_captured_layer_follows_its_input(dtype: torch.dtype) -> None:
    """Nothing waits for the host: one capture serves any routing, all tokens to one expert as well."""
    routing = nn.Routing(method="greedy", experts=16, chosen=4, normalise=True)
    layer = nn.MoE(256, 128, shared=0, routing=routing, device="cuda", dtype=dtype)
    tokens = [Inputs("cuda", seed=seed).randn(96, 256, dtype=dtype) for seed in range(3)]
    tokens.append(tokens[0][:1].expand(96, 256).contiguous())
    x = tokens[0].clone()
    with torch.no_grad():
        wanted = [layer(t) for t in tokens]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for t, want in zip(tokens, wanted, strict=True):
            x.copy_(t)
            graph.replay()
            assert torch.equal(y, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_know_its_batch_on_a_card(dtype: torch.dtype) -> None:
    routing = nn.Routing(method="greedy", experts=16, chosen=4, normalise=True)
    layer = nn.MoE(256, 128, shared=64, routing=routing, device="cuda", dtype=dtype)
    x = Inputs("cuda", seed=4).randn(700, 256, dtype=dtype)
    with torch.no_grad(), invariant():
        whole = layer(x)
        for part in (slice(0, 1), slice(699, 700), slice(5, 22), slice(100, 400)):
            assert torch.equal(layer(x[part]), whole[part])


SHARED = {"X": 9, "N": 512, "K": 384}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("op", PRODUCTS, ids=lambda op: op.name)
@pytest.mark.parametrize("more", [{"skew": "random"}, {"skew": "one"}, {"skew": "tail"}, {"layout": "masked"}], ids=str)
def test_every_config_at_tile_edges(op: Op, more: dict[str, Any]) -> None:
    """Each config of each implementation that this card has, against float64, twice, with a gate and without."""
    make: Any = op.make
    card = device_of(0)
    for rows, activation in ((9 * 127, "none"), (9 * 257, "silu_mul"), (30, "silu_mul")):
        own = {"group": 128, "zeros": True} if op is grouped_mixed_linear_op and rows != 30 else {}
        args = make(Inputs("cuda", seed=rows), **SHARED, M=rows, activation=activation, bias=True, **more, **own)
        problem = op.problem(*args)
        for impl in op.impls:
            if impl.refusal(card, problem) is None:
                for config in impl.space.configs(card, problem) if impl.space.axes else [{}]:
                    conformance.check(op, impl, config, args)
