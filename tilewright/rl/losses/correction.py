"""Corrections for samples from other weights or other kernels: advantages are weighted by the ratio of probabilities.

w = exp(old - sampled) for each token, the trainer's probability over the sampler's. A correction changes a batch's advantages
once, before the step, and has no gradient. If both are the same numbers, every w is 1 and nothing changes.
"""

from dataclasses import replace

import torch

from tilewright.rl.batch import Batch

__all__ = ["masked", "truncated"]


def truncated(batch: Batch, cap: float = 2.0) -> Batch:
    """Advantages times min(w, cap) (Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy Training, 2025)."""
    weight = batch.log_ratio_to_sampler().exp().clamp(max=cap)
    return replace(batch, advantages=batch.known("advantages") * weight.detach())


def masked(batch: Batch, low: float = 0.5, high: float = 2.0) -> Batch:
    """Advantages times w if low <= w <= high, and 0 otherwise: such tokens say nothing about this policy."""
    weight = batch.log_ratio_to_sampler().exp().detach()
    kept = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    return replace(batch, advantages=batch.known("advantages") * kept)
