"""What a warm-up runs: steps of every size that has kernels of its own."""

import torch

from tilewright.engine.layout import Inputs, Layout
from tilewright.ops.paged import FEW_QUERIES

__all__ = ["padding_inputs", "warm_sizes"]


def warm_sizes(most: int) -> list[tuple[int, int]]:
    """(tokens of a step, tokens of its longest row) of the eager steps of a warm-up, the largest first."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    # Of a sequence's tokens: attention has a kernel for few.
    return [(tokens, longest) for tokens in reversed(powers) for longest in (2, FEW_QUERIES + 1)]


def padding_inputs(tokens: int, longest: int, max_seqs: int, max_samples: int, device: torch.device, kinds: int = 1) -> Inputs:
    """A step of so many tokens, all padding."""
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
