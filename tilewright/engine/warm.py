"""The steps of a warm-up: every size of step that uses different kernels."""

import torch

from tilewright.engine.layout import Inputs, Layout
from tilewright.ops.paged import FEW_QUERIES

__all__ = ["padding_inputs", "warm_sizes"]


def warm_sizes(most: int) -> list[tuple[int, int]]:
    """(tokens of the step, tokens of its longest row) for each eager step of a warm-up, the largest first."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    # Attention has a separate kernel for rows of few tokens.
    return [(tokens, longest) for tokens in reversed(powers) for longest in (2, FEW_QUERIES + 1)]


def padding_inputs(tokens: int, longest: int, max_seqs: int, max_samples: int, device: torch.device, kinds: int = 1) -> Inputs:
    """The inputs of a step of `tokens` padding tokens."""
    seqs = min(tokens, max_seqs)
    layout = Layout(tokens, seqs, min(tokens, max_samples), kinds=kinds)
    inputs = layout.device(
        torch.zeros(layout.nbytes, dtype=torch.uint8, device=device),
        torch.zeros(kinds, seqs, 1, dtype=torch.int32, device=device),
        longest,
    )
    inputs.padded()
    inputs.sampled_slots.fill_(max_seqs)
    return inputs
