"""What launchers and public functions ask about shapes: rows of any leading dims, powers of two, argument checks."""

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
    """a / b, rounded up. Triton's own `cdiv` takes 10 microseconds of host time: it is meant for kernels."""
    return -(-a // b)


def next_pow2(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def row_unit(cols: int) -> int:
    """Rows of `cols` columns start at multiples of this many elements, as kernels count on (`device/row_start.py`): 1 to 8."""
    return min(cols & -cols, 8) or 1


def rows_of(x: Tensor) -> tuple[int, int]:
    """(number of rows, elements from a row to the next) of a tensor that went through `rows_ready`.

    Raises:
        ValueError: the rows start where `rows_ready` would not leave them.
    """
    cols = x.shape[-1]
    rows = x.numel() // cols if cols else 0
    if x.dim() < 2 or not rows:
        return rows, cols
    if rows == 1:
        # No stride is used, but it tells of the rows to come what kernels are compiled for (`row_parts.starts`).
        stride = max(x.stride()[:-1])
        return rows, stride if stride >= cols and stride % row_unit(cols) == 0 else cols
    # The innermost leading dim with more than one element carries the stride; the outer ones are multiples of it.
    stride = next(stride for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True) if size > 1)
    return rows, _counted_on(stride, cols)


def _counted_on(stride: int, cols: int) -> int:
    if stride % row_unit(cols):
        raise ValueError(
            f"rows of {cols} columns are {stride} elements apart, wanted a multiple of {row_unit(cols)}; "
            "make the tensor contiguous, or call the function of tilewright.ops, which does"
        )
    return stride


def rows_ready(x: Tensor) -> Tensor:
    """x itself when its leading dims fold into rows at one stride with a dense last dim; else a contiguous copy.

    A copy too where rows start at other columns than multiples of `row_unit`: kernels are compiled for those alone.
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
    """Whether x [T, H, D] is heads beside each other in the rows of a wider matrix, which start where kernels count on."""
    if x.dim() != 3 or 1 in x.shape or not x.numel() or x.shape[2] > 512:
        return False
    return x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % row_unit(x.shape[2]) == 0 and x.stride(0) >= x[0].numel()


def heads_ready(x: Tensor) -> Tensor:
    """As `rows_ready`, but [T, H, D], heads beside each other in the rows of a wider matrix, is x itself, too."""
    return x if _has_heads(x) else rows_ready(x)


def rows_of_heads(x: Tensor) -> tuple[int, int, int]:
    """(rows, elements, H) of a tensor that went through `heads_ready`: from H rows, which lie beside each other, to the next H
    it is so many elements. H is 1 where `rows_of` has one stride for all.

    Raises:
        ValueError: as `rows_of`.
    """
    if not x.is_contiguous() and _has_heads(x):
        return x.shape[0] * x.shape[1], x.stride(0), x.shape[1]
    return *rows_of(x), 1


def token_stride(x: Tensor) -> int:
    """Elements from a token of x [T, H, D] to the next, after `tokens_ready`. Raises ValueError where that was left out."""
    return _counted_on(x.stride(0), x.shape[2]) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def tokens_ready(x: Tensor) -> Tensor:
    """x [T, H, D] itself, or a contiguous copy where its tokens start at other elements than multiples of `row_unit(D)`."""
    return x if x.shape[0] < 2 or x.stride(0) % row_unit(x.shape[2]) == 0 else x.contiguous()


def check_last_dim(op: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Raise ValueError unless each named vector that there is is [D], D the last dimension of x."""
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: {name} must be [{x.shape[-1]}], the last dimension of x {tuple(x.shape)}; got {tuple(vector.shape)}"
            )


def check_alike(op: str, name: str, t: Tensor, like: str, x: Tensor) -> None:
    """Raise ValueError unless t has the shape and dtype of x, which the caller knows as `like`."""
    if t.shape != x.shape or t.dtype != x.dtype:
        raise ValueError(f"{op}: {name} must be like {like}, {tuple(x.shape)} {x.dtype}; got {tuple(t.shape)} {t.dtype}")


def check_tensor(
    op: str, name: str, t: Tensor | None, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], like: Tensor,
    *, contiguous: bool = False, why: str = "",
) -> None:  # fmt: skip
    """Raise ValueError unless t, where there is one, has one of the shapes and dtypes, on the device of `like`.

    `why` follows what is wanted.
    """
    if t is None:
        return
    if t.shape not in shapes or t.dtype not in dtypes or t.device != like.device or (contiguous and not t.is_contiguous()):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise ValueError(
            f"{op}: {name} must be {' or '.join(str(list(shape)) for shape in shapes)}, {'contiguous ' * contiguous}{kinds} on "
            f"{like.device}{why}; got {list(t.shape)}, {t.dtype} on {t.device}"
        )
