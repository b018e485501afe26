"""ONNX operators that rearrange values as calls of torch, as defined by opset 21; see elements.py."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.host.onnx.values import A, Call, Unsupported, ints, number, tensor_of

__all__ = ["SHAPES"]


def _axis(x: Tensor, axis: int) -> int:
    return axis + x.dim() if axis < 0 else axis


def _reshape(at: A, x: Tensor, shape: Any) -> Tensor:
    wanted = ints(shape, "the sizes")
    if not at.get("allowzero", 0):
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return x.reshape(wanted)


def _flatten(at: A, x: Tensor) -> Tensor:
    axis = _axis(x, at.get("axis", 1))
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _squeeze(at: A, x: Tensor, axes: Any = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(ints(axes, "the axes")))


def _unsqueeze(at: A, x: Tensor, axes: Any) -> Tensor:
    rank = x.dim() + np.size(axes)
    for axis in sorted(axis % rank for axis in ints(axes, "the axes")):
        x = x.unsqueeze(axis)
    return x


def _transpose(at: A, x: Tensor) -> Tensor:
    return x.permute(at.get("perm") or list(reversed(range(x.dim()))))


def _expand(at: A, x: Tensor, shape: Any) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, ints(shape, "the sizes")))


def _concat(at: A, *values: Any) -> Tensor:
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.cat([tensor_of(value, like.device) for value in values], at["axis"])


def _split(at: A, x: Tensor, sizes: Any = None) -> tuple[Tensor, ...]:
    axis = at.get("axis", 0)
    if sizes is not None:
        return x.split(ints(sizes, "the sizes"), axis)
    count = at.get("num_outputs") or 1
    return x.split(-(-x.shape[axis] // count), axis)


def _slice(at: A, x: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    first, last = ints(starts, "the starts"), ints(ends, "the ends")
    along = list(range(len(first))) if axes is None else ints(axes, "the axes")
    by = [1] * len(first) if steps is None else ints(steps, "the steps")
    for start, end, axis, step in zip(first, last, along, by, strict=True):
        taken = range(
            *slice(start, end if abs(end) < 1 << 60 else (None if (end > 0) == (step > 0) else end), step).indices(
                x.shape[axis]
            )
        )
        if step > 0:
            x = (
                x.narrow(axis, taken.start, 0)
                if not len(taken)
                else x.movedim(axis, 0)[taken.start : taken[-1] + 1 : step].movedim(0, axis)
            )
        else:
            x = x.index_select(axis, torch.tensor(list(taken), dtype=torch.int64, device=x.device))
    return x


def _gather(at: A, x: Any, indices: Any) -> Tensor:
    like = x if isinstance(x, Tensor) else indices
    data, axis = tensor_of(x, like.device), at.get("axis", 0)
    if not isinstance(indices, Tensor) and np.ndim(indices) == 0:
        return data.select(axis, int(indices))
    index = tensor_of(indices, like.device).long()
    index = torch.where(index < 0, index + data.shape[axis], index) if isinstance(indices, Tensor) else index % data.shape[axis]
    if _axis(data, axis) == 0:
        return F.embedding(index, data) if data.dim() == 2 and data.is_floating_point() else data[index]
    shape = (*data.shape[: _axis(data, axis)], *index.shape, *data.shape[_axis(data, axis) + 1 :])
    return data.index_select(axis, index.reshape(-1)).reshape(shape)


def _gather_elements(at: A, x: Tensor, indices: Any) -> Tensor:
    axis, index = at.get("axis", 0), tensor_of(indices, x.device).long()
    return x.gather(axis, torch.where(index < 0, index + x.shape[axis], index))


def _gather_nd(at: A, x: Any, indices: Any) -> Tensor:
    if at.get("batch_dims", 0):
        raise Unsupported("batch_dims is not 0")
    like = x if isinstance(x, Tensor) else indices
    data, index = tensor_of(x, like.device), tensor_of(indices, like.device).long()
    return data[tuple(index.unbind(-1))]


def _scatter_elements(at: A, x: Any, indices: Any, updates: Any) -> Tensor:
    if at.get("reduction", "none") != "none":
        raise Unsupported("its reduction is not none")
    like = next(value for value in (x, indices, updates) if isinstance(value, Tensor))
    data, index, new = (tensor_of(value, like.device) for value in (x, indices, updates))
    axis = at.get("axis", 0)
    index = torch.where(index < 0, index + data.shape[axis], index)
    return data.scatter(axis, index, new)


def _scatter_nd(at: A, x: Any, indices: Any, updates: Any) -> Tensor:
    if at.get("reduction", "none") != "none":
        raise Unsupported("its reduction is not none")
    like = next(value for value in (x, indices, updates) if isinstance(value, Tensor))
    data, index, new = (tensor_of(value, like.device) for value in (x, indices, updates))
    return data.index_put(tuple(index.long().unbind(-1)), new)


def _pad(at: A, x: Tensor, pads: Any, value: Any = None, axes: Any = None) -> Tensor:
    along = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in ints(axes, "the axes")]
    sizes, found = ints(pads, "the paddings"), [[0, 0] for _ in range(x.dim())]
    for i, axis in enumerate(along):
        found[axis] = [sizes[i], sizes[i + len(along)]]
    flat = [size for pair in reversed(found) for size in pair]
    mode = at.get("mode", "constant")
    if mode == "constant":
        return F.pad(x, flat, value=0 if value is None else number(value, "its numbers"))
    while flat and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    if mode == "wrap" or len(flat) // 2 > 3 or x.dim() < len(flat) // 2 + 1:
        raise Unsupported(f"padding by {mode!r} of {len(flat) // 2} dimensions of {x.dim()}")
    return F.pad(x, flat, mode={"reflect": "reflect", "edge": "replicate"}[mode])


def _tile(at: A, x: Tensor, times: Any) -> Tensor:
    return x.repeat(ints(times, "the repeats"))


def _depth_to_space(at: A, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = at["blocksize"]
    if at.get("mode", "DCR") == "DCR":
        return x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (b * b), h * b, w * b)
    return F.pixel_shuffle(x, b)


def _space_to_depth(at: A, x: Tensor) -> Tensor:
    if at.get("mode", "DCR") != "DCR":
        raise Unsupported(f"its mode is {at['mode']}")
    n, c, h, w = x.shape
    b = at["blocksize"]
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


def _trilu(at: A, x: Tensor, k: Any = None) -> Tensor:
    diagonal = 0 if k is None else int(number(k, "its numbers"))
    return x.triu(diagonal) if at.get("upper", 1) else x.tril(diagonal)


def _one_hot(at: A, indices: Tensor, depth: Any, values: Any) -> Tensor:
    count, axis = int(number(depth, "its numbers")), at.get("axis", -1)
    index = indices.long()
    hot = torch.arange(count, device=index.device) == torch.where(index < 0, index + count, index).unsqueeze(-1)
    off, on = tensor_of(values, index.device).unbind(0)
    return torch.where(hot, on, off).movedim(-1, axis)


SHAPES: dict[str, Call] = {
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
