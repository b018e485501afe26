"""Lower bounds for a run of the engine by a card's memory and arithmetic: the bytes and operations that no schedule avoids.

Weights are read once per pass over the model, as often as the engine made passes; an embedding table that is not also the head
is not counted. A token's keys and values are written once, a prompt's are read once, and each further token reads those of all
positions before it. A product counts two operations per weight and token (for the head: per sampled token), attention four per
head, dimension and position that a token sees.

Other work (norms, activations, dividing a prompt into chunks, sampling) is not counted, so shares of the limit are lower
bounds, at most 1.

`limits` adds up all bytes, and all operations, of a run: two bounds, which assume that memory and arithmetic are always busy at
once. `step_limit` is closer: in each pass the products, and then attention, each take the longer of their two times.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tilewright.hw.ceilings import Ceilings
from tilewright.models import Model, kv_bytes_per_token, weight_bytes_of
from tilewright.models.config import ModelConfig
from tilewright.nn import Linear

__all__ = ["Limits", "Pass", "Requests", "Weights", "limits", "shares", "step_limit", "weights_of"]

_UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32"}
_CODED_UNITS = {"int8": "int8", "fp8": "fp8", "fp8-block": "fp8", "mxfp8": "fp8"}
"""Formats whose products are of 8 bits; the others multiply in the model's dtype."""

Requests = Iterable[tuple[int, int]]
"""(tokens in, tokens out) of each."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The sizes of a model's weights."""

    bytes_a_pass: int
    flops_a_token: int
    """Weights of all linear layers except the head."""
    flops_a_sample: int
    """Weights of the head."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The least seconds that a run needs."""

    bytes_s: float
    flops_s: float


def weights_of(model: Model) -> Weights:
    """The sizes of the weights of a model, on any device, quantised or not."""
    products = {id(m): 2 * m.weight.shape[0] * m.weight.shape[1] for m in model.modules() if isinstance(m, Linear)}
    head = products.pop(id(model.head))
    embedding = 0 if model.config.tie_word_embeddings else model.embed.weight.nbytes
    return Weights(bytes_a_pass=weight_bytes_of(model) - embedding, flops_a_token=sum(products.values()), flops_a_sample=head)


def limits(
    config: ModelConfig, weights: Weights, requests: Requests, passes: int, found: Ceilings, *, dtype: torch.dtype,
    cache_dtype: torch.dtype, format: str | None = None, decode_only: bool = False,
) -> Limits:  # fmt: skip
    """The limits of a run.

    Args:
        passes: over the model, of prompts and of decoding.
        found: the card's.
        dtype: of the activations.
        cache_dtype: of keys and values.
        format: of the weights; None: `dtype`.
        decode_only: the run counts from each request's first token on.
    """
    tokens = samples = positions = 0
    flops = 0.0
    for told, asked in requests:
        first, last = (told if decode_only else 0), told + asked - 1  # the last token is not fed back
        tokens += last - first
        samples += asked - decode_only
        positions += sum(range(told + 1, last + 1)) + (0 if decode_only else told)
        flops += 4.0 * config.num_attention_heads * config.head_dim * sum(_seen(w, first, last) for w in config.windows)
    kv = kv_bytes_per_token(config, cache_dtype)
    bytes_moved = passes * weights.bytes_a_pass + kv * (tokens + positions)
    own = _UNITS[dtype]
    products = tokens * weights.flops_a_token + samples * weights.flops_a_sample
    unit = _CODED_UNITS.get(format or "", own)
    flops_s = products / found.flops.get(unit, found.flops[own]) + flops / found.flops[own]
    return Limits(bytes_s=bytes_moved / found.read, flops_s=flops_s)


class Pass(NamedTuple):
    """One pass over the model: tokens [start, start + count) of each row."""

    starts: np.ndarray
    counts: np.ndarray
    samples: int
    """Tokens whose logits are computed, over all rows."""


def step_limit(
    config: ModelConfig, weights: Weights, passes: Iterable[Pass], found: Ceilings, *, dtype: torch.dtype,
    cache_dtype: torch.dtype, format: str | None = None,
) -> float:  # fmt: skip
    """The least seconds of a run whose products and attention do not overlap; arguments as for `limits`."""
    layer_kv, own = kv_bytes_per_token(config, cache_dtype) / len(config.windows), _UNITS[dtype]
    rate = found.flops.get(_CODED_UNITS.get(format or "", own), found.flops[own])
    scores, seconds = 4.0 * config.num_attention_heads * config.head_dim, 0.0
    for starts, counts, samples in passes:
        products = float(counts.sum()) * weights.flops_a_token + samples * weights.flops_a_sample
        seconds += max(weights.bytes_a_pass / found.read, products / rate)
        ends, moved, seen = (starts + counts).astype(np.float64), 0.0, 0.0
        for window in config.windows:
            most = np.inf if window is None else float(window)
            moved += layer_kv * float((np.minimum(ends, most + counts - 1) + counts).sum())
            seen += float((_seen_up_to(ends, most) - _seen_up_to(ends - counts, most)).sum())
        seconds += max(moved / found.read, scores * seen / found.flops[own])
    return seconds


def _seen_up_to(tokens: np.ndarray, window: float) -> np.ndarray:
    """The number of positions that the first `tokens` tokens of a text see, summed over these tokens."""
    inside = np.minimum(tokens, window)
    return inside * (inside + 1) / 2 + np.where(tokens > inside, (tokens - inside) * inside, 0.0)


def _seen(window: int | None, first: int, last: int) -> int:
    """The number of positions that the tokens after `first` and up to `last` see, summed over these tokens."""
    most = last if window is None else min(last, window)
    low = max(first, 0)
    growing = range(low + 1, max(low, most) + 1)
    return sum(growing) + (last - max(low, most)) * most


def shares(found: Limits, seconds: float) -> dict[str, float]:
    """The limits beside a run's time, as columns of its row."""
    return {
        "bytes_limit_s": round(found.bytes_s, 4),
        "flops_limit_s": round(found.flops_s, 4),
        "of_bytes_limit": round(found.bytes_s / seconds, 3),
        "of_flops_limit": round(found.flops_s / seconds, 3),
    }
