"""The trainer's side of a policy: log-probabilities and entropies of packed samples, by the model that also serves."""

import torch
from torch import Tensor

from tilewright import ops
from tilewright.models import Model
from tilewright.nn import Packed, PackedKeysValues, ServedKeysValues
from tilewright.op import scope
from tilewright.ops.values import valued
from tilewright.rl.batch import Batch

__all__ = ["hidden_of", "logprobs_and_entropies_of", "logprobs_of"]

_IGNORED = -100


def logprobs_of(model: Model, batch: Batch) -> Tensor:
    """[T] float32: log-probability of every token after those before it in its sequence; 0 at each sequence's first token.

    One pass over the packed sequences; attention stays within them. Differentiable where the model asks for gradients.

    Raises:
        TypeError: the model's head is quantised, which has no gradient.
    """
    return _logprobs(_logits(model, batch), batch)


def logprobs_and_entropies_of(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """As `logprobs_of`, and [T] float32: the entropy, in nats, of the distribution that each token was drawn from; 0 at each
    sequence's first token. Both with gradients, from one pass."""
    logits_TV = _logits(model, batch)
    logs_TV = logits_TV.float().log_softmax(-1)
    entropies = -(logs_TV.exp() * logs_TV).sum(-1)
    # What is drawn at t + 1 is drawn from the distribution behind t.
    entropies = torch.cat([entropies.new_zeros(1), entropies[:-1]])
    starts = batch.lengths.cumsum(0) - batch.lengths
    return _logprobs(logits_TV, batch), entropies.index_fill(0, starts[batch.lengths > 0], 0.0)


def hidden_of(model: Model, batch: Batch) -> Tensor:
    """[T, E]: the hidden state behind each token, from one pass over the packed sequences."""
    ends = batch.lengths.cumsum(0)
    firsts = torch.cat([ends.new_zeros(1), ends])
    positions = torch.arange(len(batch.tokens), device=ends.device) - batch.spread(firsts[:-1])
    packed = Packed(positions=positions, cu_q=firsts.int(), max_q_len=int(batch.lengths.max()))
    # In the invariant scope a sampler and this pass agree bit for bit.
    return model(batch.tokens, packed, ServedKeysValues.of(packed) if scope().invariant else PackedKeysValues())


def _logits(model: Model, batch: Batch) -> Tensor:
    """[T, V] in the model's dtype: what the model says behind each token."""
    if not isinstance(model.head.weight, Tensor):
        raise TypeError("the head is quantised, and a policy needs gradients through it: leave lm_head as it is")
    return model.logits(hidden_of(model, batch))


def _logprobs(logits_TV: Tensor, batch: Batch) -> Tensor:
    ends = batch.lengths.cumsum(0)
    # The hidden state at t says the token at t + 1; the last of a sequence says nothing that was sampled.
    following = torch.cat([batch.tokens[1:], batch.tokens.new_full((1,), _IGNORED)])
    following = following.index_fill(0, ends[batch.lengths > 0] - 1, _IGNORED)
    losses = ops.cross_entropy(logits_TV.float(), following, ignore_index=_IGNORED, reduction="none")
    if scope().invariant:
        with torch.no_grad():  # as the engine computes them
            alternatives = torch.where(following == _IGNORED, -1, 0).int()
            served, *_ = ops.top_logprobs(logits_TV, following.clamp_min(0), alternatives, 1)
        losses = valued(losses, -served)
    return -torch.cat([losses.new_zeros(1), losses[:-1]])
