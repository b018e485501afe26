"""Statistics of a step: ratios, KL, clipping, distance to the sampler, and samples without a gradient."""

import torch
from torch import Tensor

from tilewright.rl.advantages import informative
from tilewright.rl.batch import Batch

__all__ = ["measure"]


@torch.no_grad()
def measure(logprobs_T: Tensor, batch: Batch, *, low: float = 0.2, high: float = 0.2) -> dict[str, float]:
    """Statistics over the batch's chosen tokens, as plain numbers.

    ratio: mean of new over old probability; ratio_off: its largest distance from 1; clip_share: share of tokens outside of the
    clip range; kl: of the old from the new policy (k3). reward and length: means over sequences. empty: sequences without a
    chosen token.
    equal_groups: share of sequences whose whole group has the same reward, so no gradient. stale: number of versions from the
    newest sequence back to the oldest.
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
