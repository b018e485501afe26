"""Helpers about shapes for launchers and public functions: rows over any leading dims, powers of two, argument checks."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "ceil_div",
    "check_alike",
    "check_last_dim",
    "check_tensor",
    "heads_ready",
    "next_pow2",
    "row_unit",
    "rows_of",
    "rows_of_heads",
    "rows_ready",
    "token_stride",
    "tokens_ready",
]


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own `cdiv` is meant for kernels; called on the host it takes 10 microseconds."""
    return -(-a // b)


def next_pow2(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def row_unit(cols: int) -> int:
    """The alignment of row starts, in elements (1 to 8), that kernels assume for `cols` columns (`device/row_start.py`)."""
    return min(cols & -cols, 8) or 1


def rows_of(x: Tensor) -> tuple[int, int]:
    """(number of rows, elements from one row to the next) of a tensor that `rows_ready` returned.

    Raises:
        ValueError: the rows are not aligned as `rows_ready` aligns them.
    """
    cols = x.shape[-1]
    rows = x.numel() // cols if cols else 0
    if x.dim() < 2 or not rows:
        return rows, cols
    if rows == 1:
        # The stride is not used here. But it indicates the alignment of later rows, for which kernels are compiled
        # (`cooperative_rows.starts`).
        stride = max(x.stride()[:-1])
        return rows, stride if stride >= cols and stride % row_unit(cols) == 0 else cols
    # The stride is that of the innermost leading dim with more than one element; the outer strides are multiples of it.
    stride = next(stride for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True) if size > 1)
    return rows, _counted_on(stride, cols)


def _counted_on(stride: int, cols: int) -> int:
    if stride % row_unit(cols):
        raise ValueError(
            f"rows of {cols} columns start {stride} elements apart, but this must be a multiple of {row_unit(cols)}; "
            "make the tensor contiguous, or call the function of tilewright.ops, which does it for you"
        )
    return stride


def rows_ready(x: Tensor) -> Tensor:
    """x itself if its last dim is dense and its leading dims fold into rows with one stride; else a contiguous copy.

    x is also copied if its rows do not start at multiples of `row_unit` elements, because kernels are compiled for these only.
    """
    if x.is_contiguous():
        return x
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return x.contiguous()
    expected = None
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if stride != expected if expected is not None else stride % row_unit(x.shape[-1]):
            return x.contiguous()
        expected = stride * size
    return x


def _has_heads(x: Tensor) -> bool:
    """Whether x [T, H, D] consists of adjacent heads in the rows of a wider matrix, aligned as kernels assume."""
    if x.dim() != 3 or 1 in x.shape or not x.numel() or x.shape[2] > 512:
        return False
    return x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % row_unit(x.shape[2]) == 0 and x.stride(0) >= x[0].numel()


def heads_ready(x: Tensor) -> Tensor:
    """Like `rows_ready`, but x [T, H, D] is also returned itself if it consists of adjacent heads in rows of a wider matrix."""
    return x if _has_heads(x) else rows_ready(x)


def rows_of_heads(x: Tensor) -> tuple[int, int, int]:
    """(rows, stride, H) of a tensor that `heads_ready` returned.

    H rows are adjacent; the next H rows start `stride` elements later. H is 1 if all rows have one stride, as in `rows_of`.

    Raises:
        ValueError: as in `rows_of`.
    """
    if not x.is_contiguous() and _has_heads(x):
        return x.shape[0] * x.shape[1], x.stride(0), x.shape[1]
    return *rows_of(x), 1


def token_stride(x: Tensor) -> int:
    """Elements from one token of x [T, H, D] to the next, for an x that `tokens_ready` returned.

    Raises:
        ValueError: the tokens are not aligned as `tokens_ready` aligns them.
    """
    return _counted_on(x.stride(0), x.shape[2]) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def tokens_ready(x: Tensor) -> Tensor:
    """x [T, H, D] itself if its tokens start at multiples of `row_unit(D)` elements, else a contiguous copy."""
    return x if x.shape[0] < 2 or x.stride(0) % row_unit(x.shape[2]) == 0 else x.contiguous()


def check_last_dim(op: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Raise ValueError unless each named vector is None or [D], where D is the last dimension of x."""
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: {name} must be [{x.shape[-1]}], the last dimension of x {tuple(x.shape)}; got {tuple(vector.shape)}"
            )


def check_alike(op: str, name: str, t: Tensor, like: str, x: Tensor) -> None:
    """Raise ValueError unless t has the shape and dtype of x. The message calls t `name` and x `like`."""
    if t.shape != x.shape or t.dtype != x.dtype:
        raise ValueError(f"{op}: {name} must be like {like}, {tuple(x.shape)} {x.dtype}; got {tuple(t.shape)} {t.dtype}")


def check_tensor(
    op: str, name: str, t: Tensor | None, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], like: Tensor,
    *, contiguous: bool = False, why: str = "",
) -> None:  # fmt: skip
    """Raise ValueError unless t is None, or has one of the shapes and dtypes and is on the device of `like`.

    In the message, `why` follows the description of the required tensor.
    """
    if t is None:
        return
    if t.shape not in shapes or t.dtype not in dtypes or t.device != like.device or (contiguous and not t.is_contiguous()):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise ValueError(
            f"{op}: {name} must be {' or '.join(str(list(shape)) for shape in shapes)}, {'contiguous ' * contiguous}{kinds} on "
            f"{like.device}{why}; got {list(t.shape)}, {t.dtype} on {t.device}"
        )
