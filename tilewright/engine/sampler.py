"""What a request may ask of its logits beyond `ops.sample`: penalties, biases, banned stop tokens, log-probabilities.

Most requests ask for none of it, and their steps never come here. Order, as in OpenAI's API and its followers:
log-probabilities are of the model's own logits; then repetition, presence and frequency penalties, then biases and bans,
then temperature and the filters of `ops.sample`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright import ops
from tilewright.engine.request import Request, SamplingParams, TokenLogprobs

__all__ = ["LogprobTensors", "edit_logits", "likelihoods", "needs_logits"]


def needs_logits(params: SamplingParams) -> bool:
    """Whether a request ever needs `edit_logits` or `likelihoods`."""
    asks = params.logprobs is not None or params.prompt_logprobs is not None
    return asks or params.needs_history or bool(params.logit_bias) or params.min_tokens > 0


def edit_logits(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Logits [R, V] of R requests after penalties, biases and bans: a float32 copy. The next token of each is sampled."""
    out = logits.float()
    out = out.clone() if out is logits else out
    vocab = logits.shape[1]
    rows: list[int] = []
    tokens: list[int] = []
    repetition: list[float] = []
    penalty: list[float] = []
    bias_at: list[tuple[int, int, float]] = []
    for row, request in enumerate(requests):
        p = request.params
        if p.needs_history:
            counts = Counter(request.output_ids)
            seen = counts.keys() | request.prompt_ids if p.repetition_penalty != 1 else counts.keys()
            for token in seen:
                count = counts[token]
                rows.append(row)
                tokens.append(token)
                repetition.append(p.repetition_penalty)
                penalty.append(count * p.frequency_penalty + (count > 0) * p.presence_penalty)
        bias_at += [(row, token, bias) for token, bias in p.logit_bias.items() if token < vocab]
        if request.stop_ids and request.stop_banned(request.total):
            bias_at += [(row, token, float("-inf")) for token in request.stop_ids if token < vocab]
    if rows:
        at = (_ints(rows, logits), _ints(tokens, logits))
        factor, minus = _floats(repetition, logits), _floats(penalty, logits)
        values = out[at]
        out[at] = torch.where(values > 0, values / factor, values * factor) - minus
    if bias_at:
        r, t, b = zip(*bias_at, strict=True)
        out.index_put_((_ints(r, logits), _ints(t, logits)), _floats(b, logits), accumulate=True)
    return out


class LogprobTensors(NamedTuple):
    """Log-probabilities of N tokens, on the way to the host."""

    token_ids: Tensor
    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def read(self, wanted: Sequence[int]) -> list[TokenLogprobs]:
        """As values; `wanted[i]` alternatives for token i. The tensors must have arrived."""
        ids, logprob, rank = self.token_ids.tolist(), self.logprob.tolist(), self.rank.tolist()
        top_ids, top = self.top_ids.tolist(), self.top_logprobs.tolist()
        return [
            TokenLogprobs(ids[i], logprob[i], rank[i], tuple(zip(top_ids[i][:n], top[i][:n], strict=True)))
            for i, n in enumerate(wanted)
        ]


def likelihoods(logits: Tensor, token_ids: Tensor, alternatives: int) -> LogprobTensors:
    """Log-probability and rank of one token a row of logits [N, V], and the likeliest `alternatives` tokens beside it."""
    logprob, rank = ops.token_logprobs(logits, token_ids)
    own = logits.gather(1, token_ids[:, None]).float()
    top, top_ids = logits.float().topk(alternatives, dim=1)
    return LogprobTensors(token_ids, logprob, rank, top_ids, top - own + logprob[:, None])


def _ints(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(like.device, non_blocking=True)


def _floats(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(like.device, non_blocking=True)
