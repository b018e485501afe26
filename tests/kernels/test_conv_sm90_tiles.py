"""`narrow` of `conv`, `phases` of `conv_transpose` without a card: what their launchers hand to the kernel, what they refuse.

The kernels run in the conformance tests on a card, and are compiled by the certificates. Here a stand-in does in plain torch
what a kernel does with its descriptors: which phase and shift of x each filter position reads, which phase of y a tile writes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.conv import sm90_grouped as conv_sm90_narrow
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.inputs import conv_arguments, conv_transpose_arguments
from tilewright.kernels.conv.problem import problem_of
from tilewright.kernels.conv.sm90_grouped import NARROW
from tilewright.kernels.conv.transpose import sm90_subpixel as conv_sm90_phases
from tilewright.kernels.conv.transpose.conv_transpose import conv_transpose_op
from tilewright.kernels.conv.transpose.sm90_subpixel import PHASES
from tilewright.kernels.device.activations import activated
from tilewright.op import Inputs

H100 = CARD_OF_ARCH[90]


class StandIn:
    """In a kernel's place: `run` gets the launch's arguments by name."""

    def __init__(self, kernel: Any, run: Callable[[dict[str, Any]], None]):
        self.arg_names, self.run = kernel.arg_names, run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            assert constants["STAGES"] >= 2
            self.run(dict(zip(self.arg_names, args)) | constants | {"grid": grid[0]})

        return launch


def box_at(desc: Any, at: list[int]) -> Tensor:
    """What the copy engine loads: a box, with zeros where it lies outside."""
    t, ranges = desc.base, []
    for size, first, width in zip(t.shape, at, desc.block_shape, strict=True):
        ranges.append((max(first, 0), min(first + width, size), max(-first, 0), max(first + width - size, 0)))
    inner = t[tuple(slice(a, max(a, b)) for a, b, *_ in ranges)].double()
    # Of a box that is outside altogether nothing is left to pad.
    sides = [(low, width - low - n) for (*_, low, _), n, width in zip(ranges, inner.shape, desc.block_shape, strict=True)]
    return F.pad(inner, [side for pair in reversed(sides) for side in ((pair[0], pair[1]) if pair[1] >= 0 else (0, 0))])


def put(desc: Any, at: list[int], values: Tensor) -> None:
    """What the copy engine stores: the part of a box that lies inside."""
    part = [slice(first, first + width) for first, width in zip(at, desc.block_shape, strict=True)]
    place = desc.base[tuple(part)]
    place.copy_(values.view(*desc.block_shape)[tuple(slice(n) for n in place.shape)])


def narrow(a: dict[str, Any]) -> None:
    x, below, own, stride, weight = a["x_desc"], a["below_desc"], a["OWN"], a["STRIDE"], a["w_ptr"]
    bh, _, bn, bw, side = x.block_shape
    weight = weight.view(-1, a["KH"], a["KW"], own).double()
    assert a["grid"] % a["tiles_n"] == 0
    for tile in range(a["boxes"] * a["tiles_n"]):
        box, col = tile // a["tiles_n"], tile % a["tiles_n"] * side
        row, q = box // a["boxes_w"], box % a["boxes_w"] * bw
        p, n = row % a["boxes_h"] * bh, row // a["boxes_h"] * bn
        own_weight = weight[col : col + side]
        total = torch.zeros(bh * bn * bw, side, dtype=torch.float64)
        for r in range(a["KH"]):
            for s in range(a["KW"]):
                down, row_phase = divmod(r - a["PAD_H"], stride)
                right, col_phase = divmod(s - a["PAD_W"], stride)
                first = (row_phase + a["PAD_H"]) % stride
                i = (r - first) // stride  # rows below the first position of its column and phase
                at = [p + down - i, row_phase, n, q + right, col_phase * a["C"] + col]
                rows = box_at(x, at)
                if first + stride < a["KH"]:
                    rows = torch.cat((rows, box_at(below, [at[0] + bh, *at[1:]])))
                o, c = torch.arange(side)[:, None], torch.arange(side)[None, :]
                square = torch.where(o // own == c // own, own_weight[:, r, s][o, c % own], 0.0)
                total += rows[i : i + bh].reshape(-1, side) @ square.T
        y = total if a["bias_ptr"] is None else total + a["bias_ptr"][col : col + side].double()
        if a["residual_desc"] is not None:
            y = y + box_at(a["residual_desc"], [p, n, q, col]).reshape(-1, side)
        put(a["y_desc"], [p, n, q, col], activated(y, a["ACTIVATION"]).to(torch.float64))


def phases(a: dict[str, Any]) -> None:
    x, below, w = a["x_desc"], a["below_desc"], a["w_desc"]
    bh, bn, bw, side = x.block_shape
    for k, y_desc in enumerate(a[name] for name in ("y_desc", "y1_desc", "y2_desc", "y3_desc")):
        parity = (k // 2 ^ a["MOST_H"], k % 2 ^ a["MOST_W"])
        (r0, down), (s0, across) = (
            ((i + pad) % 2, (size + 1 - (i + pad) % 2) // 2)
            for i, pad, size in zip(parity, (a["PAD_H"], a["PAD_W"]), (a["KH"], a["KW"]), strict=True)
        )
        start = (parity[0] + a["PAD_H"]) // 2, (parity[1] + a["PAD_W"]) // 2
        for tile in range(a["boxes"] * a["tiles_n"]):
            box, col = tile // a["tiles_n"], tile % a["tiles_n"] * a["BLOCK_N"]
            row, q = box // a["boxes_w"], box % a["boxes_w"] * bw
            p, n = row % a["boxes_h"] * bh, row // a["boxes_h"] * bn
            total = torch.zeros(bh * bn * bw, a["BLOCK_N"], dtype=torch.float64)
            for chunk in range(0, a["chunks"] * side, side):
                for t in range(across):
                    at = [p + start[0] - (down - 1), n, q + start[1] - t, chunk]
                    rows = box_at(x, at)
                    if down > 1:
                        rows = torch.cat((rows, box_at(below, [at[0] + bh, *at[1:]])))
                    for u in range(down):
                        position = box_at(w, [chunk, r0 + 2 * u, s0 + 2 * t, col]).reshape(side, -1)
                        total += rows[down - 1 - u : down - 1 - u + bh].reshape(-1, side) @ position
            y = total if a["bias_ptr"] is None else total + a["bias_ptr"][col : col + a["BLOCK_N"]].double()
            for j in range(0, a["BLOCK_N"], 64):
                put(y_desc, [p, n, q, col + j], activated(y[:, j : j + 64], a["ACTIVATION"]))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conv_sm90_narrow, conv_sm90_phases):
        monkeypatch.setattr(module, "card_of", lambda x: H100)
        monkeypatch.setattr(module, "VIEWS_REACH_ON", True)  # the stand-ins need nothing of the installed Triton
    monkeypatch.setattr(conv_sm90_narrow, "_narrow_kernel", StandIn(conv_sm90_narrow._narrow_kernel, narrow))
    monkeypatch.setattr(conv_sm90_phases, "_phases_kernel", StandIn(conv_sm90_phases._phases_kernel, phases))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"groups": 16, "bias": True, "residual": True, "activation": "relu"}, id="four a group"),
        pytest.param({"C": 128, "O": 128, "groups": 4, "dtype": torch.bfloat16}, id="thirty-two"),
        pytest.param({"C": 128, "O": 128, "groups": 16, "S": 2}, id="phases of two positions and one"),
        pytest.param({"groups": 8, "H": 6, "K": 2, "S": 2, "P": 0}, id="patches"),
        pytest.param({"groups": 8, "K": 1, "S": 2, "P": 0}, id="one position"),
        pytest.param({"groups": 1, "H": 9, "bias": True}, id="one group, odd size"),
        pytest.param({"groups": 4, "dims": 1, "H": 20}, id="a line"),
    ],
)
@pytest.mark.parametrize("block_m", [64, 128])
def test_narrow_is_what_the_kernel_is_asked_for(block_m: int, more: dict[str, Any]) -> None:
    args = conv_arguments(Inputs(), **{"N": 3, "C": 64, "H": 8, "O": 64, **more})
    assert NARROW.refusal(H100, problem_of(*args)) is None
    wide = [a.double() if isinstance(a, Tensor) else a for a in args]
    found = NARROW.launch({"BLOCK_M": block_m}, *args)
    torch.testing.assert_close(found.double(), conv_op.reference(*wide[:-1], torch.float64), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"K": 3, "P": 1, "bias": True, "activation": "relu"}, id="3x3, odd size"),
        pytest.param({"K": 3, "P": 0, "dtype": torch.bfloat16}, id="3x3 without padding"),
        pytest.param({"K": 2, "P": 0, "bias": True}, id="2x2"),
        pytest.param({"K": 2, "P": 1}, id="2x2, cropped"),
        pytest.param({"K": 4, "P": 1, "C": 72}, id="4x4"),
    ],
)
@pytest.mark.parametrize("block_n", [64, 128])
def test_phases_are_what_the_kernel_is_asked_for(block_n: int, more: dict[str, Any]) -> None:
    args = conv_transpose_arguments(Inputs(), **{"N": 3, "C": 16, "H": 5, "O": 128, "S": 2, **more})
    assert PHASES.refusal(H100, conv_transpose_op.problem(*args)) is None
    exact = conv_transpose_op.reference(*(a.double() if isinstance(a, Tensor) else a for a in args))
    found = PHASES.launch({"BLOCK_N": block_n}, *args)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"groups": 2, "C": 256, "O": 256}, "groups of"),
        ({"groups": 16, "O": 128}, "groups of"),
        ({"groups": 8, "C": 32, "O": 32}, "multiple of 64"),
        ({"groups": 16, "K": 5}, "up to 3 x 3"),
        ({"groups": 16, "dilation": 2}, "dilation"),
        ({"groups": 16, "S": 2, "H": 9}, "even"),
        ({"groups": 16, "dims": 3}, "three spatial"),
        ({"groups": 16, "dtype": torch.float32}, "does not support"),
        ({"groups": 16, "N": 2, "K": 9, "P": 0}, "up to 3 x 3"),
    ],
)
def test_refusals_of_narrow(more: dict[str, Any], said: str) -> None:
    args = conv_arguments(Inputs("meta"), **{"N": 2, "C": 64, "H": 10, "O": 64, **more})
    assert said in (NARROW.refusal(H100, problem_of(*args)) or "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"S": 1}, "stride of 2"),
        ({"dims": 1}, "stride of 2"),
        ({"dilation": 3}, "dilation"),
        ({"K": 5}, "2 to 4"),
        ({"K": 1}, "2 to 4"),
        ({"O": 96}, "of 64 in y"),
        ({"C": 12}, "multiple of 8"),
        ({"groups": 2}, "groups"),
        ({"dtype": torch.float32}, "does not support"),
    ],
)
def test_refusals_of_phases(more: dict[str, Any], said: str) -> None:
    args = conv_transpose_arguments(Inputs("meta"), **{"N": 2, "C": 16, "H": 8, "O": 64, "K": 3, "S": 2, "P": 1, **more})
    assert said in (PHASES.refusal(H100, conv_transpose_op.problem(*args)) or "")
