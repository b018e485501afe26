"""Measures the size of gradients, activations and updates in each layer of a transformer, at initialisation and during
training.

The task is a Markov chain over the vocabulary, in which each token has four likely successors. So the best possible loss is
known (the entropy), and nothing needs to be downloaded. A run depends only on its config, and gives the same numbers each time
on the same machine.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.train.lab.residual import SCHEMES, Transformer
from tilewright.train.optim import AdamW
from tilewright.train.schedules import constant

__all__ = ["Chain", "Flow", "FlowConfig", "Snapshot", "gradient_flow"]


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The settings of one run."""

    norm: str
    """One of `residual.SCHEMES`."""
    layers: int
    width: int = 64
    """Number of features. Each attention head has 16."""
    vocabulary: int = 64
    length: int = 32
    """Tokens per sequence."""
    batch: int = 16
    """Sequences per step."""
    steps: int = 0
    """Training steps; 0: only examine the initialisation."""
    lr: float = 1e-3
    warmup: int = 0
    """Steps in which the learning rate grows linearly."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.norm not in SCHEMES:
            raise ValueError(f"norm is {self.norm!r}, wanted one of {', '.join(SCHEMES)}")
        limits = {"layers": 1000, "width": 8192, "vocabulary": 1 << 17, "length": 1 << 16, "batch": 1 << 16}
        for name, most in limits.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 to {most}")
        if self.width % 16:
            raise ValueError(f"width is {self.width}, wanted a multiple of 16, because each head has 16 features")
        if self.steps < 0 or not 0 <= self.warmup <= max(self.steps, 0):
            raise ValueError(f"warmup is {self.warmup} and steps is {self.steps}, wanted 0 <= warmup <= steps")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr is {self.lr}, wanted a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The measurements of one step. Lists have one value per layer, first layer first."""

    step: int
    loss: float
    activations: list[float]
    """Mean square of the residual stream after each layer."""
    gradients: list[float]
    """Norm of the gradient of all weights of a layer together."""
    per_token: list[float]
    """Norm of the gradient of one token's loss with respect to the second matrix of a layer's feed-forward part; mean over
    tokens. The theory of Xiong et al. is about this quantity. The gradient of a batch also depends on how similar its tokens
    have become to each other."""
    updates: list[float]
    """Norm of the change of a layer's weights in this step, relative to the norm of the weights; empty without training."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A run: its config, snapshots, and the loss of every step."""

    config: FlowConfig
    snapshots: list[Snapshot]
    losses: list[float]

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values. Numbers that are not finite become None."""
        return _plain(asdict(self))


def gradient_flow(config: FlowConfig, *, snapshots: int = 4, say: Callable[[str], None] = lambda words: None) -> Flow:
    """Create a model, examine it, and train it for `config.steps` steps.

    Args:
        snapshots: number of snapshots. The first is taken at initialisation, the last at the last step.
        say: called with progress messages of a long run.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Transformer(
            SCHEMES[config.norm], layers=config.layers, features=config.width, heads=config.width // 16,
            vocabulary=config.vocabulary, length=config.length,
        )  # fmt: skip
    parameters = dict(model.named_parameters())
    optimizer = AdamW(parameters, weight_decay=0.0)
    chain = Chain(vocabulary=config.vocabulary, batch=config.batch, length=config.length, seed=config.seed)
    last = max(config.steps - 1, 0)
    looked_at = {round(i * last / max(snapshots - 1, 1)) for i in range(snapshots)}
    found: list[Snapshot] = []
    losses: list[float] = []
    for step in range(max(config.steps, 1)):
        now = _pass(model, chain.batch(step))
        losses.append(now.loss)
        look = step in looked_at
        before = {name: p.detach().clone() for name, p in parameters.items()} if look and config.steps else None
        if config.steps:
            rate = constant(step, steps=config.steps, warmup=config.warmup, peak=config.lr)
            optimizer.step(now.grads, rate)
        if look:
            found.append(_snapshot(config.layers, step, now, parameters, before))
            say(f"{config.norm}, {config.layers} layers: step {step + 1} of {max(config.steps, 1)}, loss {now.loss:.4g}")
    return Flow(config=config, snapshots=found, losses=losses)


class Chain:
    """Batches from a Markov chain. Each token has four successors, with the probabilities 0.4, 0.3, 0.2, 0.1."""

    def __init__(self, *, vocabulary: int, batch: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + 1)
        self._vocabulary, self._batch, self._length, self._seed = vocabulary, batch, length, seed
        self._successors = torch.randint(vocabulary, (vocabulary, 4), generator=generator)

    def batch(self, step: int) -> Tensor:
        """[B, S + 1] int64: B sequences with one token more than the model reads."""
        generator = torch.Generator().manual_seed(1_000_003 * (self._seed + 1) + step)
        tokens = [torch.randint(self._vocabulary, (self._batch,), generator=generator)]
        likely = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(self._batch, 4)
        for _ in range(self._length):
            choice = torch.multinomial(likely, 1, generator=generator)
            tokens.append(self._successors[tokens[-1]].gather(1, choice)[:, 0])
        return torch.stack(tokens, 1)


class _Pass(NamedTuple):
    """The results of one forward and backward pass."""

    loss: float
    stream: list[float]
    """Mean square of the residual stream after each layer."""
    per_token: list[float]
    grads: dict[str, Tensor]


def _pass(model: Transformer, tokens: Tensor) -> _Pass:
    stream: list[float] = []
    products: list[tuple[Tensor, Tensor]] = []  # (input, output) of the second matrix of each layer
    hooks = []
    for block in model.blocks:
        down = next(module for name, module in block.named_modules() if name.endswith("down"))
        hooks.append(block.register_forward_hook(lambda module, args, out: stream.append(float(out.detach().square().mean()))))
        hooks.append(down.register_forward_hook(lambda module, args, out: products.append((args[0].detach(), out))))
    logits = model(tokens[:, :-1])
    for hook in hooks:
        hook.remove()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [*named.values(), *(out for _, out in products)])
    count = tokens[:, 1:].numel()  # the loss is the mean over this number of tokens
    per_token = [
        float((read.norm(dim=-1) * grad.norm(dim=-1)).mean()) * count
        for (read, _), grad in zip(products, found[len(named) :], strict=True)
    ]
    return _Pass(float(loss.detach()), stream, per_token, dict(zip(named, found)))


def _snapshot(
    layers: int, step: int, now: _Pass, parameters: Mapping[str, Tensor], before: Mapping[str, Tensor] | None
) -> Snapshot:  # fmt: skip
    by_layer = [[name for name in parameters if name.startswith(f"blocks.{i}.")] for i in range(layers)]

    def norm(of: Callable[[str], Tensor], names: list[str]) -> float:
        return math.sqrt(sum(float(of(name).double().square().sum()) for name in names))

    updates = []
    if before is not None:
        for names in by_layer:
            moved = norm(lambda name: parameters[name].detach() - before[name], names)
            updates.append(moved / norm(lambda name: before[name], names))
    return Snapshot(
        step=step,
        loss=now.loss,
        activations=now.stream,
        gradients=[norm(now.grads.__getitem__, names) for names in by_layer],
        per_token=now.per_token,
        updates=updates,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
