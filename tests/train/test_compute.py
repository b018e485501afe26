"""Products of float8 codes in training: against their definition in float64, what is chosen and refused, and whole runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.runs import config_of, log_of
from tilewright import nn, ops
from tilewright.formats import dequantize, quantize
from tilewright.hw.ceilings import Ceilings
from tilewright.models import SHAPES, empty_model
from tilewright.ops.linear_fp8 import Fp8Recipe, fp8_seconds
from tilewright.parallel.plan import Plan
from tilewright.train.compute import refusal, set_compute
from tilewright.train.config import TrainConfig, merged, read_toml
from tilewright.train.main import train

CPU = torch.device("cpu")
H100 = Ceilings(
    copy=3.0e12, read=3.1e12, write=3.3e12, l2=5e12, flops={"bf16": 726e12, "fp8": 1444e12}, source="measured on an H100"
)  # fmt: skip


def rounded(x: Tensor, block: str) -> Tensor:
    """x as its codes say it, float64."""
    return dequantize(quantize(x.float(), "fp8", block)).double()


def operands(dtype: torch.dtype, rows: int = 40, n: int = 64, k: int = 96) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, whose tokens differ in size; weight, bias, and dy."""
    generator = torch.Generator().manual_seed(0)
    x, w, b, dy = (torch.randn(*size, generator=generator) for size in ((rows, k), (n, k), (n,), (rows, n)))
    sizes = torch.logspace(-3, 2, rows)[:, None]
    return (x * sizes).to(dtype), (w / k**0.5).to(dtype), b.to(dtype), (dy * sizes.flip(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_gradient", [False, True], ids=["two", "all"])
@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_products_are_those_of_the_codes(scale: str, weight_gradient: bool, dtype: torch.dtype) -> None:
    x, w, b, dy = operands(dtype)
    given = [t.clone().requires_grad_(True) for t in (x, w, b)]
    y = ops.linear_fp8(given[0], given[1], given[2], "none", scale, weight_gradient)
    dx, dw, db = torch.autograd.grad(y, given, dy)
    exact = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    weight_products = (
        dy.double().mT @ x.double(), rounded(dy.mT.contiguous(), "row") @ rounded(x.mT.contiguous(), scale).mT
    )  # fmt: skip
    for found, wanted in (
        (y, rounded(x, scale) @ rounded(w, scale).mT + b.double()),
        (dx, rounded(dy, "row") @ rounded(w.mT.contiguous(), scale).mT),
        (dw, weight_products[weight_gradient]),
        (db, dy.double().sum(0)),
    ):
        off = (found.double() - wanted).abs() / (wanted.abs() + wanted.square().mean(-1, keepdim=True).sqrt())
        assert off.max() < exact, off.max()


def test_gradients_are_those_of_plain_products_within_the_format() -> None:
    x, w, b, dy = operands(torch.float32)
    given = [t.clone().requires_grad_(True) for t in (x, w, b)]
    found = torch.autograd.grad(ops.linear_fp8(given[0], given[1], given[2]), given, dy)
    exact = [t.double().requires_grad_(True) for t in (x, w, b)]
    wanted = torch.autograd.grad(torch.nn.functional.linear(*exact), exact, dy.double())
    # Codes of 3 bits behind the point are off by 2^-4 at most, by 0.026 of their size in the mean of squares; two operands.
    off = ((found[0].double() - wanted[0]).norm(dim=1) / wanted[0].norm(dim=1)).max()
    assert 0.01 < off < 2**-4
    assert all(torch.allclose(a.double(), e, rtol=1e-5, atol=1e-5) for a, e in zip(found[1:], wanted[1:]))


def test_a_layer_has_its_activation_and_is_exact_where_nothing_is_recorded() -> None:
    layer = nn.Linear(96, (32, 32), dtype=torch.float32)
    x = torch.randn(3, 5, 96)
    plain = layer(x, "silu_mul")
    layer.fp8 = Fp8Recipe()
    with torch.no_grad():
        assert torch.equal(layer(x, "silu_mul"), plain)
    fp8 = layer(x, "silu_mul")
    assert fp8.shape == (3, 5, 32)
    assert 0.01 < (fp8 - plain).norm() / plain.norm() < 0.1


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w, _, _ = operands(torch.float32)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., K\] and weight \[N, K\]"):
        ops.linear_fp8(x[:, 1:], w)
    with pytest.raises(ValueError, match="scale is 'frog', wanted row or tensor"):
        ops.linear_fp8(x, w, scale="frog")


def layer_of(rows: int, cols: int) -> nn.Linear:
    """On "meta"."""
    return nn.Linear(cols, rows, bias=False, device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "cols", "tokens", "changes", "words"),
    [
        (16384, 3072, 8192, {}, None),
        (3072, 8192, 8192, {}, None),
        (512, 512, 512, {}, "512 x 512 with 512 tokens take"),
        (1000, 4096, 8192, {}, "not multiples of 16"),
        (4096, 4104, 8192, {}, "not multiples of 16"),
        (4096, 4112, 8192, {"parallel": Plan(tp=2)}, "in 2 slices has sides"),
        (3072, 3072, 64, {}, "including the quantisation"),
    ],
)
def test_a_layer_that_does_not_gain_says_why(
    rows: int, cols: int, tokens: int, changes: dict[str, Any], words: str | None
) -> None:
    config = TrainConfig(row_tokens=tokens, micro_rows=1, compute="fp8", **changes)
    why = refusal(layer_of(rows, cols), config, H100)
    assert why is None if words is None else words in (why or "")


