"""Corrections for samples that come from other weights or other kernels: advantages are weighted by a ratio of probabilities.

For each token, w = exp(old - sampled) is the trainer's probability divided by the sampler's. A correction changes the
advantages of a batch once, before the step, and has no gradient. If the two probabilities are equal, w is 1 and the advantage
does not change.
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
    """Advantages times w if low <= w <= high, otherwise 0, because such tokens carry no information about this policy."""
    weight = batch.log_ratio_to_sampler().exp().detach()
    kept = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    return replace(batch, advantages=batch.known("advantages") * kept)
