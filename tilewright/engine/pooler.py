"""Passes of a model that compute embeddings or scores of whole texts, and an engine for models without text generation.

A pass is packed: texts of different lengths are concatenated, without padding and without a KV cache. One thread runs passes
and the engine's steps, one at a time. Many texts are split into several passes (`Pooled.pieces`), so that steps can run between
them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.loading import Loaded
from tilewright.engine.places import place_of
from tilewright.engine.pooling import Pass, Pooled, Text
from tilewright.engine.runner import on_device
from tilewright.engine.schedule import Scheduler
from tilewright.engine.step import FillMasks, Step, StepResult
from tilewright.engine.tokenizer import Tokenizer
from tilewright.models.encoders import Encoder, load_encoder, matryoshka
from tilewright.models.files import read_json
from tilewright.models.sentence import Pooling
from tilewright.nn import Lengths, Packed, PackedKeysValues
from tilewright.op import invariant
from tilewright.parallel.plan import Plan

__all__ = ["LoadedEncoder", "Pooler", "decoder_pooler", "load_pooled_encoder"]

_PAGE_SIZE = 16

Features = Callable[[Pass, Tensor, Lengths, Tensor], Tensor]
"""(pass, token ids [T], lengths, positions [T]) -> features [T, E]."""


class Pooler:
    """Runs passes of a model, in one thread. `pooled`: what the model supports."""

    def __init__(
        self, pooled: Pooled, features: Features, pooling: Pooling, *, device: torch.device, batch_invariant: bool = False,
        logits: Callable[[Tensor, Lengths], Tensor] | None = None,
    ):  # fmt: skip
        self.pooled, self.pooling = pooled, pooling
        self._features, self._logits, self._device, self._invariant = features, logits, device, batch_invariant

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with on_device(self._device), torch.inference_mode(), invariant() if self._invariant else nullcontext():
            yield

    def run(self, work: Pass) -> np.ndarray:
        """Embeddings, float32 [texts, width or dimensions], or labels, float32 [texts, labels]. Waits for the device."""
        counts = [len(text.ids) for text in work.texts]
        with self._entered():
            ids = torch.tensor([token for text in work.texts for token in text.ids], device=self._device)
            ends = torch.tensor([0, *counts]).cumsum(0).to(device=self._device, dtype=torch.int32)
            lengths = Lengths(cu=ends, longest=max(counts))
            positions = torch.cat([torch.arange(count) for count in counts]).to(self._device)
            hidden = self._features(work, ids, lengths, positions)
            if not work.labels:
                return self.pooling(hidden, lengths, work.dimensions).cpu().numpy()
            assert self._logits is not None, "asked of models with a head alone"
            logits = self._logits(hidden, lengths).float()
            alone = self.pooled.sigmoid and self.pooled.labels == 1
            return (logits.sigmoid() if alone else logits).cpu().numpy()

    def run_all(self, texts: Sequence[Text], *, labels: bool = False, dimensions: int | None = None) -> np.ndarray:
        """Run the texts in as many passes as they need; the results are concatenated."""
        width = self.pooled.labels if labels else dimensions or self.pooled.width
        done = [self.run(Pass(piece, labels, dimensions)) for piece in self.pooled.pieces(texts)]
        return np.concatenate(done) if done else np.zeros((0, width), np.float32)


def decoder_pooler(loaded: Loaded, options: EngineConfig, *, pass_tokens: int) -> Pooler | None:
    """A pooler of a decoder, with attention over the pass itself instead of a cache. None for latent attention, which has no
    such pass, and with tp, pp or slices.

    Raises:
        ModelError: the sentence-transformers files in the model's folder need an unsupported feature.
    """
    runner, config = loaded.runner, loaded.config
    if config.latent is not None or options.plan != Plan():
        return None
    keys_values = PackedKeysValues()

    def features(work: Pass, ids: Tensor, lengths: Lengths, positions: Tensor) -> Tensor:
        return runner.model(ids, Packed(positions=positions, cu_q=lengths.cu, max_q_len=lengths.longest), keys_values)

    # The memory plan has room for the tokens of one step. On a CPU, steps are short and memory is not planned.
    longest = loaded.plan.max_model_len
    pooled = Pooled(
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_tokens=min(longest, options.max_tokens_per_step) if runner.asynchronous else longest,
        pass_tokens=pass_tokens,
        dimensions=matryoshka(config.raw or {}),
    )
    pooling = Pooling.of(loaded.tokenizer_path, "last")
    return Pooler(pooled, features, pooling, device=runner.device, batch_invariant=options.invariant)


def _takes_types(folder: Path, model: Encoder) -> bool:
    """Whether a model gets token types (first or second text): it must have a table for them. If its tokenizer's file lists the
    model's inputs, they must be in this list, too."""
    path = folder / "tokenizer_config.json"
    names = (read_json(path) if path.exists() else {}).get("model_input_names")
    return model.config.token_types > 1 and (not isinstance(names, list) or "token_type_ids" in names)


