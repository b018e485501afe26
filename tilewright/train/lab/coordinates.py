"""The coordinate check: does the change of activations in training steps depend on the width of a model?

Models of several widths train for a few steps. At each place in the network, the check measures how far the activations on one
batch have moved from their initial values (root mean square). With muP, this does not depend on the width. Otherwise it usually
grows with the width, and the best learning rate falls (Yang et al., "Tensor Programs V", 2022, appendix D.1). The models are
Llama models, built and trained as by `tilewright train`, on the Markov chain of the gradient-flow lab.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.models import Model, ModelConfig, empty_model, initialise
from tilewright.nn import PackedKeysValues
from tilewright.train.batch import TrainBatch, pack
from tilewright.train.lab.gradient_flow import Chain
from tilewright.train.mup import mup_for
from tilewright.train.optim import AdamW
from tilewright.train.step import NextToken, running_sum, train_step, trainable

__all__ = ["Coordinates", "CoordinatesConfig", "coordinate_check", "final_losses"]

_HEAD_DIM = 16


@dataclass(frozen=True, kw_only=True)
class CoordinatesConfig:
    """The settings of one check.

    widths: hidden sizes, multiples of 16.
    base: the width at which muP equals the usual parametrisation.
    seeds: number of models of each width. Movements are averages over these models.
    """

    mup: bool
    widths: tuple[int, ...] = (64, 128, 256, 512)
    base: int = 64
    layers: int = 2
    vocabulary: int = 64
    length: int = 32
    batch: int = 8
    steps: int = 4
    lr: float = 3e-3
    std: float = 0.05
    """Standard deviation of random weights at the base width."""
    seeds: int = 3

    def __post_init__(self) -> None:
        if len(set(self.widths)) < 2 or not all(width > 0 and width % _HEAD_DIM == 0 for width in (*self.widths, self.base)):
            raise ValueError(
                f"widths are {self.widths} and base is {self.base}; all must be multiples of {_HEAD_DIM}, with at least "
                "two different widths"
            )
        limits = {"layers": 100, "vocabulary": 1 << 17, "length": 1 << 14, "batch": 1 << 12, "steps": 10_000, "seeds": 1000}
        for name, most in limits.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 to {most}")
        for name in ("lr", "std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The measured movements.

    moved: place -> width -> step -> root mean square distance of the activations from their initial values, mean over seeds.
    """

    config: CoordinatesConfig
    moved: dict[str, dict[int, list[float]]]

    def slopes(self) -> dict[str, float]:
        """Place -> exponent of the growth of the movement with the width, after the last step."""
        found = {}
        for place, by_width in self.moved.items():
            x = np.log([float(width) for width in by_width])
            found[place] = float(np.polyfit(x, np.log([steps[-1] for steps in by_width.values()]), 1)[0])
        return found

    def as_json(self) -> dict[str, Any]:
        """The movements and slopes as JSON values."""
        return {**asdict(self), "slopes": self.slopes()}


def coordinate_check(config: CoordinatesConfig, *, say: Callable[[str], None] = lambda words: None) -> Coordinates:
    """Train `config.seeds` models of each width for `config.steps` steps, and measure the movements."""
    moved: dict[str, dict[int, list[float]]] = {}
    for width in config.widths:
        for seed in range(config.seeds):
            for place, steps in _movements(config, width, seed).items():
                sums = moved.setdefault(place, {}).setdefault(width, [0.0] * config.steps)
                for i, value in enumerate(steps):
                    sums[i] += value / config.seeds
            say(f"{'muP' if config.mup else 'usual'}: width {width}, model {seed + 1} of {config.seeds}")
    return Coordinates(config=config, moved=moved)


def final_losses(config: CoordinatesConfig, lrs: Sequence[float], *, tail: int = 10) -> dict[int, list[float]]:
    """Width -> final loss at each learning rate: the mean over the last `tail` steps and over seeds."""
    found: dict[int, list[float]] = {}
    for width in config.widths:
        found[width] = []
        for lr in lrs:
            ends = []
            for seed in range(config.seeds):
                training = _Training(config, width, seed)
                losses = [training.step(step, lr) for step in range(config.steps)]
                ends.append(sum(losses[-tail:]) / len(losses[-tail:]))
            found[width].append(sum(ends) / len(ends))
    return found


class _Training:
    """A model with its optimizer and data."""

    def __init__(self, config: CoordinatesConfig, width: int, seed: int) -> None:
        shape = _shape(config, width)
        rules = mup_for(shape, config.base, "adamw") if config.mup else None
        self.model: Model = empty_model(shape, device="cpu", dtype=torch.float32)
        scale: dict[str, Any] = {} if rules is None else {"scale": rules.std}
        rates: dict[str, Any] = {} if rules is None else {"lr_scale": rules.rate}
        initialise(self.model, std=config.std, seed=seed, **scale)
        self.model.requires_grad_(True)
        self._optimizer = AdamW(trainable(self.model), weight_decay=0.0, **rates)
        self._chain = Chain(vocabulary=config.vocabulary, batch=config.batch, length=config.length, seed=seed)
        self._objective = NextToken()

    def batch(self, step: int) -> TrainBatch:
        rows = self._chain.batch(step).numpy()
        return pack([(row[:-1], row[1:]) for row in rows])

    def step(self, step: int, lr: float) -> float:
        result = train_step(self.model, self._optimizer, [self.batch(step)], lr, self._objective, running_sum)
        return float(result.loss)


def _shape(config: CoordinatesConfig, width: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=config.vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=config.layers,
        num_attention_heads=width // _HEAD_DIM,
        num_key_value_heads=width // _HEAD_DIM,
        head_dim=_HEAD_DIM,
        max_position_embeddings=config.length,
        windows=(None,) * config.layers,
    )


def _movements(config: CoordinatesConfig, width: int, seed: int) -> dict[str, list[float]]:
    training = _Training(config, width, seed)
    probe = training.batch(config.steps)  # not used in any step
    first, moved = _activations(training.model, probe), {}
    for step in range(config.steps):
        training.step(step, config.lr)
        for place, now in _activations(training.model, probe).items():
            moved.setdefault(place, []).append(float((now - first[place]).square().mean().sqrt()))
    return moved


@torch.no_grad()
def _activations(model: Model, batch: TrainBatch) -> dict[str, Tensor]:
    """The outputs of the embedding, of attention and feed-forward in each layer, and the logits, by place."""
    found: dict[str, Tensor] = {}
    places: dict[str, Any] = {"embedding": model.embed}
    for i, block in enumerate(model.blocks):
        places |= {f"attention {i + 1}": block.attn, f"feed-forward {i + 1}": block.ffn}
    hooks = [
        module.register_forward_hook(lambda module, args, out, place=place: found.update({place: out.detach().clone()}))
        for place, module in places.items()
    ]
    hidden = model(batch.token_ids, batch.packed, PackedKeysValues())
    for hook in hooks:
        hook.remove()
    return {**found, "logits": model.logits(hidden)}
