"""`conv` and `conv_transpose` on Hopper without one: what their launchers hand to the kernel, and what they refuse.

The kernel itself runs in the conformance tests on a card, and is compiled for every example and representative by the
certificates. Here its addressing is done in plain torch: a position of the filter is a shift of one phase of x.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.conv import sm90 as conv_sm90_launch
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.inputs import conv_arguments, conv_transpose_arguments
from tilewright.kernels.conv.problem import problem_of
from tilewright.kernels.conv.sm90 import SM90
from tilewright.kernels.conv.sm90_im2col import Launch, box_of, phases_of
from tilewright.kernels.conv.transpose import sm90 as conv_sm90_transpose
from tilewright.kernels.conv.transpose.conv_transpose import conv_transpose_op
from tilewright.kernels.conv.transpose.sm90 import TRANSPOSE_SM90
from tilewright.kernels.device.activations import activated
from tilewright.kernels.launch.plan import Plan
from tilewright.op import Inputs

H100 = CARD_OF_ARCH[90]


def by_shifts(config: Mapping[str, Any], work: Launch, whole: tuple[Tensor, Tensor, Tensor] | None = None) -> Plan:
    """What the kernel computes, position by position of the filter."""
    operands = (work.x, work.weight, work.y)
    for t, of in zip(operands, whole or operands, strict=True):
        assert t.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
        assert t.stride(-1) == 1
        assert all(step * t.element_size() % 16 == 0 for step in t.stride()[:-1])
        assert t.storage_offset() * t.element_size() % 16 == 0
    kernel, (rows, cols) = (work.weight.shape[1], work.weight.shape[2]), work.y.shape[1:3]
    phases = phases_of(kernel, work.stride, work.padding, work.dilation)
    assert len(phases) <= 4
    y = torch.zeros(work.y.shape, dtype=torch.float64)
    for r in range(kernel[0]):
        for s in range(kernel[1]):
            down, row = divmod(r * work.dilation[0] - work.padding[0], work.stride[0])
            right, col = divmod(s * work.dilation[1] - work.padding[1], work.stride[1])
            assert (row, col) in phases
            phase = work.x[:, row :: work.stride[0], col :: work.stride[1]].double()
            high, wide = (max(shift + size - has, 0) for shift, size, has in zip((down, right), (rows, cols), phase.shape[1:3]))
            around = F.pad(phase, (0, 0, max(-right, 0), wide, max(-down, 0), high))
            shifted = around[:, max(down, 0) :, max(right, 0) :][:, :rows, :cols]
            position = work.weight[:, r, s].double()
            y += shifted @ (position.mT if work.w_major == "k" else position)
    if work.x_scales is not None and work.w_scales is not None:
        y *= work.x_scales.double().view(-1, 1, 1, 1) * work.w_scales.double()
    if work.bias is not None:
        y += work.bias.double().repeat(y.shape[-1] // work.bias.shape[0])
    if work.residual is not None:
        y += work.residual.double()
    work.y.copy_(activated(y, work.activation))
    return Plan()


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conv_sm90_launch, conv_sm90_transpose):
        monkeypatch.setattr(module, "launch_boxes", by_shifts)


WINDOWS = pytest.mark.skipif(not env.interpreting(), reason="the copy to windows is a Triton kernel: needs TRITON_INTERPRET=1")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"bias": True, "activation": "silu"}, id="3x3"),
        pytest.param({"H": 9, "S": 2, "residual": True, "activation": "relu"}, id="four phases, odd size"),
        pytest.param({"H": 9, "P": 2, "dilation": 2, "dtype": torch.bfloat16}, id="with a dilation"),
        pytest.param({"K": 1, "S": 2, "P": 1}, id="only odd phases"),
        pytest.param({"K": 2, "S": 2, "P": 0}, id="patches"),
        pytest.param({"K": 4, "S": 4, "P": 0, "bias": True}, id="patches of four"),
        pytest.param({"dims": 1, "H": 20, "K": 9}, id="a line"),
        pytest.param({"C": 16, "dtype": torch.int8, "bias": True, "residual": True}, id="int8"),
        pytest.param({"C": 3, "H": 15, "K": 7, "S": 2}, id="stem", marks=WINDOWS),
        pytest.param({"C": 3, "K": 4, "S": 4, "P": 0}, id="stem of patches", marks=WINDOWS),
        pytest.param({"C": 5, "H": 6}, id="five channels", marks=WINDOWS),
        pytest.param({"C": 1, "H": 20, "K": 9, "P": -2, "dims": 1}, id="a line, cropped", marks=WINDOWS),
    ],
)
def test_conv_is_what_the_kernel_is_asked_for(more: dict[str, Any]) -> None:
    args = conv_arguments(Inputs(), **{"N": 2, "C": 8, "H": 8, "O": 16, **more})
    assert SM90.refusal(H100, problem_of(*args)) is None
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    exact = conv_op.reference(*wide[:-1], torch.float64)
    found = SM90.launch({}, *args)
    assert found.dtype == args[-1]
    torch.testing.assert_close(found.double(), exact.double(), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"K": 3, "P": 1, "bias": True, "activation": "relu"}, id="gradient of 3x3"),
        pytest.param({"K": 2, "S": 2, "bias": True}, id="double"),
        pytest.param({"K": 3, "S": 2, "P": 1, "dtype": torch.bfloat16}, id="phases of four, two and one"),
        pytest.param({"K": 4, "S": 2, "P": 1, "bias": True}, id="phases of four"),
        pytest.param({"K": 5, "S": 3, "P": 2}, id="thirds"),
        pytest.param({"K": 3, "S": 2, "P": 2, "dilation": 3}, id="dilated phases"),
        pytest.param({"K": 4, "S": 2, "dims": 1}, id="a line"),
    ],
)
def test_conv_transpose_is_what_the_kernel_is_asked_for(more: dict[str, Any]) -> None:
    args = conv_transpose_arguments(Inputs(), **{"N": 2, "C": 16, "H": 6, "O": 8, **more})
    assert TRANSPOSE_SM90.refusal(H100, conv_transpose_op.problem(*args)) is None
    exact = conv_transpose_op.reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
    torch.testing.assert_close(TRANSPOSE_SM90.launch({}, *args).double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    ("images", "height", "width", "filled"),
    [(32, 56, 56, 1.0), (32, 28, 28, 1.0), (32, 14, 14, 1.0), (32, 7, 7, 0.87), (8, 128, 128, 1.0), (1, 1, 1000, 0.97)],
)
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_boxes_are_full(rows: int, column: bool, images: int, height: int, width: int, filled: float) -> None:
    h, n, w = box_of(rows, images, height, width, column)
    assert n * h * w == rows
    assert not column or n * w % 8 == 0
    covered = -(-images // n) * n * -(-height // h) * h * -(-width // w) * w
    assert images * height * width / covered >= filled


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"K": 5, "S": 5, "H": 10, "P": 0}, "strides of 1, 2 and 4"),
        ({"S": 4}, "four phases"),
        ({"H": 1, "S": 2}, "at least as large as the stride"),
        ({"C": 12, "dilation": 2}, "with a dilation"),
        ({"O": 12}, "output channels"),
        ({"groups": 2}, "groups"),
        ({"dims": 3}, "three spatial"),
        ({"dtype": torch.float32}, "does not support"),
    ],
)
def test_refusals(more: dict[str, Any], said: str) -> None:
    args = conv_arguments(Inputs("meta"), **{"N": 2, "C": 16, "H": 8, "O": 16, **more})
    assert said in (SM90.refusal(H100, problem_of(*args)) or "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"K": 2, "S": 3}, "no position"),
        ({"K": 3, "S": 2, "dilation": 2}, "no position"),
        ({"O": 12}, "channels"),
        ({"K": 5, "S": 5}, "strides up to 4"),
        ({"groups": 2}, "groups"),
    ],
)
def test_refusals_of_the_transposed(more: dict[str, Any], said: str) -> None:
    args = conv_transpose_arguments(Inputs("meta"), **{"N": 2, "C": 16, "H": 8, "O": 16, **more})
    assert said in (TRANSPOSE_SM90.refusal(H100, conv_transpose_op.problem(*args)) or "")


@pytest.mark.parametrize("n", [1, 3, 32])
@pytest.mark.parametrize(
    ("c", "h", "o", "k", "s"), [(64, 56, 64, 3, 1), (512, 7, 512, 3, 1), (3, 224, 64, 7, 2), (48, 9, 24, 1, 2)]
)
def test_default_is_a_config_of_the_space(n: int, c: int, h: int, o: int, k: int, s: int) -> None:
    problem = problem_of(*conv_arguments(Inputs("meta"), N=n, C=c, H=h, O=o, K=k, S=s))
    configs = list(SM90.space.configs(H100, problem))
    assert SM90.space.default(H100, problem) in configs
    assert len(configs) <= 24
