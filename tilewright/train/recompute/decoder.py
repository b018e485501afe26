"""The profile of a language model of a given size without its weights: everything is on "meta"."""

import torch

from tilewright.hw.device import Device
from tilewright.models import ModelConfig, empty_model
from tilewright.nn import Packed
from tilewright.train.batch import TrainBatch
from tilewright.train.recompute.card import seconds_on
from tilewright.train.recompute.profile import Profile, profile
from tilewright.train.step import NextToken, trainable

__all__ = ["decoder_profile"]


def decoder_profile(config: ModelConfig, *, tokens: int, length: int, dtype: torch.dtype, card: Device) -> Profile:
    """The memory that one micro-batch keeps, with times by the roofline of a card.

    Args:
        config: config of the model.
        tokens: tokens of the micro-batch, packed.
        length: tokens of each document in it; the last one may be shorter.
        dtype: dtype of weights and activations.
        card: need not be present.

    Raises:
        ValueError: `tokens` or `length` is not positive, or the card is unknown.
    """
    if tokens < 1 or length < 1:
        raise ValueError(f"documents of {length} tokens in a batch of {tokens}: wanted at least 1 of each")
    model = empty_model(config, device="meta", dtype=dtype).requires_grad_(True)
    integers = {"dtype": torch.int64, "device": "meta"}
    batch = TrainBatch(
        token_ids=torch.empty(tokens, **integers),
        targets=torch.empty(tokens, **integers),
        packed=Packed(
            positions=torch.empty(tokens, **integers),
            cu_q=torch.empty(1 - (-tokens // length), dtype=torch.int32, device="meta"),
            max_q_len=min(tokens, length),
        ),
        n_targets=tokens,
    )
    loss = NextToken()
    return profile(
        list(model.blocks), lambda: loss(model, batch), parameters=list(trainable(model).values()), seconds_of=seconds_on(card)
    )  # fmt: skip
