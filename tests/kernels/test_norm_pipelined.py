"""layer_norm of wide rows that several programs share: `pipelined`, and two rows a program of `split`."""

from typing import Any

import pytest
import torch

from tests import conformance
from tilewright.asm.certificate import load
from tilewright.hw.device import CARDS, device_named, device_of
from tilewright.kernels import norm_pipelined
from tilewright.kernels.layer_norm import Problem, layer_norm_op
from tilewright.kernels.layer_norm_stats import layer_norm_stats_op
from tilewright.kernels.norm_pipelined import PIPELINED_SPACE
from tilewright.op import Inputs, Op

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: these kernels cannot be interpreted")
H100 = device_named("h100")
IMPLS = {impl.name: impl for impl in layer_norm_op.impls}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [16392, 65544, 131072, 262144])
def test_configs_fit_the_card(cols: int, dtype: torch.dtype) -> None:
    """An H100 holds as many programs of each config as it counts on, and two groups at least; no part is empty."""
    problem = Problem(dtype, cols)
    configs = list(PIPELINED_SPACE.configs(H100, problem))
    assert PIPELINED_SPACE.default(H100, problem) in configs
    assert {config["PER_SM"] for config in configs} == {1, 2}
    for config in configs:
        shared = norm_pipelined._shared_bytes(config, problem)
        assert shared <= H100.smem_bytes
        assert config["PER_SM"] * (shared + 1024) <= 228 * 1024
        parts = -(-cols // config["BLOCK_D"])
        assert 2 * parts <= config["PER_SM"] * H100.sms
        width = -(-cols // (8 * parts)) * 8
        assert width <= config["BLOCK_D"]
        assert (parts - 1) * width < cols <= parts * width


@pytest.mark.parametrize(
    ("cols", "reason"),
    [(16384, "fewer threads"), (131068, "start anywhere"), (4096 * 132 + 8, "holds twice")],
)
def test_refused_rows(cols: int, reason: str) -> None:
    assert reason in str(IMPLS["pipelined"].refusal(H100, Problem(torch.bfloat16, cols)))
    assert layer_norm_op.choose(H100, Problem(torch.bfloat16, cols)).impl.name != "pipelined"


@pytest.mark.parametrize("slug", sorted(CARDS))
def test_cards_without_room_refuse(slug: str) -> None:
    room = CARDS[slug].smem_bytes > 2 * 68 * 1024
    assert (IMPLS["pipelined"].refusal(CARDS[slug], Problem(torch.bfloat16, 65536)) is None) == room


@pytest.mark.parametrize(
    ("op", "configs"), [(layer_norm_op, 13), (layer_norm_stats_op, 13)], ids=lambda v: getattr(v, "name", "")
)
def test_certified_configs(op: Op, configs: int) -> None:
    """No config spills, none has more than 128 registers, and a config's own count of shared memory is the compiler's."""
    rows = load(op.name)["configs"]["pipelined/sm_90"]
    assert len(rows) >= configs
    for row in rows:
        (kernel,) = row["kernels"]
        assert not kernel.get("spill_bytes"), row["config"]
        assert kernel["registers"] <= 128
        problem = Problem(torch.float32 if "float32" in row["at"] else torch.bfloat16, 131072)
        assert kernel["shared_bytes"] == norm_pipelined._shared_bytes(row["config"], problem), row["config"]
    for row in load(op.name)["configs"]["split/sm_90"]:
        assert not any(kernel.get("spill_bytes") for kernel in row["kernels"]), row["config"]


def test_two_rows_a_program_are_not_picked_unmeasured() -> None:
    problem = Problem(torch.bfloat16, 262144)
    choice: Any = layer_norm_op.choose(H100, problem)
    assert (choice.impl.name, choice.config["ROWS"]) == ("split", 1)
    assert [config["ROWS"] for config in IMPLS["split"].space.configs(H100, problem)] == [1, 2]
    # 132 parts of 64 KB hold one row of 4325376 columns, not two.
    wide = Problem(torch.bfloat16, 132 * 32768)
    assert [config["ROWS"] for config in IMPLS["split"].space.configs(H100, wide)] == [1]


@needs_gpu
@pytest.mark.parametrize("op", [layer_norm_op, layer_norm_stats_op], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "row_stride", "mean", "bias"),
    [
        (1, 65536, 0, 0.0, True),
        (7, 16392, 0, 10.0, False),
        (131, 65544, 65552, 0.0, True),  # a last part that is narrower, rows that are no whole block
        (41, 100008, 100012, 0.0, True),  # rows that do not start at 16 bytes
        (37, 262144, 0, 10.0, True),
    ],
)
def test_every_config(op: Op, dtype: torch.dtype, rows: int, cols: int, row_stride: int, mean: float, bias: bool) -> None:
    """Against float64, twice with the same bits."""
    inputs = Inputs("cuda")
    x = inputs.randn(rows, row_stride or cols, dtype=dtype)[:, :cols]
    args = (x + mean if mean else x, inputs.randn(cols, dtype=dtype), inputs.randn(cols, dtype=dtype) if bias else None, 1e-5)
    device, problem = device_of(0), op.problem(*args)
    for impl in op.impls:
        if impl.name in ("split", "pipelined") and impl.refusal(device, problem) is None:
            for config in impl.space.configs(device, problem):
                conformance.check(op, impl, config, args)
