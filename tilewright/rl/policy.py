"""The trainer's side of a policy: log-probabilities and entropies of packed samples, computed by the same model that samples.

They refer to the distribution from which the sampler drew the tokens: the logits are divided by the batch's temperature and
normalised over its `support`. With temperature 1 and without filters, this is the model's own distribution.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright import ops
from tilewright.engine.draws import processed
from tilewright.kernels.softmax.cross_entropy import cross_entropy_gradient_op
from tilewright.models import Model
from tilewright.nn import Packed, PackedKeysValues, ServedKeysValues
from tilewright.op import scope
from tilewright.rl.batch import Batch

__all__ = ["hidden_of", "logprobs_and_entropies_of", "logprobs_of", "support_of"]

_IGNORED = -100


def logprobs_of(model: Model, batch: Batch) -> Tensor:
    """[T] float32: the log-probability of every token, given the tokens before it in its sequence; 0 at each sequence's first
    token.

    Makes one pass over the packed sequences, with attention within each sequence. Differentiable if the model is trainable.

    Raises:
        TypeError: the model's head is quantised, so it has no gradient.
    """
    return _logprobs(_processed(_logits(model, batch), batch), batch)


def logprobs_and_entropies_of(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """(the result of `logprobs_of`; [T] float32, the entropy in nats of the distribution from which each token was drawn, 0 at
    each sequence's first token). Both are differentiable, and come from one pass."""
    processed_TV = _processed(_logits(model, batch), batch)
    entropies = _entropies(processed_TV)
    # The token at t + 1 is drawn from the distribution at position t.
    entropies = torch.cat([entropies.new_zeros(1), entropies[:-1]])
    return _logprobs(processed_TV, batch), entropies.index_fill(0, batch.starts, 0.0)


@torch.no_grad()
def support_of(model: Model, batch: Batch, width: int) -> Tensor:
    """[T, K] int64: the `kept` most likely tokens of each token's distribution, padded with -1. K is `width`, the greatest
    `kept`.

    The sampler reports how many tokens it kept, and both sides order tokens in the same way, except for rounding. If the token
    that was drawn is not among the most likely ones, because of rounding or because the weights have changed since, it replaces
    the last of them.
    """
    likeliest = _logits(model, batch).float().topk(width).indices
    found = torch.cat([likeliest.new_full((1, width), -1), likeliest[:-1]])
    kept = batch.known("kept")
    found = found.masked_fill(torch.arange(width, device=found.device) >= kept[:, None], -1)
    missing = (kept > 0) & ~(found == batch.tokens[:, None]).any(1)
    last = (kept - 1).clamp_min(0)[:, None]
    return found.scatter(1, last, torch.where(missing[:, None], batch.tokens[:, None], found.gather(1, last)))


def hidden_of(model: Model, batch: Batch) -> Tensor:
    """[T, E]: the hidden state at each token, from one pass over the packed sequences. Nothing waits for the device."""
    ends = batch.lengths.cumsum(0)
    firsts = torch.cat([ends.new_zeros(1), ends])
    positions = torch.arange(len(batch.tokens), device=ends.device) - batch.spread(firsts[:-1])
    packed = Packed(positions=positions, cu_q=firsts.int(), max_q_len=batch.longest or max(batch.sizes))
    # In the invariant scope, this pass agrees with a sampler bit for bit.
    return model(batch.tokens, packed, ServedKeysValues.of(packed) if scope().invariant else PackedKeysValues())


def _logits(model: Model, batch: Batch) -> Tensor:
    """[T, V] in the model's dtype: the model's prediction at each token."""
    if not isinstance(model.head.weight, Tensor):
        raise TypeError("a policy needs gradients through the head, but the head is quantised; leave lm_head unquantised")
    return model.logits(hidden_of(model, batch))


def _entropies(logits_TV: Tensor) -> Tensor:
    """[T] float32. Logits of -inf contribute nothing to the value or to the gradient."""
    logs_TV = logits_TV.float().log_softmax(-1)
    return -(logs_TV.exp() * logs_TV.masked_fill(logs_TV == -torch.inf, 0.0)).sum(-1)


def _processed(logits_TV: Tensor, batch: Batch) -> Tensor:
    """The logits of the distributions from which the tokens were drawn: the model's own, unless there is a temperature or a
    filter."""
    if batch.temperature == 1.0 and batch.support is None:
        return logits_TV
    kept = torch.ones_like(logits_TV, dtype=torch.bool)
    if batch.support is not None:
        count, vocab = logits_TV.shape
        # The token at t + 1 is drawn from the distribution at t. An extra column after the vocabulary collects the entries of
        # -1.
        support = torch.cat([batch.support[1:], batch.support.new_full((1, batch.support.shape[1]), -1)])
        found = torch.zeros(count, vocab + 1, dtype=torch.bool, device=support.device)
        kept = found.scatter_(1, support.where(support >= 0, vocab), True)[:, :vocab] | (support[:, :1] < 0)
    return processed(logits_TV, torch.full_like(kept[:, 0], batch.temperature, dtype=torch.float32), kept)


def _logprobs(processed_TV: Tensor, batch: Batch) -> Tensor:
    # The hidden state at t predicts the token at t + 1. The prediction of a sequence's last hidden state is not used.
    following = torch.cat([batch.tokens[1:], batch.tokens.new_full((1,), _IGNORED)])
    following = following.index_fill(0, batch.lasts, _IGNORED)
    if scope().invariant:
        with torch.no_grad():  # with the engine's operator
            alternatives = torch.where(following == _IGNORED, -1, 0).int()
            served, *_ = ops.top_logprobs(processed_TV, following.clamp_min(0), alternatives, 1)
        logprobs: Any = _Served.apply(processed_TV, following, served)
    else:
        logprobs = -ops.cross_entropy(processed_TV, following, ignore_index=_IGNORED, reduction="none")
    return torch.cat([logprobs.new_zeros(1), logprobs[:-1]])


class _Served(torch.autograd.Function):
    """The result `served` of the sampler's operator, with the gradient of the log-probability for logits [T, V] and tokens
    [T]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, served: Tensor) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        return served.view_as(served)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cross_entropy_gradient_op(*ctx.saved_tensors, -grads[0], _IGNORED, 0.0, 0.0)[1], None, None
