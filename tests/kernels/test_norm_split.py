"""layer_norm of wide rows that several programs share: one row or two a program."""

import pytest
import torch

from tests import conformance
from tilewright.asm.certificate import load
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.launch.row_space import Rows
from tilewright.kernels.norm.layer_norm import layer_norm_op, layer_norm_stats_op
from tilewright.op import Inputs, Op

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: these kernels cannot be interpreted")
H100 = device_named("h100")
IMPLS = {impl.name: impl for impl in layer_norm_op.impls}


@pytest.mark.parametrize("op", [layer_norm_op, layer_norm_stats_op], ids=lambda op: op.name)
def test_no_config_spills(op: Op) -> None:
    for row in load(op.name)["configs"]["split/sm_90"]:
        assert not any(kernel.get("spill_bytes") for kernel in row["kernels"]), row["config"]


def test_as_many_rows_as_pay() -> None:
    """Four rows a program where their parts are 32 at most, then two; and no more than a card holds at once."""
    found = []
    for cols in (262144, 524288, 1048576):
        choice = layer_norm_op.choose(H100, Rows(torch.bfloat16, cols))
        assert choice.impl.name == "split"
        assert choice.config is not None
        found.append(choice.config["ROWS"])
    assert found == [4, 2, 1]
    # 132 parts of 64 KB hold one row of 4325376 columns, not two.
    space = IMPLS["split"].space
    assert space is not None
    wide = Rows(torch.bfloat16, 132 * 32768)
    assert [config["ROWS"] for config in space.configs(H100, wide)] == [1]
    assert space.default(H100, wide)["ROWS"] == 1


@needs_gpu
@pytest.mark.parametrize("op", [layer_norm_op, layer_norm_stats_op], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "row_stride", "mean", "bias"),
    [
        (1, 65536, 0, 0.0, True),
        (7, 16392, 0, 10.0, False),
        (131, 65544, 65552, 0.0, True),  # a last part that is narrower, an odd number of rows
        (41, 100008, 100016, 0.0, True),  # a gap between rows
        (37, 262144, 0, 10.0, True),
    ],
)
def test_every_config(op: Op, dtype: torch.dtype, rows: int, cols: int, row_stride: int, mean: float, bias: bool) -> None:
    """Against float64, twice with the same bits."""
    inputs = Inputs("cuda")
    x = inputs.randn(rows, row_stride or cols, dtype=dtype)[:, :cols]
    args = (x + mean if mean else x, inputs.randn(cols, dtype=dtype), inputs.randn(cols, dtype=dtype) if bias else None, 1e-5)
    device, problem = device_of(0), op.problem(*args)
    (split,) = (impl for impl in op.impls if impl.name == "split")
    if (why := split.refusal(device, problem)) is not None:
        pytest.skip(f"split refuses it: {why}")
    assert split.space is not None
    for config in split.space.configs(device, problem):
        conformance.check(op, split, config, args)
