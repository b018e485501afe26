"""Statistics of a step: ratios, KL divergence, clipping, distance to the sampler, and samples without a gradient."""

import torch
from torch import Tensor

from tilewright.rl.advantages import informative
from tilewright.rl.batch import Batch

__all__ = ["measure"]


@torch.no_grad()
def measure(logprobs_T: Tensor, batch: Batch, *, low: float = 0.2, high: float = 0.2) -> dict[str, float]:
    """Statistics over the batch's chosen tokens, as plain numbers.

    ratio: mean of (new / old probability).
    ratio_off: greatest distance of a token's ratio from 1.
    clip_share: share of tokens whose ratio is outside of the clip range.
    kl: KL divergence of the old from the new policy (k3).
    reward, length: means over sequences; the length is the number of chosen tokens.
    empty: number of sequences without a chosen token.
    equal_groups: share of sequences in whose group all rewards are equal, so that there is no gradient.
    stale: number of versions between the newest and the oldest sequence.
    """
    ratio = batch.log_ratio(logprobs_T)[batch.mask].exp()
    counts = batch.counts()
    return {
        "ratio": _mean(ratio),
        "ratio_off": _most((ratio - 1).abs()),
        "clip_share": _mean(((ratio < 1 - low) | (ratio > 1 + high)).to(ratio.dtype)),
        "kl": _mean(ratio - 1 - ratio.log()),
        "reward": _mean(batch.rewards),
        "length": _mean(counts),
        "empty": int((counts == 0).sum()),
        "equal_groups": _mean((~informative(batch)).to(ratio.dtype)),
        "stale": int(batch.versions.max() - batch.versions.min()) if len(batch.versions) else 0,
    }


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else 0.0


def _most(x: Tensor) -> float:
    return float(x.max()) if len(x) else 0.0
