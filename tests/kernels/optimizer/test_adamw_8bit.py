"""Codes of the 8-bit update over their whole range: the examples of the op hardly reach the small levels."""

import pytest
import torch
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.kernels.optimizer.adamw_8bit import GROUP, adamw_8bit_op, encode
from tilewright.kernels.optimizer.multi_tensor import CHUNK, control_values

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")


def updated(m_codes: Tensor, v_codes: Tensor, grad: Tensor, betas: tuple[float, float]) -> list[Tensor]:
    """m_codes, m_scales, v_codes, v_scales behind one step from scales of 1; CHUNK elements each."""
    scales = [torch.ones(CHUNK // GROUP, device=PLACE) for _ in range(2)]
    states = [m_codes.to(PLACE), scales[0], v_codes.to(PLACE), scales[1]]
    control = torch.tensor(control_values(*betas), dtype=torch.float64, device=PLACE)
    master, rates = torch.zeros(CHUNK, device=PLACE), torch.tensor([[1.0, 0.0]], device=PLACE)
    adamw_8bit_op.run(master, *states, None, [grad.to(PLACE)], rates, control, 1e-3, 1e-8)
    return [state.cpu() for state in states]


def test_moments_that_only_shrink_keep_every_code() -> None:
    codes = torch.arange(CHUNK).remainder(256).to(torch.uint8)
    signed = codes.clamp_min(1)  # 128 - 128 is no code
    m_codes, m_scales, v_codes, v_scales = updated(signed, codes, torch.zeros(CHUNK), (0.9, 0.99))
    assert torch.equal(m_codes, signed)
    assert torch.equal(v_codes, codes)
    torch.testing.assert_close(m_scales, torch.full_like(m_scales, 0.9), rtol=1e-6, atol=0)
    torch.testing.assert_close(v_scales, torch.full_like(v_scales, 0.99), rtol=1e-6, atol=0)


def test_numbers_of_all_sizes_get_the_codes_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (-9 * torch.rand(CHUNK, generator=generator))
    grad = torch.randn(CHUNK, generator=generator).sign() * size
    grad[::GROUP], grad[5], grad[7], grad[9] = 1.0, 0.0, -1e-21, 1e-19
    zeros = torch.zeros(CHUNK, dtype=torch.uint8)
    m_codes, _, v_codes, _ = updated(zeros + 128, zeros, grad, (0.0, 0.0))
    assert torch.equal(m_codes, encode(grad, True).codes)
    assert torch.equal(v_codes, encode(grad * grad, False).codes)
    assert v_codes[5] == 0
    assert v_codes[7] == 1