def _encoder_pooler(model: Encoder, folder: Path, *, pass_tokens: int, batch_invariant: bool) -> Pooler:
    config, pooling = model.config, Pooling.of(folder, "mean")

    def features(work: Pass, ids: Tensor, lengths: Lengths, positions: Tensor) -> Tensor:
        types = None
        if any(text.types is not None for text in work.texts):
            flat = [kind for text in work.texts for kind in text.types or [0] * len(text.ids)]
            types = torch.tensor(flat, device=ids.device)
        return model(ids, lengths, positions, types)

    pooled = Pooled(
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_tokens=config.max_tokens,
        pass_tokens=pass_tokens,
        labels=config.labels,
        sigmoid=config.pair_activation == "sigmoid",
        types=_takes_types(folder, model),
        dimensions=config.dimensions,
    )
    return Pooler(
        pooled, features, pooling, device=model.device, batch_invariant=batch_invariant,
        logits=model.logits if config.labels else None,
    )  # fmt: skip


class _Idle:
    """The runner of a model that generates no text; it is never called."""

    asynchronous = False

    def launch(self, step: Step) -> Any:
        """Always raises."""
        raise RuntimeError("an encoder generates nothing")

    def sample(self, ticket: Any, words: int, fill: FillMasks) -> None:
        """Always raises."""
        raise RuntimeError("an encoder generates nothing")

    def collect(self, ticket: Any) -> StepResult:
        """Always raises."""
        raise RuntimeError("an encoder generates nothing")


@dataclass(frozen=True, kw_only=True)
class LoadedEncoder:
    """An encoder ready to run. `engine` never has work; servers use it for their status."""

    model: Encoder
    pooler: Pooler
    tokenizer: Tokenizer
    engine: Engine


def load_pooled_encoder(folder: Path, options: EngineConfig, *, cpu_pass_tokens: int) -> LoadedEncoder:
    """Load an encoder, its tokenizer and its pooling from a folder.

    Raises:
        ModelError: the folder cannot be used.
        ValueError: there is no such device or dtype, or an option is only for decoders.
    """
    device, dtype = place_of(options)
    for name in ("quantize", "kv_cache", "bundle"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{name} is {getattr(options, name)!r}, but {folder} holds an encoder, which has none; leave it out"
            )
    tokenizer = Tokenizer.load(folder)
    with on_device(device):
        model = load_encoder(folder, device=device, dtype=dtype or (torch.float32 if device.type == "cpu" else None))
    on_card = device.type != "cpu"
    pass_tokens = options.max_tokens_per_step if on_card else min(cpu_pass_tokens, options.max_tokens_per_step)
    pooler = _encoder_pooler(model, folder, pass_tokens=pass_tokens, batch_invariant=options.invariant)
    longest = model.config.max_tokens
    scheduler = Scheduler(
        blocks=BlockPool(-(-longest // _PAGE_SIZE) + 1, _PAGE_SIZE, prefix_cache=False), max_seqs=1, max_tokens_per_step=1,
        max_model_len=longest, max_waiting=options.max_waiting, prefill_chunk=None,
    )  # fmt: skip
    engine = Engine(_Idle(), tokenizer, (), scheduler, vocab_size=model.config.vocab_size)
    return LoadedEncoder(model=model, pooler=pooler, tokenizer=tokenizer, engine=engine)
