"""From a step's hidden states to its samples: the head, the edits of the logits, the masks, and sampling.

There are three variants, each with a captured graph: `plain` for steps whose rows only need a sample, `scored` if any row
requests log-probabilities, and `full` if any row edits its logits, which takes a copy of them. A fourth variant, `in_turns`, is
used if a row with drafts edits its logits. It draws the samples of a row one after the other, because penalties depend on token
counts: the counts at a draft's position include the samples before it, and these are valid only while they equal the drafts.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright import ops
from tilewright.engine.draws import drawn_logprobs
from tilewright.engine.graphs import Sampled
from tilewright.engine.layout import Inputs
from tilewright.engine.sampler import LogitTables, LogprobTensors, Mask, likelihoods
from tilewright.engine.step import Step
from tilewright.models import Model
from tilewright.models.draft_heads import DraftHead

__all__ = ["FULL", "PLAIN", "SCORED", "Head", "Turns", "turns_of"]

PLAIN, SCORED, FULL = range(3)
"""The variants with a captured graph; the index of each in `Head.tails`."""

Turns = tuple[Sequence[Tensor], Tensor]
"""(indices of the samples that are drawn in each turn; [R] int64: the draft at each sample's position, or -1)"""


def turns_of(step: Step, device: torch.device) -> Turns:
    """The turns of a step: turn i draws sample i of each row that has more than i samples."""
    samples = step.samples
    begins = np.cumsum(samples) - samples
    following = np.full(int(samples.sum()), -1, np.int64)
    for i, drafts in step.drafts.items():
        following[begins[i] : begins[i] + len(drafts)] = drafts
    lines = [begins[samples > turn] + turn for turn in range(int(samples.max()))]
    return [torch.from_numpy(turn).to(device) for turn in lines], torch.from_numpy(following).to(device)


class Head:
    """Draws the samples of a model. `last` [max_seqs + 1] int64: they are also stored there, by slot, for the next step.

    explains_draws: also return log-probabilities in the distribution that was sampled (`TokenLogprobs.drawn`).
    """

    def __init__(self, model: Model, edits: LogitTables, last: Tensor, *, explains_draws: bool = False):
        self._model, self._edits, self._last, self._explains_draws = model, edits, last, explains_draws

    @property
    def tails(self) -> tuple[Callable[..., Sampled], ...]:
        """The variants with a captured graph: `plain`, `scored` and `full`. Further arguments are the mask and the logits."""
        return self.plain, self.scored, self.full

    def plain(self, inputs: Inputs, hidden: Tensor, mask: Mask | None = None, logits: Tensor | None = None) -> Sampled:
        """Tokens [R] of rows that only need a sample, masked or not. `logits`: the result of `logits`, which is overwritten."""
        logits = self.logits(inputs, hidden) if logits is None else logits
        if mask is not None:
            ops.mask_logits(logits, mask.rows, mask.bits)
        return Sampled(self._sample(logits, inputs))

    def scored(self, inputs: Inputs, hidden: Tensor, mask: Mask | None = None, logits: Tensor | None = None) -> Sampled:
        """`plain` with log-probabilities, which are those of the unmasked logits."""
        logits = allowed = self.logits(inputs, hidden) if logits is None else logits
        if mask is not None:
            allowed = logits.clone()
            ops.mask_logits(allowed, mask.rows, mask.bits)
        tokens = self._sample(allowed, inputs)
        return Sampled(tokens, self._likelihoods(logits, allowed, tokens, inputs))

    def full(self, inputs: Inputs, hidden: Tensor, mask: Mask | None = None, logits: Tensor | None = None) -> Sampled:
        """`scored` with edits: logits are edited, then masked. Log-probabilities are those of the unedited logits."""
        logits = self.logits(inputs, hidden) if logits is None else logits
        edited = self._edits.edit(logits, inputs.sampled_slots, inputs.sampled_at)
        if mask is not None:
            ops.mask_logits(edited, mask.rows, mask.bits)
        tokens = self._sample(edited, inputs)
        self._edits.count(inputs.sampled_slots, tokens)
        return Sampled(tokens, self._likelihoods(logits, edited, tokens, inputs))

    def in_turns(
        self, inputs: Inputs, hidden: Tensor, mask: Mask | None, turns: Turns, logits: Tensor | None = None
    ) -> Sampled:
        """`full` if a row with drafts edits its logits. A sample is counted if all samples of its row before it equal the
        drafts."""
        logits = self.logits(inputs, hidden) if logits is None else logits
        # A mask sets forbidden logits to -inf, which no edit changes; so it can be applied first, and only once.
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

    def _likelihoods(self, logits: Tensor, sampled: Tensor, tokens: Tensor, inputs: Inputs) -> LogprobTensors:
        """Log-probabilities of tokens by `logits`; with `explains_draws` also by `sampled`, the logits they were drawn from."""
        found = likelihoods(logits, tokens, inputs.alternatives)
        if self._explains_draws:
            settings = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p
            drawn, kept = drawn_logprobs(sampled, tokens, *settings)
            found = found._replace(drawn=drawn, kept=kept)
        return found

    def logits(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """Logits [R, V] of the sampled rows."""
        if inputs.feed is None:  # derived inputs: each row has one token, which is sampled
            return self._model.logits(hidden)
        return self._model.logits(hidden[inputs.batch.logits_rows])

    def _sample(self, logits: Tensor, inputs: Inputs) -> Tensor:
        settings = [inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed]
        # A draft head predicts the token after the next one, and must draw with the noise of that position.
        at = inputs.sampled_at + 1 if isinstance(self._model, DraftHead) else inputs.sampled_at
        tokens = self._draw(logits, settings, at)
        # If a slot has several samples, any of them is stored: a request with drafts waits and is never fed from here.
        self._last.index_copy_(0, inputs.sampled_slots, tokens)
        return tokens

    @staticmethod
    def _draw(logits: Tensor, settings: list[Tensor], positions: Tensor) -> Tensor:
        temperature, top_k, top_p, min_p, seed = settings
        return ops.sample(logits, temperature, top_k, top_p, min_p, seed, positions)
