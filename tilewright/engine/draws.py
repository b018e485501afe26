"""The distribution that a token is drawn from: temperature and filters applied to a row of logits.

`ops.sample` draws from it without computing it explicitly. Training on samples needs two values: the log-probability of the
drawn token in this distribution, and how many tokens the filters kept. With that number, another pass over the same text can
keep the same tokens, which are the likeliest ones. No function here waits for the device, so a graph can capture them.
"""

# R rows, V tokens

import torch
from torch import Tensor

from tilewright import ops

__all__ = ["drawn_logprobs", "kept_counts", "processed"]

_GREEDY_BELOW = 1e-5


def processed(logits: Tensor, temperature: Tensor, kept: Tensor) -> Tensor:
    """[R, V] float32: logits / temperature [R], and -inf where `kept` [R, V] bool is False. Differentiable in the logits."""
    scale = (1 / torch.where(temperature < _GREEDY_BELOW, 1.0, temperature)).float()
    return (logits.float() * scale[:, None]).masked_fill(~kept, -torch.inf)


def kept_counts(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """(number of tokens that the filters keep [R] int64, smallest kept logit [R, 1]), by the rules of `ops.sample`. Logits
    [R, V] float32 without NaN."""
    vocab = logits.shape[1]
    ordered = logits.sort(-1, descending=True).values
    likeliness = processed(ordered - ordered[:, :1], temperature, torch.ones_like(ordered, dtype=torch.bool))
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()[:, None]
    within = ordered >= ordered.gather(1, k - 1)
    mass = likeliness.exp() * within
    likelier = mass.cumsum(-1) - mass
    p = torch.where(top_p < 1, top_p, torch.inf)[:, None]
    within &= (likelier < p * mass.sum(-1, keepdim=True)) & (likeliness >= min_p.clamp(0, 1).log()[:, None])
    least = ordered.gather(1, within.sum(-1, keepdim=True).clamp_min(1) - 1)
    return (ordered >= least).sum(-1), least


def drawn_logprobs(
    logits: Tensor, tokens: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probability [R] float32 of tokens [R] in the distributions that they were drawn from, kept tokens [R] int64).

    For a greedy row, temperature 1 is used. A drawn token always counts as kept, even if rounding puts it below a threshold.
    """
    logits = logits.float()
    _, least = kept_counts(logits, temperature, top_k, top_p, min_p)
    kept = logits >= torch.minimum(least, logits.gather(1, tokens[:, None]))
    wanted = torch.zeros_like(tokens, dtype=torch.int32)
    logprobs = ops.top_logprobs(processed(logits, temperature, kept), tokens, wanted, 1)[0]
    return logprobs, kept.sum(-1)
