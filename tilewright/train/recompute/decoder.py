"""The profile of a language model of a given size, without its weights: all tensors are on "meta"."""

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
    """Profile the memory that one micro-batch keeps. Times are predicted by the roofline of a GPU.

    Args:
        config: the config of the model.
        tokens: number of tokens in the micro-batch; the documents are packed.
        length: number of tokens in each document; the last document may be shorter.
        dtype: dtype of the weights and activations.
        card: the GPU; it need not be present.

    Raises:
        ValueError: `tokens` or `length` is not positive, or the GPU is unknown.
    """
    if tokens < 1 or length < 1:
        raise ValueError(f"length is {length} and tokens is {tokens}; both must be at least 1")
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