@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_the_price_of_float8_grows_with_what_is_quantised(scale: str) -> None:
    plain, fp8 = fp8_seconds(8192, 16384, 3072, H100, 0.0, scale)
    products = 2 * (2 * 8192 * 16384 * 3072) / 1444e12
    moved = {"row": 3, "tensor": 5}[scale] * 8192 * 3072 + 3 * 8192 * 16384 + 6 * 16384 * 3072
    written = 2 * 8192 * (16384 + 3072)
    assert plain == pytest.approx(2 * (2 * 8192 * 16384 * 3072) / 726e12)
    assert fp8 == pytest.approx(products + moved / 3.0e12 + written / 3.3e12, rel=0.01)


def test_every_launch_counts() -> None:
    before = fp8_seconds(8192, 4096, 4096, H100, 0.0), fp8_seconds(8192, 4096, 4096, H100, 0.0, "tensor")
    behind = fp8_seconds(8192, 4096, 4096, H100, 1.0), fp8_seconds(8192, 4096, 4096, H100, 1.0, "tensor")
    more = [tuple(round(b - a) for a, b in zip(*pair)) for pair in zip(before, behind)]
    assert more == [(2, 7), (2, 8)]
    assert round(fp8_seconds(8192, 4096, 4096, H100, 1.0, "row", True)[1]) == 12


def test_the_gradient_of_a_weight_gains_less_than_the_other_products() -> None:
    """Its operands are quantised for it alone."""
    two = fp8_seconds(8192, 16384, 3072, H100, 0.0)
    three = fp8_seconds(8192, 16384, 3072, H100, 0.0, "row", True)
    assert three[0] == pytest.approx(1.5 * two[0])
    moved = 3 * 8192 * (3072 + 16384)
    assert three[1] - two[1] == pytest.approx(
        2 * 8192 * 16384 * 3072 / 1444e12 + moved / 3.0e12 + 2 * 16384 * 3072 / 3.3e12, rel=0.01
    )


@pytest.mark.parametrize(
    ("shape", "rows", "fp8"),
    [("qwen3-0.6b", 4, ()), ("llama-1b", 2, ("gate_up", "down")), ("llama-3b", 2, ("qkv", "o", "gate_up", "down"))],
)
def test_models_gain_as_their_layers_are_wide(shape: str, rows: int, fp8: tuple[str, ...]) -> None:
    config = TrainConfig(model=shape, init="random", row_tokens=4096, micro_rows=rows, compute="fp8")
    model: Any = empty_model(SHAPES[shape], device="meta", dtype=torch.bfloat16)
    block = model.blocks[0]
    layers = {"qkv": block.attn.qkv, "o": block.attn.out, "gate_up": block.ffn.gate_up, "down": block.ffn.down}
    assert tuple(name for name, layer in layers.items() if refusal(layer, config, H100) is None) == fp8


def test_a_run_says_which_layers_multiply_codes() -> None:
    shape = replace(SHAPES["qwen3-0.6b"], num_hidden_layers=2, windows=(None, None), intermediate_size=3084)
    model: Any = empty_model(shape, device="meta", dtype=torch.bfloat16)
    said = set_compute(TrainConfig(compute="fp8-tensor"), model, CPU)
    assert [line.partition(":")[0] for line in said] == [
        "fp8-tensor", "not blocks.0.ffn.gate_up and 1 more", "not blocks.0.ffn.down and 1 more"
    ]  # fmt: skip
    assert [block.attn.qkv.fp8 for block in model.blocks] == [Fp8Recipe("tensor")] * 2
    assert model.blocks[0].ffn.down.fp8 is None
    assert model.head.fp8 is None


def test_a_run_in_which_nothing_gains_is_refused() -> None:
    shape = replace(SHAPES["qwen3-0.6b"], num_hidden_layers=1, windows=(None,), hidden_size=1000)
    with pytest.raises(ValueError, match="no layer gets faster with it; set it to dtype"):
        set_compute(TrainConfig(compute="fp8"), empty_model(shape, device="meta", dtype=torch.bfloat16), CPU)


@pytest.mark.parametrize("changes", [{"lora_rank": 8}, {"loss": "dpo"}], ids=str)
def test_adapters_and_preferences_have_no_float8(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="compute is fp8, which supports only training all weights"):
        TrainConfig(compute="fp8", **changes)


def losses(config: Path) -> list[float]:
    """Of each update of a run."""
    made = merged(read_toml(config), {})
    train(made, say=lambda words: None)
    return [loss for _, loss, _ in log_of(Path(made.out))]


@pytest.mark.parametrize("compute", ["fp8", "fp8-all", "fp8-tensor"])
def test_a_run_learns_as_with_plain_products(tmp_path: Path, compute: str) -> None:
    size: dict[str, Any] = {"steps": 60, "micro_batches": 1, "save_every": 60, "log_every": 60}
    plain, fp8 = (losses(config_of(tmp_path, how, compute=how, **size)) for how in ("dtype", compute))
    assert plain != fp8
    assert abs(plain[0] - fp8[0]) < 0.02
    assert sum(plain[-10:]) / 10 < plain[0] - 2
    assert abs(sum(plain[-10:]) - sum(fp8[-10:])) / 10 < 0.05
