"""`conv` through torch, which calls cuDNN: the implementation `vendor`.

The tensors are channels-last already, so cuDNN reads them without a copy. On the first call with a shape it benchmarks its
kernels, as with `torch.backends.cudnn.benchmark`. This call waits for the device, so it must not be recorded in a CUDA graph.
float32 is multiplied in full precision, without TF32. If the padding of the low and high sides differs, x is padded in memory
first.

If the activation is relu, cuDNN applies bias, residual and activation in its epilogue. Otherwise the convolution is rounded
before bias, residual and activation, and each of these rounds again.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.tf32 import allow_again, forbid_tf32
from tilewright.kernels.conv.plan import Plan
from tilewright.kernels.conv.problem import Problem
from tilewright.kernels.conv.reference import convolved, plain_padding
from tilewright.kernels.device.activations import activated
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["VENDOR", "cudnn_choosing", "takes_padding"]

_FLAGS: tuple[tuple[Any, Any], ...] = (
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)


class cudnn_choosing:
    """A scope in which cuDNN benchmarks its kernels on the first call with a shape, and multiplies float32 without TF32.

    deterministic: cuDNN uses only kernels that return the same bits every time; gradients need this. Setting
    `torch.backends.cudnn.deterministic` has the same effect.
    """

    # torch.backends.cudnn.flags does the same in 20 microseconds, as long as a convolution. A context manager that is made of a
    # generator would take 3 microseconds more than this class.
    __slots__ = ("_before", "_deterministic", "_tf32", "_wanted")

    def __init__(self, *, deterministic: bool):
        self._deterministic = deterministic

    def __enter__(self) -> None:
        self._before = tuple(get() for get, _ in _FLAGS)
        self._wanted = (True, self._deterministic or self._before[1])
        self._put(self._before, self._wanted)
        self._tf32 = forbid_tf32("conv")

    def __exit__(self, *error: object) -> None:
        allow_again(self._tf32)
        self._put(self._wanted, self._before)

    def _put(self, now: tuple[bool, ...], then: tuple[bool, ...]) -> None:
        if now != then:
            for (_, put), flag in zip(_FLAGS, then, strict=True):
                put(flag)


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype == torch.int8:
        return "torch has no int8 convolution on a GPU"
    return "cuDNN does not support empty tensors" if problem.empty else None


def _launch(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int], *_: Any,
) -> Tensor:  # fmt: skip
    weight = weight.contiguous()  # a depthwise weight may have dense channels in memory
    window = (tuple(stride), tuple(padding), tuple(dilation))
    plain = takes_padding(x.shape[1:-1], weight.shape[1:-1], *window, tuple(size))
    with cudnn_choosing(deterministic=False):
        if activation == "relu" and plain and x.dim() == 4 and x.is_cuda:
            # without a GPU, torch cannot infer the shapes of the fused call
            return _with_relu(x, weight, bias, residual, *window, groups)
        if plain:
            order = _TO_FIRST[x.dim()]
            y = _CONV[x.dim()](x.permute(order), weight.permute(order), bias, *window, groups).movedim(1, -1)
        else:
            y = convolved(x, weight, bias, stride, padding, dilation, groups, size)
    if residual is not None:
        y = y.add_(residual)
    return activated(y, activation).contiguous()


_CONV = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}
_TO_FIRST = {3: (0, 2, 1), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


@lru_cache(maxsize=4096)
def takes_padding(x: torch.Size, kernel: torch.Size, *window: tuple[int, ...]) -> bool:
    """`plain_padding` for the sizes of x, filter, stride, padding, dilation and y.

    Results are cached, because computing one takes as long as a launch.
    """
    return plain_padding(torch.empty(1, *x, 1, device="meta"), torch.empty(1, *kernel, 1, device="meta"), *window)


def _with_relu(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *options: Any) -> Tensor:
    x, weight = x.permute(_TO_FIRST[4]), weight.permute(_TO_FIRST[4])
    if residual is None:
        y = torch.cudnn_convolution_relu(x, weight, bias, *options)
    else:
        y = torch.cudnn_convolution_add_relu(x, weight, residual.movedim(-1, 1), 1.0, bias, *options)
    return y.movedim(1, -1).contiguous()


def _plan(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int], *_: Any,
) -> Plan | None:  # fmt: skip
    """The same convolution as one call of torch, on tensors of torch's shapes with dense channels.

    None if it needs more than one call.
    """
    window = (tuple(stride), tuple(padding), tuple(dilation))
    fused = activation == "relu" and x.dim() == 4
    if not takes_padding(x.shape[1:-1], weight.shape[1:-1], *window, tuple(size)) or not (
        fused or (activation == "none" and residual is None)
    ):
        return None
    convolve = _CONV[x.dim()]

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        with cudnn_choosing(deterministic=False):
            if residual is not None:
                return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *window, groups)
            if fused:
                return torch.cudnn_convolution_relu(x, weight, bias, *window, groups)
            return convolve(x, weight, bias, *window, groups)

    return call


VENDOR = Impl(name="vendor", library=True, launch=_launch, plan=_plan, refuse=_refuse, extra_roundings=2)
