"""Rotary position embedding (Su et al., "RoFormer", 2021) in plain torch: the definition of every op that turns heads."""

import torch
from torch import Tensor

__all__ = ["rotated"]


def rotated(wide: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first R of wide's last dimension turned by cos and sin, [..., R/2] that broadcast; what is behind them as it is."""
    half = cos.shape[-1]
    rest = wide.shape[-1] - 2 * half
    if interleaved:
        a, b = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((turned, wide[..., 2 * half :]), -1)
    a, b, *unturned = wide.split((half, half, rest) if rest else half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, *unturned), -1)
