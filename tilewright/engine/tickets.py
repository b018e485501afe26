"""What a runner keeps of a step between its launch and its collection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.engine.graphs import DecodeGraph
from tilewright.engine.layout import Inputs
from tilewright.engine.sampler import LogprobTensors
from tilewright.engine.step import Step

__all__ = ["Ticket", "Waiting"]


@dataclass
class Waiting:
    """A step between the model's pass and sampling."""

    inputs: Inputs
    hidden: Tensor
    graph: DecodeGraph | None
    """The graphs of head and sampling; None: they run eagerly."""
    turn: int
    in_turns: bool
    """`Head.in_turns` draws the samples."""
    logits: Tensor | None = None
    """Those of a step with masked rows whose head runs eagerly."""


@dataclass
class Ticket:
    """A launched step: where its results arrive, and the event after which they are there."""

    step: Step
    tokens: Tensor | None
    done: torch.cuda.Event | None
    logprobs: LogprobTensors | None = None
    """Those of the samples; None if no row requests them."""
    prompt_logprobs: list[tuple[int, LogprobTensors]] | None = None
    waiting: Waiting | None = None
    """The data needed for sampling, until the step has been sampled."""
