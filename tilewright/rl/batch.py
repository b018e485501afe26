"""The data from which all algorithms learn: sampled sequences, packed one after the other, with the sampler's probabilities.

    # T tokens of all sequences, S sequences

A sequence is a prompt and an answer, or a whole conversation. `mask` marks the tokens that the policy chose. Sequences that
answer the same prompt have the same `group`. Losses are divided by `totals`, which count the whole update. So if the batch of
an update is divided into micro-batches (`split`) or among ranks, the losses and gradients of the parts add up to those of the
whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["BY_SEQUENCE", "Batch", "Sample", "Totals", "pack", "parts_of", "select", "sent", "split", "tensors_of"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence, from an engine and an environment.

    tokens: prompt and answer.
    chosen: for each token, whether the policy chose it.
    logprobs: log-probability of each chosen token in the distribution from which the sampler drew it; 0 for other tokens.
    kept: for each token, how many tokens the sampler's filters left to draw from; None: no filters.
    version: version of the weights that sampled the sequence.
    truncated: whether the answer was cut off at a limit.
    """

    tokens: Sequence[int]
    chosen: Sequence[bool]
    logprobs: Sequence[float]
    reward: float
    group: int
    kept: Sequence[int] | None = None
    version: int = 0
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The divisors of losses: the number of chosen tokens, and the number of sequences that contain any, in the whole update
    over all ranks. In a captured pass, they are 0-dim tensors with values of at least 1."""

    tokens: int | Tensor
    sequences: int | Tensor

    @property
    def of_tokens(self) -> int | Tensor:
        """The number of tokens, or 1 if there are none."""
        return self.tokens if isinstance(self.tokens, Tensor) else max(1, self.tokens)

    @property
    def of_sequences(self) -> int | Tensor:
        """The number of sequences, or 1 if there are none."""
        return self.sequences if isinstance(self.sequences, Tensor) else max(1, self.sequences)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Packed sequences. Integers are int64. Log-probabilities, and everything computed from them, have the dtype of `sampled`.

    tokens [T].
    lengths [S]: number of tokens in each sequence.
    mask [T] bool: whether the policy chose the token.
    sampled [T]: the sampler's log-probability.
    old [T]: the trainer's log-probability before the first update of the step; `sampled` itself if the two are equal.
    rewards [S]; groups [S]; versions [S]; truncated [S] bool: as in `Sample`.
    advantages [T], returns [T]: None until they are computed.
    values [T]: the critic's values when the sequences were sampled; None until they are computed.
    reference [T]: log-probabilities of a frozen policy; None until they are computed.
    kept [T] int64: how many tokens the sampler's filters left to draw from; 0: all.
    support [T, K] int64: these tokens, padded with -1. A row of -1 only, or None: the whole vocabulary.

    All log-probabilities are those of the logits divided by `temperature`, normalised over `support`.
    """

    tokens: Tensor
    lengths: Tensor
    mask: Tensor
    sampled: Tensor
    old: Tensor
    rewards: Tensor
    groups: Tensor
    versions: Tensor
    truncated: Tensor
    totals: Totals
    temperature: float = 1.0
    kept: Tensor | None = None
    support: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    reference: Tensor | None = None
    sizes: tuple[int, ...] = ()
    """`lengths` on the host, so that no call waits for the device; (): `lengths` is read from the device once."""
    longest: int = 0
    """An upper bound of the lengths; 0: the longest of `sizes`."""

    def __post_init__(self) -> None:
        count, size = len(self.tokens), len(self.lengths)
        if len(self.sizes) != size:
            object.__setattr__(self, "sizes", tuple(self.lengths.tolist()))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                wanted = size if field.name in BY_SEQUENCE else count
                if value.shape[:1] != (wanted,) or value.dim() > 1 + (field.name == "support"):
                    raise ValueError(f"{field.name} has shape {tuple(value.shape)}; wanted ({wanted},)")
        if sum(self.sizes) != count:
            raise ValueError(f"the lengths add up to {sum(self.sizes)}, but there are {count} tokens")

    def chosen(self, x_T: Tensor) -> Tensor:
        """x for tokens that the policy chose. For other tokens, value and gradient are 0, whatever x is (even NaN)."""
        return torch.where(self.mask, x_T, torch.zeros((), dtype=x_T.dtype, device=x_T.device))

    def log_ratio(self, logprobs_T: Tensor) -> Tensor:
        """[T]: the logarithm of (new / old probability) for chosen tokens, 0 for others."""
        return self.chosen(logprobs_T) - self.chosen(self.old)

    def log_ratio_to_sampler(self) -> Tensor:
        """[T]: the logarithm of (the trainer's old / the sampler's probability) for chosen tokens, 0 for others."""
        return self.chosen(self.old) - self.chosen(self.sampled)

    def sums(self, x_T: Tensor) -> Tensor:
        """[S]: the sum over each sequence's chosen tokens, in a fixed order (no atomics)."""
        return torch.segment_reduce(self.chosen(x_T), "sum", lengths=self.lengths, unsafe=True)

    def counts(self) -> Tensor:
        """[S]: the number of chosen tokens in each sequence."""
        return self.sums(torch.ones_like(self.sampled))

    def spread(self, x_S: Tensor) -> Tensor:
        """[T]: for each token, the value of x for its sequence."""
        return torch.repeat_interleave(x_S, self.lengths, output_size=len(self.tokens))

    @property
    def starts(self) -> Tensor:
        """[S]: index of each sequence's first token; for a sequence without tokens, the index of some other token."""
        return (self.lengths.cumsum(0) - self.lengths) % max(1, len(self.tokens))

    @property
    def lasts(self) -> Tensor:
        """[S]: index of each sequence's last token; for a sequence without tokens, the index of some other token."""
        return (self.lengths.cumsum(0) - 1) % max(1, len(self.tokens))

    def total(self, x_T: Tensor) -> Tensor:
        """The sum over all chosen tokens."""
        return self.chosen(x_T).sum()

    def to(self, device: torch.device | str) -> "Batch":
        """The batch, with all its tensors on a device."""
        return replace(self, **{name: x.to(device) for name, x in tensors_of(self).items()})

    def known(self, name: str) -> Tensor:
        """The value of a field that must have been computed.

        Raises:
            ValueError: the field is None.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"this loss needs the field {name} of the batch, which has not been computed")
        return value


BY_SEQUENCE = frozenset({"lengths", "rewards", "groups", "versions", "truncated"})
"""The fields with one value per sequence. The other tensors have one value per token."""


def pack(samples: Sequence[Sample], dtype: torch.dtype = torch.float32, *, temperature: float = 1.0) -> Batch:
    """Pack all samples, which were drawn at `temperature`, into one batch on the CPU.

    Raises:
        ValueError: there are no samples, the lists of a sample differ in length, or a number is not finite.
    """
    if not samples:
        raise ValueError("the batch needs at least one sample, and the list of samples is empty")
    for place, sample in enumerate(samples):
        sizes = len(sample.tokens), len(sample.chosen), len(sample.logprobs)
        kept = sizes[0] if sample.kept is None else len(sample.kept)
        if len({*sizes, kept}) > 1 or not sizes[0]:
            raise ValueError(
                f"sample {place} has {sizes[0]} tokens, {sizes[1]} marks in chosen and {sizes[2]} log-probabilities; "
                "wanted the same number of each (also in kept), and at least 1"
            )
    sampled = _joined((sample.logprobs for sample in samples), np.float64).to(dtype)
    rewards = torch.tensor([float(sample.reward) for sample in samples], dtype=dtype)
    if not (sampled.isfinite().all() and rewards.isfinite().all()):
        raise ValueError("a reward or a log-probability is not finite; leave out such samples, and count them")
    mask = torch.from_numpy(np.frombuffer(bytearray().join(bytes(sample.chosen) for sample in samples), np.bool_))
    sizes = tuple(len(sample.tokens) for sample in samples)
    return Batch(
        tokens=_joined((sample.tokens for sample in samples), np.int64),
        lengths=torch.tensor(sizes),
        sizes=sizes,
        mask=mask,
        sampled=sampled,
        old=sampled,
        rewards=rewards,
        groups=torch.tensor([sample.group for sample in samples]),
        versions=torch.tensor([sample.version for sample in samples]),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        kept=_joined((sample.kept or np.zeros(len(sample.tokens), np.int64) for sample in samples), np.int64),
        temperature=temperature,
        totals=Totals(tokens=int(mask.sum()), sequences=sum(any(sample.chosen) for sample in samples)),
    )


def _joined(parts: Iterable[Any], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype) for part in parts]))


def split(batch: Batch, most_tokens: int) -> list[Batch]:
    """Divide a batch, between sequences, into parts of at most `most_tokens` tokens. A longer sequence becomes a part of its
    own.

    Every part keeps the `totals` of the whole batch, so the losses of the parts add up to the loss of the whole. Compute
    advantages first, because they need complete groups. The parts are views, and nothing waits for the device.
    """
    parts, first = [], 0
    for begin, end in parts_of(batch.sizes, most_tokens):
        sizes = batch.sizes[begin:end]
        last = first + sum(sizes)
        of = {True: slice(begin, end), False: slice(first, last)}
        changed = {name: value[of[name in BY_SEQUENCE]] for name, value in tensors_of(batch).items()}
        parts.append(replace(batch, **changed, sizes=sizes))
        first = last
    return parts


def parts_of(sizes: Sequence[int], most_tokens: int) -> list[tuple[int, int]]:
    """(first sequence, end) of each part that `split` makes of sequences with these lengths; the end is exclusive."""
    bounds, used = [0], 0
    for index, length in enumerate(sizes):
        if used + length > most_tokens and index > bounds[-1]:
            bounds.append(index)
            used = 0
        used += length
    return list(pairwise([*bounds, len(sizes)]))


def select(batch: Batch, kept: Tensor) -> Batch:
    """The sequences with these indices (int64 on the CPU), in this order. `totals` does not change. Nothing waits for the
    device."""
    begins, chosen = [0, *accumulate(batch.sizes)], kept.tolist()
    spans = [np.arange(begins[i], begins[i + 1]) for i in chosen]
    tokens = torch.from_numpy(np.concatenate(spans)) if spans else kept.new_zeros(0)
    indices = {True: sent(kept, batch.lengths.device), False: sent(tokens, batch.lengths.device)}
    changed = {name: value[indices[name in BY_SEQUENCE]] for name, value in tensors_of(batch).items()}
    return replace(batch, **changed, sizes=tuple(batch.sizes[i] for i in chosen))


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The fields that are tensors, by name."""
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy x from the CPU to a device. The host does not wait for earlier work on the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
