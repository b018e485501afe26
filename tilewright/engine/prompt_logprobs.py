"""Log-probabilities of the tokens of prompts, for requests with `prompt_logprobs`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.engine.request import TokenLogprobs
from tilewright.engine.sampler import LogprobTensors, likelihoods
from tilewright.engine.step import Step

__all__ = ["prompt_logprobs", "read_prompt_logprobs"]

_ROWS = 256
"""Rows of logits of a prompt that are computed at a time: 256 x 151936 in float32 are 156 MB."""


def prompt_logprobs(step: Step, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> list[tuple[int, LogprobTensors]]:
    """(row, log-probabilities on their way to the host) for the rows of a step that request them, in order. A long row has
    several entries.

    hidden: [T, E], those of the step. logits: the function from rows of hidden states [R, E] to logits [R, V].
    """
    found, begin = [], 0
    for i, (request, start, count, *_) in enumerate(step.rows):
        alternatives = request.params.prompt_logprobs
        targets = request.prompt_ids[start + 1 : start + count + 1]
        if alternatives is not None:
            for at in range(0, len(targets), _ROWS):
                ids = torch.tensor(targets[at : at + _ROWS], dtype=torch.int64)
                ids = ids.to(hidden.device, non_blocking=True)
                rows = logits(hidden[begin + at : begin + at + ids.shape[0]])
                wanted = torch.full(ids.shape, alternatives, dtype=torch.int32, device=hidden.device)
                found.append((i, likelihoods(rows, ids, wanted).sent(ids.shape[0])))
        begin += count
    return found


def read_prompt_logprobs(step: Step, sent: Sequence[tuple[int, LogprobTensors]] | None) -> list[list[TokenLogprobs] | None]:
    """The value of `StepResult.prompt_logprobs`. The tensors must have arrived on the host."""
    if not sent:
        return []
    found: list[list[TokenLogprobs] | None] = [None] * len(step.requests)
    for i, tensors in sent:
        wanted = step.requests[i].params.prompt_logprobs or 0
        read = tensors.read([wanted] * tensors.words.shape[0])
        found[i] = (found[i] or []) + [entry for entry in read if entry is not None]
    return found
