"""Applies a plan to blocks, with torch's selective checkpointing. Gradients are bitwise the same as without it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilewright.train.recompute.plan import Choice

__all__ = ["applied"]


@contextmanager
def applied(blocks: Sequence[nn.Module], choices: Sequence[Choice]) -> Iterator[None]:
    """Within this context, each block keeps what its choice says when it runs with gradients.

    The backward pass may run after the context has ended, because what is kept is decided in the forward pass.

    Raises:
        ValueError: the number of choices differs from the number of blocks.
    """
    if len(blocks) != len(choices):
        raise ValueError(
            f"the plan is for {len(choices)} blocks, but the model has {len(blocks)}; make the plan from a profile of "
            "this model"
        )
    wrapped = [block for block, choice in zip(blocks, choices) if choice.kept is not None]
    for block, choice in zip(blocks, choices):
        if choice.kept is not None:
            block.forward = partial(_run, block.forward, choice.kept)
    try:
        yield
    finally:
        for block in wrapped:
            del block.forward


def _run(forward: Any, kept: frozenset[int], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not kept:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, kept), **kwargs)


def _contexts(kept: frozenset[int]) -> Any:
    calls = {False: -1, True: -1}  # number of the current call: in the forward pass (False), in the recomputation (True)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        calls[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if calls[context.is_recompute] in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
