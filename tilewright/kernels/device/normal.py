"""The constants of the normal distribution's function as kernels compute it, for Triton and for Gluon.

    Phi(-x) = (((((A5 t + A4) t + A3) t + A2) t + A1) t) exp(-x^2 / 2),  t = 1 / (1 + RATE x),  x >= 0

Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26: erfc(x / sqrt 2) / 2 within 3e-7, the constants folded.
"""

import triton.language as tl

__all__ = ["A1", "A2", "A3", "A4", "A5", "RATE"]

RATE = tl.constexpr(0.23164189)
A1 = tl.constexpr(0.127414796)
A2 = tl.constexpr(-0.142248368)
A3 = tl.constexpr(0.7107068705)
A4 = tl.constexpr(-0.7265760135)
A5 = tl.constexpr(0.5307027145)
