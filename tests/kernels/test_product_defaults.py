"""What runs where nothing was tuned is a config that a tuner may name: of its space's axes, and not refused there."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tilewright.hw import env
from tilewright.hw.device import device_named
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.quantized.block_scaled import block_scaled_linear_op
from tilewright.kernels.gemm.quantized.mx import mx_linear_op
from tilewright.kernels.gemm.quantized.requantized import cast_linear_op
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear_op
from tilewright.kernels.gemm.weight_only.linear import mixed_linear_op
from tilewright.op import Inputs, Op

BF16, INT8, E4M3 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
ROWS, COLS, DEPTHS = (1, 4, 8, 16, 64, 512, 4096), (16, 256, 1800, 4096, 28672), (32, 128, 256, 272, 4096, 25600)
WAYS: tuple[dict[str, Any], ...] = ({}, {"activation": "gelu", "residual": True}, {"activation": "silu_mul"})

OPS: tuple[tuple[Op, tuple[dict[str, Any], ...]], ...] = (
    (linear_op, ({"dtype": BF16}, {"dtype": torch.float32})),
    (scaled_linear_op, ({"dtype": INT8}, {"dtype": E4M3})),
    (cast_linear_op, ({"dtype": INT8}, {"dtype": E4M3, "out": torch.float32}, {"dtype": BF16, "out": E4M3})),
    (block_scaled_linear_op, ({}, {"block_rows": 1})),
    (mx_linear_op, ({},)),
    (mixed_linear_op, ({"format": "int8"}, *({"format": "int4", "group": group} for group in (32, 64, 128)))),
)


def problems(op: Op, kinds: tuple[dict[str, Any], ...]) -> Iterator[Any]:
    make: Any = op.make
    for m, n, k, way, kind in product(ROWS, COLS, DEPTHS, WAYS, kinds):
        if k % kind.get("group", 1) == 0:
            yield op.problem(*make(Inputs("meta"), M=m, N=n, K=k, **way, **kind))


@pytest.mark.skipif(env.interpreting(), reason="launches nothing: the run without the interpreter shows it")
@pytest.mark.parametrize(("op", "kinds"), OPS, ids=[op.name for op, _ in OPS])
def test_a_default_is_of_its_space(op: Op, kinds: tuple[dict[str, Any], ...]) -> None:
    cards = [device_named(name) for name in ("a100", "l4", "h100", "h200", "b200")]
    for problem, card in product(problems(op, kinds), cards):
        for impl in op.impls:
            if impl.refusal(card, problem) is not None or not impl.space.axes:
                continue
            config = impl.space.default(card, problem)
            assert config.keys() == impl.space.axes.keys(), (impl.name, card.name, problem)
            assert all(config[name] in values for name, values in impl.space.axes.items()), (impl.name, problem, config)
            assert impl.space.refusal(card, problem, config) is None, (impl.name, card.name, problem, config)
