"""What launchers and public functions ask about shapes: rows of any leading dims, powers of two, argument checks."""

from torch import Tensor

__all__ = ["ceil_div", "check_last_dim", "next_pow2", "rows_of", "rows_ready"]


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own `cdiv` takes 10 microseconds of host time: it is meant for kernels."""
    return -(-a // b)


def next_pow2(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def rows_of(x: Tensor) -> tuple[int, int]:
    """(number of rows, elements from a row to the next) of a tensor that went through `rows_ready`."""
    cols = x.shape[-1]
    rows = x.numel() // cols if cols else 0
    if x.dim() < 2 or rows < 2:
        return rows, cols
    # The innermost leading dim with more than one element carries the stride; the outer ones are multiples of it.
    return rows, next(stride for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True) if size > 1)


def rows_ready(x: Tensor) -> Tensor:
    """x itself when its leading dims fold into rows at one stride with a dense last dim; else a contiguous copy."""
    if x.is_contiguous():
        return x
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return x.contiguous()
    expected = None
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return x.contiguous()
        expected = stride * size
    return x


def check_last_dim(op: str, x: Tensor, **vectors: Tensor) -> None:
    """Raise ValueError unless each named vector is [D], D the last dimension of x."""
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    for name, vector in vectors.items():
        if vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: {name} must be [{x.shape[-1]}], the last dimension of x {tuple(x.shape)}; got {tuple(vector.shape)}"
            )
