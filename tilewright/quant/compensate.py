"""4-bit quantisation in which later columns compensate for the rounding errors of earlier ones on calibration input.

Source: GPTQ, Frantar et al., 2022.

Columns are rounded one after the other. The rounding error of a column is distributed over the columns not yet rounded, in the
proportions that change the layer's output least. With H = x^T x for the calibration rows and U the upper Cholesky factor of
H^-1:

    e = (w_j - code_j) / U_jj        w_k -= e * U_jk, for k > j

When the first column of a group is reached, the group's scale and zero point are computed from its changed columns, as in
`formats`. The layout is the same as without calibration; the order of the columns does not change.
"""

import torch
from torch import Tensor

from tilewright.formats import encode, pack_int4
from tilewright.ops.weights import MixedWeight

__all__ = ["compensated"]

_DAMPING = 0.3
"""This share of the mean diagonal of H is added to its diagonal. This has two reasons: with fewer rows than columns, H has no
inverse; and a fit that is too close to one text is worse on another. Change in bits per byte of bookworm, calibrated on 12
training books and measured on 1024 tokens of each of 5 other books: rounding alone +2.7 %; with a damping of 0.01 +3.2 %, 0.05
+2.3 %, 0.3 +2.0 %, 1 +2.2 %."""


def compensated(weight: Tensor, rows: Tensor, block: tuple[int, int]) -> MixedWeight:
    """Quantise a weight [N, K] to int4 with zero points.

    Args:
        weight: [N, K], float.
        rows: [R, K], the input of the layer on calibration data.
        block: (1, group); K is a multiple of the group.
    """
    group = block[1]
    left = weight.detach().to(torch.float32, copy=True)
    u = _factor(rows.to(left.device, torch.float32))
    codes, scales, zeros = [], [], []
    for first in range(0, left.shape[1], group):
        last = first + group
        _, scale, zero = encode(left[:, first:last], "int4-zero", block)
        assert zero is not None
        code, errors = _round(left[:, first:last], u[first:last, first:last], scale[:, 0], zero[:, 0].to(torch.float32))
        left[:, last:] -= errors @ u[first:last, last:]
        codes.append(code)
        scales.append(scale)
        zeros.append(zero)
    return MixedWeight(
        pack_int4(torch.cat(codes, 1)), torch.cat(scales, 1), torch.cat(zeros, 1), block=block, dtype=weight.dtype
    )


def _factor(rows: Tensor) -> Tensor:
    """U [K, K], upper triangular: U^T U = H^-1."""
    h = rows.mT @ rows
    diagonal = h.diagonal()
    # The damping keeps H invertible if a column is always zero in calibration; the minimum does so if all columns are zero.
    mean = diagonal.mean().clamp_min(torch.finfo(torch.float32).tiny)
    diagonal += _DAMPING * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True)


def _round(columns: Tensor, u: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [N, G], errors [N, G]) of one group; `columns` is modified in place."""
    codes, errors = torch.empty_like(columns, dtype=torch.uint8), torch.empty_like(columns)
    inverse = 1.0 / scale
    for j in range(columns.shape[1]):
        code = ((columns[:, j] * inverse).round() + zero).clamp(0, 15)
        codes[:, j] = code.to(torch.uint8)
        errors[:, j] = (columns[:, j] - (code - zero) * scale) / u[j, j]
        columns[:, j + 1 :] -= errors[:, j, None] * u[j, j + 1 :]
    return codes, errors
