"""ONNX operators with weights, windows or state as calls of torch, as defined by opset 21; see elements.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.host.onnx.values import A, Call, Unsupported, ints, tensor_of

__all__ = ["LAYERS"]

# N batch, C channels, D features, H hidden, S steps


def _like(x: Tensor, value: Any) -> Tensor | None:
    return None if value is None else tensor_of(value, x.device)


# ---- products


def _matmul(at: A, a: Any, b: Any) -> Tensor:
    like = a if isinstance(a, Tensor) else b
    return torch.matmul(tensor_of(a, like.device), tensor_of(b, like.device))


def _gemm(at: A, a: Any, b: Any, c: Any = None) -> Tensor:
    like = a if isinstance(a, Tensor) else b
    a, b = tensor_of(a, like.device), tensor_of(b, like.device)
    a = a.t() if at.get("transA", 0) else a
    alpha, beta = at.get("alpha", 1.0), at.get("beta", 1.0)
    bias, transposed = _like(like, c), bool(at.get("transB", 0))
    features = b.shape[0] if transposed else b.shape[1]
    if alpha == 1 and (bias is None or (beta == 1 and bias.shape == (features,))):
        return F.linear(a, b if transposed else b.t(), bias)
    found = alpha * (a @ (b.t() if transposed else b))
    return found if bias is None else found + beta * bias


# ---- windows


def _window(at: A, x: Tensor, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """(strides, dilations, padding before, padding behind) of each dimension in space."""
    dims = x.dim() - 2
    strides, dilations = list(at.get("strides") or [1] * dims), list(at.get("dilations") or [1] * dims)
    auto = at.get("auto_pad", "NOTSET")
    if auto in ("NOTSET", ""):
        pads = list(at.get("pads") or [0] * 2 * dims)
        return strides, dilations, pads[:dims], pads[dims:]
    if auto == "VALID":
        return strides, dilations, [0] * dims, [0] * dims
    before, behind = [], []
    for size, k, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size)
        less, more = total // 2, total - total // 2
        before.append(less if auto == "SAME_UPPER" else more)
        behind.append(more if auto == "SAME_UPPER" else less)
    return strides, dilations, before, behind


def _padded(x: Tensor, before: Sequence[int], behind: Sequence[int], value: float) -> Tensor:
    flat = [size for pair in zip(reversed(before), reversed(behind), strict=True) for size in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


def _conv(at: A, x: Tensor, weight: Any, bias: Any = None) -> Tensor:
    w = tensor_of(weight, x.device)
    strides, dilations, before, behind = _window(at, x, w.shape[2:])
    if before != behind:
        x, before = _padded(x, before, behind, 0.0), [0] * len(before)
    call = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}.get(x.dim() - 2)
    if call is None:
        raise Unsupported(f"it is over {x.dim() - 2} dimensions")
    return call(x, w, _like(x, bias), strides, before, dilations, at.get("group", 1))


def _conv_transpose(at: A, x: Tensor, weight: Any, bias: Any = None) -> Tensor:
    w, dims = tensor_of(weight, x.device), x.dim() - 2
    call = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}.get(dims)
    if call is None or at.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Unsupported(f"it is over {dims} dimensions, or pads by {at.get('auto_pad')}")
    strides, dilations = list(at.get("strides") or [1] * dims), list(at.get("dilations") or [1] * dims)
    pads, more = list(at.get("pads") or [0] * 2 * dims), list(at.get("output_padding") or [0] * dims)
    if shape := at.get("output_shape"):
        for i in range(dims):
            natural = strides[i] * (x.shape[i + 2] - 1) + (w.shape[i + 2] - 1) * dilations[i] + 1 + more[i]
            total = natural - shape[i]
            if total < 0:
                raise Unsupported(f"its output is larger than {natural}, which its input gives")
            pads[i], pads[i + dims] = total // 2, total - total // 2
    whole = call(x, w, _like(x, bias), strides, 0, more, at.get("group", 1), dilations)
    for i in range(dims):
        whole = whole.narrow(i + 2, pads[i], whole.shape[i + 2] - pads[i] - pads[i + dims])
    return whole


def _max_pool(at: A, x: Tensor) -> Tensor:
    kernel = at["kernel_shape"]
    strides, dilations, before, behind = _window(at, x, kernel)
    call = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[x.dim() - 2]
    ceil = bool(at.get("ceil_mode", 0))
    if before != behind or any(2 * size > k for size, k in zip(before, kernel, strict=True)):
        lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        x, before = _padded(x, before, behind, lowest), [0] * len(before)
    return call(x, kernel, strides, before, dilations, ceil)


def _average_pool(at: A, x: Tensor) -> Tensor:
    kernel, dims = list(at["kernel_shape"]), x.dim() - 2
    strides, dilations, before, behind = _window(at, x, kernel)
    if any(one != 1 for one in dilations):
        raise Unsupported("its windows are dilated")
    counted, ceil = bool(at.get("count_include_pad", 0)), bool(at.get("ceil_mode", 0))
    call: Callable[..., Tensor] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    if before == behind and all(2 * size <= k for size, k in zip(before, kernel, strict=True)):
        return call(x, kernel, strides, before, ceil, counted)
    if ceil and counted:
        raise Unsupported("it rounds up and counts padding that is not the same on both sides")
    sums = call(_padded(x, before, behind, 0.0), kernel, strides, 0, ceil)
    if counted:
        return sums
    return sums / call(_padded(torch.ones_like(x[:1, :1]), before, behind, 0.0), kernel, strides, 0, ceil)


def _global(call: Callable[..., Tensor]) -> Call:
    return lambda at, x: call(x, list(range(2, x.dim())), keepdim=True)


# ---- norms


def _batch_norm(at: A, x: Tensor, scale: Any, bias: Any, mean: Any, var: Any) -> Tensor:
    if at.get("training_mode", 0):
        raise Unsupported("it is in training mode")
    mean, var, scale, bias = (tensor_of(value, x.device) for value in (mean, var, scale, bias))
    return F.batch_norm(x, mean, var, scale, bias, eps=at.get("epsilon", 1e-5))


def _instance_norm(at: A, x: Tensor, scale: Any, bias: Any) -> Tensor:
    return F.instance_norm(x, None, None, _like(x, scale), _like(x, bias), eps=at.get("epsilon", 1e-5))


def _layer_norm(at: A, x: Tensor, scale: Any, bias: Any = None) -> list[Tensor]:
    axis, epsilon = at.get("axis", -1) % x.dim(), at.get("epsilon", 1e-5)
    variance, mean = torch.var_mean(x.float(), list(range(axis, x.dim())), correction=0, keepdim=True)
    found = F.layer_norm(x, x.shape[axis:], _like(x, scale), _like(x, bias), epsilon)
    return [found, mean, (variance + epsilon).rsqrt()]


def _rms_norm(at: A, x: Tensor, scale: Any) -> Tensor:
    axis = at.get("axis", -1) % x.dim()
    return F.rms_norm(x, list(x.shape[axis:]), _like(x, scale), at.get("epsilon", 1e-5))


def _group_norm(at: A, x: Tensor, scale: Any, bias: Any) -> Tensor:
    return F.group_norm(x, at["num_groups"], _like(x, scale), _like(x, bias), at.get("epsilon", 1e-5))


def _lp_norm(at: A, x: Tensor) -> Tensor:
    axis, p = at.get("axis", -1), at.get("p", 2)
    length = x.abs().sum(axis, keepdim=True) if p == 1 else x.square().sum(axis, keepdim=True).sqrt()
    return torch.where(length == 0, torch.zeros_like(x), x / length)


def _lrn(at: A, x: Tensor) -> Tensor:
    size = at["size"]
    squares = x.square().flatten(2).unsqueeze(1)
    padded = F.pad(squares, (0, 0, (size - 1) // 2, size // 2))
    sums = F.avg_pool2d(padded, (size, 1), stride=1).squeeze(1).reshape(x.shape)
    return x / (at.get("bias", 1.0) + at.get("alpha", 1e-4) * sums) ** at.get("beta", 0.75)


def _mean_variance(at: A, x: Tensor) -> Tensor:
    axes = list(at.get("axes") or [0, 2, 3])
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True).sqrt() + 1e-9)


# ---- sizes of images


def _resize(at: A, x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None) -> Tensor:
    out, factors = _resized(at, x, scales, sizes)
    if out == list(x.shape):
        return x
    mode, how = at.get("mode", "nearest"), at.get("coordinate_transformation_mode", "half_pixel")
    unusual = [word for word in ("antialias", "exclude_outside") if at.get(word, 0)]
    if out[:2] != list(x.shape[:2]) or unusual or at.get("cubic_coeff_a", -0.75) != -0.75:
        raise Unsupported(f"it changes the batch or the channels, or has {' '.join(unusual) or 'another cubic'}")
    if mode == "nearest":
        nearest = at.get("nearest_mode", "round_prefer_floor")
        whole = all(factor == int(factor) for factor in factors)
        if (how, nearest) != ("asymmetric", "floor") and not (whole and how.endswith("half_pixel") and nearest[:5] == "round"):
            raise Unsupported(f"it takes the nearest pixel by {how} and {nearest}")
        return F.interpolate(x, size=out[2:], mode="nearest")
    names = {("linear", 3): "linear", ("linear", 4): "bilinear", ("linear", 5): "trilinear", ("cubic", 4): "bicubic"}
    name, corners = names.get((mode, x.dim())), how == "align_corners"
    exact = all(n * factor == size for n, factor, size in zip(x.shape, factors, out, strict=True))
    ones = how == "pytorch_half_pixel" and 1 in out[2:]
    if name is None or how not in ("half_pixel", "pytorch_half_pixel", "align_corners") or (corners and not exact) or ones:
        raise Unsupported(f"it resizes {x.dim() - 2} dimensions by {mode}, and places pixels by {how}")
    if corners or exact:
        return F.interpolate(x, size=out[2:], mode=name, align_corners=corners)
    return F.interpolate(x, scale_factor=factors[2:], mode=name, align_corners=False, recompute_scale_factor=False)


def _resized(at: A, x: Tensor, scales: Any, sizes: Any) -> tuple[list[int], list[float]]:
    """(the new shape, by how much each dimension grows)."""
    out, factors = list(x.shape), [1.0] * x.dim()
    axes = [axis % x.dim() for axis in at.get("axes") or range(x.dim())]
    if sizes is not None:
        if at.get("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Unsupported("it keeps the aspect ratio")
        for axis, size in zip(axes, ints(sizes, "the sizes"), strict=True):
            out[axis], factors[axis] = size, size / x.shape[axis]
    elif isinstance(scales, Tensor):
        raise Unsupported("the factors depend on what the numbers are")
    else:
        for axis, scale in zip(axes, scales.ravel().tolist(), strict=True):
            out[axis], factors[axis] = int(x.shape[axis] * scale), scale
    return out, factors


# ---- state


def _recurrent(kind: str, gates: Sequence[int], activations: Sequence[str]) -> Call:
    """LSTM and GRU by torch's; `gates`: where torch's gates are among ONNX's."""

    def run(
        at: A, x: Tensor, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, c: Any = None, p: Any = None
    ) -> Any:
        both = at.get("direction", "forward") == "bidirectional"
        given = [one.lower() for one in at.get("activations") or activations * (1 + both)]
        if lengths is not None or p is not None or at.get("clip") or at.get("input_forget", 0) or at.get("layout", 0):
            raise Unsupported("it has lengths, peepholes, a clip or another layout")
        if given != [one.lower() for one in activations] * (1 + both):
            raise Unsupported(f"its activations are {', '.join(given)}")
        if kind == "gru" and not at.get("linear_before_reset", 0):
            raise Unsupported("its linear_before_reset is 0")
        w, r, hidden = tensor_of(w, x.device), tensor_of(r, x.device), at["hidden_size"]
        bias = (
            torch.zeros(len(w), 2 * len(gates) * hidden, device=x.device, dtype=x.dtype)
            if b is None
            else tensor_of(b, x.device)
        )
        order = [gate * hidden + i for gate in gates for i in range(hidden)]
        rows, params = torch.tensor(order, device=x.device), list[Tensor]()
        for direction in range(len(w)):
            first, second = bias[direction].chunk(2)
            params += [w[direction][rows], r[direction][rows], first[rows], second[rows]]
        start = torch.zeros(len(w), x.shape[1], hidden, device=x.device, dtype=x.dtype)
        state = start if h is None else tensor_of(h, x.device)
        backwards = at.get("direction", "forward") == "reverse"
        x = x.flip(0) if backwards else x
        fixed = (params, True, 1, 0.0, False, both, False)
        if kind == "lstm":
            y, *last = torch.lstm(x, (state, start if c is None else tensor_of(c, x.device)), *fixed)
        else:
            y, *last = torch.gru(x, state, *fixed)
        y = y.flip(0) if backwards else y
        steps, rows_n = y.shape[:2]
        return [y.reshape(steps, rows_n, len(w), hidden).transpose(1, 2), *last]

    return run


