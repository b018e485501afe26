"""Example arguments of `mixed_linear` for given dimensions: its `Op.make`."""

import torch

from tilewright.op import Args, Inputs

__all__ = ["mixed_linear_arguments"]

_BF16 = torch.bfloat16


def mixed_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = _BF16, format: str = "int4", group: int = 0,
    block_rows: int = 1, zeros: bool = False, bias: bool = False, activation: str = "none", residual: bool = False,
) -> Args:  # fmt: skip
    """x [M, K] of `dtype`, codes of a weight [N, K] (int8, int4, e4m3 or e5m2), and scales such that results are about 1.

    Random int4 codes are generated directly in the layout that the op expects: whole chunks of 128 columns.

    Raises:
        ValueError: an unknown format.
    """
    if format not in ("int8", "int4", "e4m3", "e5m2"):
        raise ValueError(f"mixed_linear: format is {format!r}, wanted int8, int4, e4m3 or e5m2")
    spread = {"int8": 73.0, "int4": 4.6}.get(format, 60.0)
    shape = (-(-N // block_rows), -(-K // group)) if group else (N,)
    if format == "int8":
        codes = inputs.randint(-127, 128, N, K, dtype=torch.int8)
    elif format == "int4":
        codes = inputs.randint(0, 256, N, -(-K // 128) * 64, dtype=torch.uint8)
    else:
        float8 = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
        codes = inputs.randn(N, K, scale=spread).clamp(-448, 448).to(float8)
    return (
        inputs.randn(M, K, dtype=dtype),
        codes,
        inputs.randn(*shape).abs().add(0.1).div(spread * max(K, 1) ** 0.5),
        inputs.randint(5, 12, *shape, dtype=torch.uint8) if zeros else None,
        inputs.randn(N, dtype=dtype) if bias else None,
        activation,
        inputs.randn(M, N // 2 if activation.endswith("_mul") else N, dtype=dtype) if residual else None,
        block_rows,
        group,
    )
