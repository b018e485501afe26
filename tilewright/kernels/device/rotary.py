"""Rotary position embedding (Su et al., "RoFormer", 2021) in plain torch: the reference of every op that rotates heads."""

import torch
from torch import Tensor

__all__ = ["rotated"]


def rotated(wide: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R elements of wide's last dimension by cos and sin; the elements after them are unchanged.

    cos, sin: [..., R/2], broadcastable to `wide`. interleaved: pairs are adjacent elements, not elements R/2 apart.
    """
    half = cos.shape[-1]
    rest = wide.shape[-1] - 2 * half
    if interleaved:
        a, b = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((turned, wide[..., 2 * half :]), -1)
    a, b, *unturned = wide.split((half, half, rest) if rest else half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, *unturned), -1)