# ---- numbers of 8 bits


def _by_axis(at: A, x: Tensor, value: Any) -> Tensor:
    found = tensor_of(value, x.device)
    if at.get("block_size", 0):
        raise Unsupported("its scales are of blocks")
    if found.numel() == 1:
        return found.reshape(())
    shape = [1] * x.dim()
    shape[at.get("axis", 1)] = found.numel()
    return found.reshape(shape)


def _quantize(at: A, x: Tensor, scale: Any, zero: Any = None) -> Tensor:
    dtype = torch.uint8 if zero is None else tensor_of(zero).dtype
    if dtype not in (torch.uint8, torch.int8, torch.int16):
        raise Unsupported(f"it quantises to {dtype}")
    limits = torch.iinfo(dtype)
    found = torch.round(x / _by_axis(at, x, scale)) + (0 if zero is None else _by_axis(at, x, zero))
    return found.clamp(limits.min, limits.max).to(dtype)


def _dequantize(at: A, x: Any, scale: Any, zero: Any = None) -> Tensor:
    number = tensor_of(x, scale.device if isinstance(scale, Tensor) else None)
    by = _by_axis(at, number, scale)
    found = number.to(by.dtype)
    return (found if zero is None else found - _by_axis(at, number, zero).to(by.dtype)) * by


LAYERS: dict[str, Call] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DequantizeLinear": _dequantize,
    "GRU": _recurrent("gru", (1, 0, 2), ("Sigmoid", "Tanh")),
    "Gemm": _gemm,
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
    "LSTM": _recurrent("lstm", (0, 2, 3, 1), ("Sigmoid", "Tanh", "Tanh")),
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_norm,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "MeanVarianceNormalization": _mean_variance,
    "QuantizeLinear": _quantize,
    "RMSNormalization": _rms_norm,
    "Resize": _resize,
}
