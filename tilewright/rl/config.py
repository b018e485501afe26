"""What a run of reinforcement learning is told, from a TOML file; every field has a meaning and bounds."""

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tilewright.rl.characters import ALPHABET, Characters
from tilewright.rl.losses import ALGORITHMS
from tilewright.rl.losses.kl import ESTIMATORS

__all__ = ["RLConfig", "read_config"]

_LARGEST_FILE = 1 << 20
_BOUNDS: dict[str, tuple[float, float]] = {
    "layers": (1, 1024),
    "hidden": (16, 65536),
    "prompts": (1, 65536),
    "answers": (1, 65536),
    "max_tokens": (1, 1 << 20),
    "updates": (1, 10_000_000),
    "minibatches": (1, 65536),
    "epochs": (1, 1000),
    "learning_rate": (0.0, 10.0),
    "warmup": (0, 10_000_000),
    "kl": (0.0, 1000.0),
    "entropy_bonus": (0.0, 1000.0),
    "max_norm": (1e-6, 1e9),
    "tokens_per_pass": (1, 1 << 30),
    "reward_timeout_s": (0.001, 3600.0),
    "reward_workers": (1, 1024),
    "entropy_floor": (0.0, 100.0),
    "seed": (0, (1 << 31) - 1),
}


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """environment: see `environments.named`. A step samples `answers` answers to each of `prompts` prompts and learns from them
    in `epochs` passes of `minibatches` updates of the weights. With one update a step every ratio is 1.
    """

    environment: str
    algorithm: str = "grpo"
    alphabet: str = ALPHABET
    """Characters that the model reads and writes, one a token."""
    layers: int = 2
    """Of the model, which begins with random weights."""
    hidden: int = 64
    prompts: int = 64
    answers: int = 8
    max_tokens: int = 8
    updates: int = 250
    minibatches: int = 4
    epochs: int = 1
    learning_rate: float = 3e-3
    warmup: int = 5
    kl: float = 0.0
    """Coefficient of the KL divergence from the weights at the start."""
    kl_estimator: str = "k3"
    entropy_bonus: float = 0.0
    """Coefficient of the mean entropy of the distributions that tokens are drawn from, which is subtracted from the loss."""
    max_norm: float = 1.0
    tokens_per_pass: int = 16384
    """Most tokens of one forward and backward pass; results do not depend on it but for rounding."""
    reward_timeout_s: float = 5.0
    reward_workers: int = 1
    entropy_floor: float = 0.01
    """Mean -log p of the sampled tokens, in nats, below which a step warns that the policy has collapsed."""
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = str if field.name == "environment" else type(field.default)
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise ValueError(f"{field.name} is {value!r}, wanted {wanted.__name__}")
            if field.name in _BOUNDS:
                low, high = _BOUNDS[field.name]
                if not low <= value <= high:
                    raise ValueError(f"{field.name} is {value}, wanted {low:g} to {high:g}")
        Characters(self.alphabet)
        learnt = [name for name, algorithm in ALGORITHMS.items() if algorithm.advantages is not None]
        if self.algorithm not in learnt:
            reason = "needs a critic, which this command has none of" if self.algorithm in ALGORITHMS else "is not known"
            raise ValueError(f"algorithm {self.algorithm!r} {reason}; wanted one of {', '.join(learnt)}")
        if self.kl_estimator not in ESTIMATORS:
            raise ValueError(f"kl_estimator is {self.kl_estimator!r}, wanted one of {', '.join(ESTIMATORS)}")
        if self.prompts * self.answers < self.minibatches:
            raise ValueError(f"{self.prompts * self.answers} samples a step do not fill {self.minibatches} minibatches")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_config(path: Path) -> RLConfig:
    """A config from TOML.

    Raises:
        ValueError: the file is not TOML, or a field is unknown, missing or out of range.
    """
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"{path} is larger than {_LARGEST_FILE >> 20} MiB; wanted a config in TOML")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    known = [field.name for field in fields(RLConfig)]
    if unknown := [name for name in raw if name not in known]:
        raise ValueError(f"{path} has unknown fields {', '.join(unknown)}; known are {', '.join(known)}")
    if "environment" not in raw:
        raise ValueError(f'{path} names no environment; wanted such as environment = "reversal:digits=4"')
    try:
        return RLConfig(**raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
