"""Pooling and resizing with torch.nn's names and arguments; differentiable, without parameters.

Inputs are [N, C, *spatial], or without N for pooling. Channels-last memory is read without a copy; results are channels-last.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tilewright import ops

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Upsample",
]

Sizes = int | Sequence[int]


class _Pool(nn.Module):
    """Base of the pooling layers. options: keyword arguments of the op."""

    spatial: int
    options: dict[str, Any]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class _MaxPool(_Pool):
    """The maximum of each window; with `return_indices` also its index in the flattened image."""

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
        return_indices: bool = False, ceil_mode: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.options = {
            "kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation,
            "return_indices": return_indices, "ceil_mode": ceil_mode,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[N, C, *S] or [C, *S] -> [N, C, *out] or [C, *out]."""
        return ops.max_pool(x, **self.options, spatial=self.spatial)


class MaxPool1d(_MaxPool):
    """torch.nn.MaxPool1d: x [N, C, L]."""

    spatial = 1


class MaxPool2d(_MaxPool):
    """torch.nn.MaxPool2d: x [N, C, H, W]."""

    spatial = 2


class MaxPool3d(_MaxPool):
    """torch.nn.MaxPool3d: x [N, C, D, H, W]."""

    spatial = 3


class _AvgPool(_Pool):
    """The mean of each window."""

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.options = {
            "kernel_size": kernel_size, "stride": stride, "padding": padding, "ceil_mode": ceil_mode,
            "count_include_pad": count_include_pad, "divisor_override": divisor_override,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, *S] or [C, *S] -> [N, C, *out] or [C, *out]."""
        return ops.avg_pool(x, **self.options, spatial=self.spatial)


class AvgPool1d(_AvgPool):
    """torch.nn.AvgPool1d: x [N, C, L]; unlike torch's class it also accepts divisor_override."""

    spatial = 1


class AvgPool2d(_AvgPool):
    """torch.nn.AvgPool2d: x [N, C, H, W]."""

    spatial = 2


class AvgPool3d(_AvgPool):
    """torch.nn.AvgPool3d: x [N, C, D, H, W]."""

    spatial = 3


class _AdaptiveMaxPool(_Pool):
    """The maximum of windows that divide each dimension into `output_size` parts."""

    def __init__(self, output_size: int | Sequence[int | None] | None, return_indices: bool = False):
        super().__init__()
        self.options = {"output_size": output_size, "return_indices": return_indices}

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[N, C, *S] or [C, *S] -> [..., *output_size]."""
        return ops.adaptive_max_pool(x, **self.options, spatial=self.spatial)


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """torch.nn.AdaptiveMaxPool1d: x [N, C, L]."""

    spatial = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """torch.nn.AdaptiveMaxPool2d: x [N, C, H, W]."""

    spatial = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """torch.nn.AdaptiveMaxPool3d: x [N, C, D, H, W]."""

    spatial = 3


class _AdaptiveAvgPool(_Pool):
    """The mean of windows that divide each dimension into `output_size` parts."""

    def __init__(self, output_size: int | Sequence[int | None] | None):
        super().__init__()
        self.options = {"output_size": output_size}

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, *S] or [C, *S] -> [..., *output_size]."""
        return ops.adaptive_avg_pool(x, **self.options, spatial=self.spatial)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """torch.nn.AdaptiveAvgPool1d: x [N, C, L]."""

    spatial = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """torch.nn.AdaptiveAvgPool2d: x [N, C, H, W]."""

    spatial = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """torch.nn.AdaptiveAvgPool3d: x [N, C, D, H, W]."""

    spatial = 3


class Upsample(_Pool):
    """torch.nn.Upsample of [N, C, L], [N, C, H, W] and [N, C, D, H, W]. `recompute_scale_factor` raises an error."""

    def __init__(
        self, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest", align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    ):  # fmt: skip
        super().__init__()
        if mode not in ("nearest", "linear", "bilinear", "bicubic", "trilinear"):
            raise ValueError(f"Upsample: mode={mode!r} is not supported; torch's other modes are")
        if recompute_scale_factor:
            raise ValueError("Upsample: recompute_scale_factor=True is not supported; give size instead")
        self.options = {"size": size, "scale_factor": scale_factor, "mode": mode, "align_corners": align_corners}

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, L], [N, C, H, W] or [N, C, D, H, W] -> the same dimensions with other spatial sizes."""
        return ops.upsample(x, **self.options)
