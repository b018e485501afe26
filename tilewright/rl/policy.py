"""The trainer's side of a policy: log-probabilities of packed samples, with gradients, by the model that also serves."""

import torch
from torch import Tensor

from tilewright import ops
from tilewright.models import Model
from tilewright.nn import Packed, PackedKeysValues
from tilewright.rl.batch import Batch

__all__ = ["logprobs_of"]

_IGNORED = -100


def logprobs_of(model: Model, batch: Batch) -> Tensor:
    """[T] float32: log-probability of every token after those before it in its sequence; 0 at each sequence's first token.

    One pass over the packed sequences; attention stays within them. Differentiable where the model asks for gradients.

    Raises:
        TypeError: the model's head is quantised, which has no gradient.
    """
    head = model.head.weight
    if not isinstance(head, Tensor):
        raise TypeError("the head is quantised, and a policy needs gradients through it: leave lm_head as it is")
    ends = batch.lengths.cumsum(0)
    firsts = torch.cat([ends.new_zeros(1), ends])
    positions = torch.arange(len(batch.tokens), device=ends.device) - batch.spread(firsts[:-1])
    packed = Packed(positions=positions, cu_q=firsts.int(), max_q_len=int(batch.lengths.max()))
    hidden_TE = model(batch.tokens, packed, PackedKeysValues())
    # The hidden state at t says the token at t + 1; the last of a sequence says nothing that was sampled.
    following = torch.cat([batch.tokens[1:], batch.tokens.new_full((1,), _IGNORED)])
    following = following.index_fill(0, ends[batch.lengths > 0] - 1, _IGNORED)
    logits_TV = ops.linear(hidden_TE, head, model.head.bias)
    losses = ops.cross_entropy(logits_TV.float(), following, ignore_index=_IGNORED, reduction="none")
    return -torch.cat([losses.new_zeros(1), losses[:-1]])
