"""Adapters by token, in Triton's interpreter or on a GPU: random batches against float64, and a row that knows no company."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conformance import LIMITS
from tilewright import ops
from tilewright.asm.compile import record, stand_in
from tilewright.hw import env
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.gemm.lora.expand import lora_expand_add_op
from tilewright.kernels.gemm.lora.problem import tiles_of
from tilewright.nn import Linear, LoraStack
from tilewright.op import Inputs, on_card, prefer

GPU = torch.cuda.is_available()
TORCH_DEVICE = "cuda" if GPU else "cpu"
needs_triton = pytest.mark.skipif(
    not device_of(0 if GPU else -1).runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run"
)
SIZES = {"tokens": (1, 15, 16, 17, 40), "features": (8, 64, 520), "rank": (1, 3, 16, 20), "held": (1, 2, 5)}
PARTS = ((24,), (33, 7), (48, 16, 16))


def drawn(seed: int, dtype: torch.dtype) -> tuple[Linear, LoraStack, Tensor, Tensor]:
    """A layer, its adapters, x, and the adapter of each token."""
    choose = np.random.default_rng(seed)
    tokens, features, rank, held = (int(choose.choice(values)) for values in SIZES.values())
    parts, generator = PARTS[seed % 3], torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(TORCH_DEVICE)

    layer = Linear(features, parts, device=TORCH_DEVICE, dtype=dtype).requires_grad_(False)
    stack = LoraStack(parts, features, adapters=held, rank=rank, device=TORCH_DEVICE, dtype=dtype)
    for number in range(held):
        chosen = [part for part in range(len(parts)) if choose.random() < 0.8]
        own = int(choose.integers(1, rank + 1))
        pairs = {part: (randn(own, features) * features**-0.5, randn(parts[part], own)) for part in chosen}
        stack.put(number, pairs, {part: float(choose.uniform(0.2, 2)) for part in chosen})
    ids = torch.from_numpy(choose.integers(0, held + 1, tokens))
    return layer, stack, randn(tokens, features), ids.to(TORCH_DEVICE)


def truth(layer: Linear, stack: LoraStack, x: Tensor, ids: Tensor) -> Tensor:
    """One token after the other in float64."""
    rows = []
    for token, number in zip(x.double(), ids.tolist(), strict=True):
        y = layer.weight.double() @ token + layer.bias.double()  # pyright: ignore
        if number:
            a, b, scales = stack.a[number - 1].double(), stack.b[number - 1].double(), stack.scales[number - 1].double()
            low = (a @ token).view(len(stack.parts), -1) * scales[:, None]
            pieces = [up @ part for up, part in zip(b.split(stack.parts), low, strict=True)]
            y = y + torch.cat(pieces)
        rows.append(y)
    return torch.stack(rows)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_random_batches_are_those_of_the_definition(seed: int, dtype: torch.dtype) -> None:
    layer, stack, x, ids = drawn(seed, dtype)
    layer.adapter = stack
    got = layer(x, adapters=ops.adapter_order(ids)).double()
    want = truth(layer, stack, x, ids)
    scale = want.square().mean().sqrt()
    # The product, A x and the sum are rounded.
    assert ((got - want).square().mean().sqrt() / scale).item() < 3 * LIMITS[dtype][1]
    plain = layer(x)
    assert torch.equal(got[ids == 0], plain[ids == 0].double())


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_row_has_the_same_bits_in_any_company(seed: int, dtype: torch.dtype) -> None:
    layer, stack, x, ids = drawn(seed, dtype)
    y = torch.zeros(x.shape[0], sum(layer.parts), dtype=dtype, device=TORCH_DEVICE)

    def added(rows: Tensor) -> Tensor:
        return stack.activated(y[rows].clone(), x[rows], ops.adapter_order(ids[rows]), "none")

    everybody = torch.arange(x.shape[0], device=TORCH_DEVICE)
    whole = added(everybody)
    for row in (0, x.shape[0] // 2, x.shape[0] - 1):
        assert torch.equal(added(everybody[row : row + 1])[0], whole[row])
    backwards = added(everybody.flip(0)).flip(0)
    assert torch.equal(backwards, whole)


@needs_triton
@pytest.mark.parametrize(("parts", "rank"), [((128, 64, 64), 16), ((64,), 32)])
def test_without_shared_memory_rows_are_the_definition_in_any_company(parts: tuple[int, ...], rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).to(TORCH_DEVICE)

    layer = Linear(512, parts, device=TORCH_DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    stack = LoraStack(parts, 512, adapters=2, rank=rank, device=TORCH_DEVICE, dtype=torch.bfloat16)
    for number in range(2):
        pairs = {part: (randn(rank, 512, scale=512**-0.5), randn(rows, rank)) for part, rows in enumerate(parts)}
        stack.put(number, pairs, dict.fromkeys(range(len(parts)), 0.5 + number))
    x, ids = randn(29, 512), torch.tensor([2] * 18 + [0, 1] * 5 + [1], device=TORCH_DEVICE)
    layer.adapter = stack
    y = torch.zeros(29, sum(parts), dtype=torch.bfloat16, device=TORCH_DEVICE)
    with prefer("direct"):
        got = layer(x, adapters=ops.adapter_order(ids))
        added = stack.activated(y.clone(), x, ops.adapter_order(ids), "none")
        alone = stack.activated(y[:1].clone(), x[20:21], ops.adapter_order(ids[20:21]), "none")
        backwards = stack.activated(y.clone(), x.flip(0), ops.adapter_order(ids.flip(0)), "none").flip(0)
    want = truth(layer, stack, x, ids)
    scale = want.square().mean().sqrt()
    assert ((got.double() - want).square().mean().sqrt() / scale).item() < 3 * LIMITS[torch.bfloat16][1]
    assert torch.equal(backwards, added)
    assert torch.equal(alone[0], added[20])


@needs_triton
@pytest.mark.parametrize(("half", "rank", "impl"), [(128, 16, "direct"), (64, 32, "direct"), (40, 5, "separate")])
@pytest.mark.parametrize("fill", [1.0, float("nan")])
def test_a_gated_layer_has_the_bits_of_its_two_operators(half: int, rank: int, impl: str, fill: float) -> None:
    generator = torch.Generator().manual_seed(half)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).to(TORCH_DEVICE)

    layer = Linear(512, (half, half), bias=False, device=TORCH_DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    stack = LoraStack((half, half), 512, adapters=3, rank=rank, device=TORCH_DEVICE, dtype=torch.bfloat16)
    for number in range(2):
        pairs = {part: (randn(rank, 512, scale=512**-0.5), randn(half, rank)) for part in range(2)}
        stack.put(number, pairs, {0: 0.5 + number, 1: 2.0})
    stack.put(2, {part: (torch.full((rank, 512), fill), torch.full((half, rank), fill)) for part in range(2)}, {0: 1.0, 1: 1.0})
    ids = torch.tensor([2] * 18 + [0, 1] * 5 + [3, 0], device=TORCH_DEVICE)
    stack.scales[0] = fill  # of an adapter that no token has
    ids[ids == 1] = 2
    x, order = randn(len(ids), 512), ops.adapter_order(ids)
    y = layer(x)
    h = ops.lora_shrink(x, stack.a, order)
    with prefer(impl):
        got = ops.lora_expand_silu_mul(y, h, stack.b, stack.scales, order)
    want = ops.silu_mul(*ops.lora_expand_add(y.clone(), h, stack.b, stack.scales, order, (half, half)).chunk(2, -1))
    assert torch.equal(got[ids < 3], want[ids < 3])
    assert torch.equal(got[ids == 0], ops.silu_mul(*y.chunk(2, -1))[ids == 0])
    assert bool(got[ids < 3].isfinite().all())
    assert bool(got[ids == 3].isfinite().all()) == (fill == 1.0)
    layer.adapter = stack
    assert torch.equal(layer(x, "silu_mul", order)[ids == 2], want[ids == 2])


@needs_triton
def test_what_an_adapter_holds_reaches_nobody_else() -> None:
    """Not even infinities and NaN, which zeros do not silence."""
    _, stack, x, _ = drawn(0, torch.float32)
    x = x[:1].expand(20, -1).contiguous()
    stack = LoraStack((24,), x.shape[1], adapters=3, rank=4, device=TORCH_DEVICE, dtype=torch.float32)
    for number, fill in enumerate((1.0, float("nan"), float("inf"))):
        stack.put(number, {0: (torch.full((4, x.shape[1]), fill), torch.full((24, 4), fill))}, {0: 1.0})
    ids = torch.arange(20, device=TORCH_DEVICE) % 4
    y = stack.activated(torch.ones(20, 24, device=TORCH_DEVICE), x, ops.adapter_order(ids), "none")
    assert bool((y[ids == 0] == 1).all())
    assert bool(y[ids == 1].isfinite().all())
    assert bool(y[ids == 2].isnan().all())


@pytest.mark.parametrize(("tokens", "held"), [(0, 3), (1, 1), (16, 1), (17, 2), (100, 1), (100, 40), (64, 64)])
def test_tiles_are_neighbours_with_one_adapter(tokens: int, held: int) -> None:
    ids = torch.from_numpy(np.random.default_rng(tokens + held).integers(0, held + 1, tokens))
    order, adapters, starts, numbers = (row.tolist() for row in ops.adapter_order(ids))
    assert sorted(order) == list(range(tokens))
    assert adapters == sorted(ids.tolist()) == ids[order].tolist()
    count = sum(start < tokens for start in starts)
    assert count <= tiles_of(tokens, held)
    assert starts[count:] == [tokens] * (tokens - count)
    assert numbers[count:] == [0] * (tokens - count)
    for i in range(count):
        end = starts[i + 1] if i + 1 < tokens else tokens
        assert 1 <= end - starts[i] <= 16
        assert set(adapters[starts[i] : end]) == {numbers[i]}


@pytest.mark.skipif(env.interpreting(), reason="Triton interprets kernels in this process, and compiles none")
@pytest.mark.parametrize(("impl", "fetch"), [("direct", "ld.global.v2"), ("triton", "prefetch.global.L2")])
@pytest.mark.parametrize(("card", "chained"), [("h100", True), ("h100", False), ("a100", True)])
def test_what_is_chained_fetches_weights_before_it_waits(card: str, chained: bool, impl: str, fetch: str) -> None:
    device = device_named(card)
    made = lora_expand_add_op.make(Inputs(), M=20, N=512, adapters=3, chained=chained)  # pyright: ignore
    args = tuple(map(stand_in, made))
    with on_card(device), prefer(impl):
        choice = lora_expand_add_op.choose(device, lora_expand_add_op.problem(*args))
        assert choice.impl.name == impl
        (binary,) = record(choice.impl, choice.config, args, device.arch)
    parts = binary.ptx.split("griddepcontrol.wait")
    waits = 2 if chained and card == "h100" else 0  # once more in programs without an adapter
    assert len(parts) == 1 + waits
    fetching = next(part for part in parts if fetch in part)
    assert ("st.global" in fetching) == (waits == 0)  # it stores only after it has waited


def test_what_does_not_fit_is_refused() -> None:
    x, a, order = torch.zeros(3, 8), torch.zeros(2, 4, 8), ops.adapter_order(torch.tensor([0, 2, 1]))
    with pytest.raises(ValueError, match=r"got \[3, 8\] torch.float32 and \[2, 4, 9\]"):
        ops.lora_shrink(x, torch.zeros(2, 4, 9), order)
    with pytest.raises(ValueError, match=r"adapters must be contiguous \[4, 3\] torch.int32"):
        ops.lora_shrink(x, a, order.long())
    y, h, b, scales = torch.zeros(3, 6), torch.zeros(1, 3, 4), torch.zeros(2, 6, 4), torch.ones(2, 1)
    with pytest.raises(ValueError, match="parts are"):
        ops.lora_expand_add(y, h, b, scales, order, (4, 4))
    with pytest.raises(ValueError, match=r"h must be contiguous \[1, 3, 8\]"):
        ops.lora_expand_add(y, h, b, scales, order, (3, 3))
    with pytest.raises(ValueError, match="scales must be contiguous"):
        ops.lora_expand_add(y, h, b, scales.double(), order)
    with pytest.raises(ValueError, match=r"lora_expand_silu_mul: h must be contiguous \[1, 3, 8\]"):
        ops.lora_expand_silu_mul(y, h, b, scales, order)
    with pytest.raises(ValueError, match="lora_expand_silu_mul: parts are"):
        ops.lora_expand_silu_mul(y[:, :5], h, b[:, :5].contiguous(), scales, order)
