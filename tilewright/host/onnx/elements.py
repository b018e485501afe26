"""Elementwise and reduction operators of ONNX as calls of torch: one table row each, as defined by opset 21.

A row is called with the node's attributes and its inputs. Tensors depend on the model's inputs; NumPy arrays do not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.host.onnx.values import A, Call, Unsupported, ints, number, pair, tensor_of

__all__ = ["ELEMENTS"]


def _binary(call: Call) -> Call:
    return lambda at, a, b: call(*pair(a, b))


def _many(call: Call) -> Call:
    def run(at: A, *values: Any) -> Any:
        found = values[0]
        for value in values[1:]:
            found = call(*map(torch.as_tensor, pair(found, value)))
        return found

    return run


def _unary(call: Call) -> Call:
    return lambda at, x: call(x)


def _div(a: Any, b: Any) -> Tensor:
    like = a if isinstance(a, Tensor) else b
    return torch.div(a, b, rounding_mode=None if like.is_floating_point() else "trunc")


def _pow(at: A, a: Any, b: Any) -> Tensor:
    x, y = pair(a, b)
    return torch.pow(x, y).to(x.dtype if isinstance(x, Tensor) else torch.as_tensor(x).dtype)


def _mod(at: A, a: Any, b: Any) -> Tensor:
    return (torch.fmod if at.get("fmod", 0) else torch.remainder)(*pair(a, b))


def _cast(at: A, x: Tensor) -> Tensor:
    wanted = onnx.helper.tensor_dtype_to_np_dtype(at["to"])
    return x.to(tensor_of(np.zeros(0, wanted)).dtype)


def _clip(at: A, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        x = x if low is None else torch.maximum(x, tensor_of(low, x.device))
        return x if high is None else torch.minimum(x, tensor_of(high, x.device))
    if low is None and high is None:
        return x
    return x.clamp(None if low is None else number(low, "its bounds"), None if high is None else number(high, "its bounds"))


def _dropout(at: A, x: Tensor, ratio: Any = None, training: Any = None) -> tuple[Tensor, Tensor]:
    if training is not None and number(training, "its numbers"):
        raise Unsupported("it is in training mode")
    return x, torch.ones_like(x, dtype=torch.bool)


def _is_inf(at: A, x: Tensor) -> Tensor:
    above, below = bool(at.get("detect_positive", 1)), bool(at.get("detect_negative", 1))
    return torch.isinf(x) & (((x > 0) & above) | ((x < 0) & below))


def _gelu(at: A, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=at.get("approximate", "none"))


def _prelu(at: A, x: Tensor, slope: Any) -> Tensor:
    return torch.where(x < 0, x * tensor_of(slope, x.device), x)


def _where(at: A, condition: Any, a: Any, b: Any) -> Tensor:
    like = next(value for value in (a, b, condition) if isinstance(value, Tensor))
    return torch.where(*(tensor_of(value, like.device) for value in (condition, a, b)))


# ---- sums


def _axis(x: Tensor, axis: int) -> int:
    return axis + x.dim() if axis < 0 else axis


def _reduction(call: Callable[[Tensor, list[int], bool], Tensor]) -> Call:
    def run(at: A, x: Tensor, axes: Any = None) -> Tensor:
        along = [] if axes is None else ints(axes, "the axes")
        if not along and at.get("noop_with_empty_axes", 0):
            return x
        return call(x, along or list(range(x.dim())), bool(at.get("keepdims", 1)))

    return run


def _prod(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    for axis in sorted((_axis(x, axis) for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _arg(name: str) -> Call:
    def run(at: A, x: Tensor) -> Tensor:
        axis, keep = _axis(x, at.get("axis", 0)), bool(at.get("keepdims", 1))
        if not at.get("select_last_index", 0):
            return getattr(x, name)(axis, keepdim=keep)
        return x.shape[axis] - 1 - getattr(x.flip(axis), name)(axis, keepdim=keep)

    return run


def _top_k(at: A, x: Tensor, k: Any) -> tuple[Tensor, Tensor]:
    count, axis, largest = int(number(k, "its numbers")), at.get("axis", -1), bool(at.get("largest", 1))
    values, indices = x.sort(dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


def _cumsum(at: A, x: Tensor, axis: Any) -> Tensor:
    along = int(number(axis, "its axes"))
    x = x.flip(along) if at.get("reverse", 0) else x
    found = x.cumsum(along).to(x.dtype)
    found = found - x if at.get("exclusive", 0) else found
    return found.flip(along) if at.get("reverse", 0) else found


def _softmax(call: Call) -> Call:
    return lambda at, x: call(x, at.get("axis", -1))


_UNARY: dict[str, Call] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Call] = {
    "Add": lambda a, b: a + b,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Div": _div,
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "Mul": lambda a, b: a * b,
    "Or": torch.logical_or,
    "Sub": lambda a, b: a - b,
    "Xor": torch.logical_xor,
}
_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _prod,
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
}

ELEMENTS: dict[str, Call] = {
    **{name: _unary(call) for name, call in _UNARY.items()},
    **{name: _binary(call) for name, call in _BINARY.items()},
    **{name: _reduction(call) for name, call in _REDUCTIONS.items()},
    "ArgMax": _arg("argmax"),
    "ArgMin": _arg("argmin"),
    "Cast": _cast,
    "CastLike": lambda at, x, like: x.to(tensor_of(like).dtype),
    "Celu": lambda at, x: F.celu(x, at.get("alpha", 1.0)),
    "Clip": _clip,
    "CumSum": _cumsum,
    "Dropout": _dropout,
    "Einsum": lambda at, *x: torch.einsum(at["equation"], *x),
    "Elu": lambda at, x: F.elu(x, at.get("alpha", 1.0)),
    "Gelu": _gelu,
    "HardSigmoid": lambda at, x: (x * at.get("alpha", 0.2) + at.get("beta", 0.5)).clamp(0, 1),
    "IsInf": _is_inf,
    "LeakyRelu": lambda at, x: F.leaky_relu(x, at.get("alpha", 0.01)),
    "LogSoftmax": _softmax(torch.log_softmax),
    "Max": _many(torch.maximum),
    "Mean": lambda at, *x: sum(x[1:], x[0]) / len(x),
    "Min": _many(torch.minimum),
    "Mod": _mod,
    "PRelu": _prelu,
    "Pow": _pow,
    "Selu": lambda at, x: F.selu(x) if not at else at.get("gamma", 1.0507) * F.elu(x, at.get("alpha", 1.67326)),
    "Shrink": lambda at, x: torch.where(
        x.abs() > at.get("lambd", 0.5), x - torch.sign(x) * at.get("bias", 0.0), torch.zeros_like(x)
    ),
    "Softmax": _softmax(torch.softmax),
    "Sum": lambda at, *x: sum(x[1:], x[0]),
    "ThresholdedRelu": lambda at, x: torch.where(x > at.get("alpha", 1.0), x, torch.zeros_like(x)),
    "TopK": _top_k,
    "Where": _where,
}
