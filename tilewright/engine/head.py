"""From a step's hidden states to its samples: the head, the edits of the logits, the masks, the draw.

There are two ways, and a captured graph of each: `plain` for steps whose rows want nothing but a sample, `full` where any row
edits its logits or wants log-probabilities. Where a row with drafts counts its tokens, for penalties, there is a third: the
samples of a row are drawn one after the other (`in_turns`), because the counts at a draft's position are those of the tokens
before it, and count only while these are what was drafted.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright import ops
from tilewright.engine.draws import drawn_logprobs
from tilewright.engine.graphs import Sampled
from tilewright.engine.layout import Inputs
from tilewright.engine.sampler import LogitTables, Mask, likelihoods
from tilewright.engine.step import Step
from tilewright.models import Model
from tilewright.models.draft_heads import DraftHead

__all__ = ["Head", "Turns", "turns_of"]

Turns = tuple[Sequence[Tensor], Tensor]
"""(for each turn the samples, by their numbers, that are drawn in it; [R] int64, the draft that follows each sample, or -1)"""


def turns_of(step: Step, device: torch.device) -> Turns:
    """Turn i draws sample i of each row that has so many."""
    samples = step.samples
    begins = np.cumsum(samples) - samples
    following = np.full(int(samples.sum()), -1, np.int64)
    for i, drafts in step.drafts.items():
        following[begins[i] : begins[i] + len(drafts)] = drafts
    lines = [begins[samples > turn] + turn for turn in range(int(samples.max()))]
    return [torch.from_numpy(turn).to(device) for turn in lines], torch.from_numpy(following).to(device)


class Head:
    """The ways of a model's samples. `last` [max_seqs + 1] int64: they are also left there, by slot, for the next step.

    explains_draws: log-probabilities come with those in the distribution that was drawn from.
    """

    def __init__(self, model: Model, edits: LogitTables, last: Tensor, *, explains_draws: bool = False):
        self._model, self._edits, self._last, self._explains_draws = model, edits, last, explains_draws

    def plain(self, inputs: Inputs, hidden: Tensor, mask: Mask | None = None) -> Sampled:
        """Tokens [R] of rows that want nothing but a sample, masked or not."""
        logits = self._logits(inputs, hidden)
        if mask is not None:
            ops.mask_logits(logits, mask.rows, mask.bits)
        return Sampled(self._sample(logits, inputs))

    def full(self, inputs: Inputs, hidden: Tensor, mask: Mask | None = None) -> Sampled:
        """The same where rows want more: logits are edited and masked first; log-probabilities are of what the head gave."""
        logits = self._logits(inputs, hidden)
        edited = self._edits.edit(logits, inputs.sampled_slots, inputs.sampled_at)
        if mask is not None:
            ops.mask_logits(edited, mask.rows, mask.bits)
        tokens = self._sample(edited, inputs)
        self._edits.count(inputs.sampled_slots, tokens)
        found = likelihoods(logits, tokens, inputs.alternatives)
        if self._explains_draws:
            settings = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p
            drawn, kept = drawn_logprobs(edited, tokens, *settings)
            found = found._replace(drawn=drawn, kept=kept)
        return Sampled(tokens, found)

    def in_turns(self, inputs: Inputs, hidden: Tensor, mask: Mask | None, turns: Turns) -> Sampled:
        """The same where a row has drafts and counts its tokens: a sample is counted if all before it were as drafted."""
        logits = self._logits(inputs, hidden)
        # What a mask forbids is -inf, which no edit changes: so it may come first, and once.
        masked = logits
        if mask is not None:
            masked = logits.clone()
            ops.mask_logits(masked, mask.rows, mask.bits)
        tokens = torch.zeros_like(inputs.sampled_slots)
        padding = self._last.numel() - 1
        agrees = torch.ones_like(self._last, dtype=torch.bool)  # by slot
        lines, following = turns
        for turn in lines:
            slots, at = inputs.sampled_slots[turn], inputs.sampled_at[turn]
            edited = self._edits.edit(masked[turn], slots, at)
            settings = [part[turn] for part in (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed)]
            drawn = self._draw(edited, settings, at)
            tokens[turn] = drawn
            self._edits.count(torch.where(agrees[slots], slots, padding), drawn)
            agrees[slots] &= drawn == following[turn]
        self._last.index_copy_(0, inputs.sampled_slots[lines[0]], tokens[lines[0]])
        return Sampled(tokens, likelihoods(logits, tokens, inputs.alternatives))

    def _logits(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        if inputs.feed is None:  # derived: each row is a token, and is sampled
            return self._model.logits(hidden)
        return self._model.logits(hidden[inputs.batch.logits_rows])

    def _sample(self, logits: Tensor, inputs: Inputs) -> Tensor:
        settings = [inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed]
        # A draft head says what comes next but one, and shall draw with the noise of that position.
        at = inputs.sampled_at + 1 if isinstance(self._model, DraftHead) else inputs.sampled_at
        tokens = self._draw(logits, settings, at)
        # Of several samples in one slot any stays: who has drafts waits for them, and is not fed from here.
        self._last.index_copy_(0, inputs.sampled_slots, tokens)
        return tokens

    @staticmethod
    def _draw(logits: Tensor, settings: list[Tensor], positions: Tensor) -> Tensor:
        temperature, top_k, top_p, min_p, seed = settings
        return ops.sample(logits, temperature, top_k, top_p, min_p, seed, positions)
