"""What a run of reinforcement learning is told, from a TOML file; every field has a meaning and bounds."""

import re
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tilewright.rl.characters import ALPHABET, Characters
from tilewright.rl.losses import ALGORITHMS
from tilewright.rl.losses.kl import ESTIMATORS
from tilewright.rl.quantised import FORMATS
from tilewright.rl.rollout import Drawing

__all__ = ["RLConfig", "read_config"]

_LARGEST_FILE = 1 << 20
_SAMPLERS = re.compile(r"ray:[1-9]\d{0,3}|(cpu|cuda(:\d{1,3})?)( *, *(cpu|cuda(:\d{1,3})?)){0,63}")
_HANDOVERS = ("memory", "card", "broadcast")
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.01, 100.0),
    "top_k": (0, 1 << 22),
    "top_p": (1e-6, 1.0),
    "cache_bytes": (0, 1 << 50),
    "staleness": (0, 1000),
    "turns": (1, 1000),
    "max_reply_tokens": (1, 1 << 20),
    "resample": (0, 100),
    "overlong": (0, 1 << 20),
    "gamma": (0.0, 1.0),
    "lam": (0.0, 1.0),
    "value_clip": (0.0, 1e9),
    "dual_clip": (0.0, 1e9),
    "critic_learning_rate": (0.0, 10.0),
    "critic_warmup": (0, 10_000_000),
    "moved_every": (0, 10_000_000),
    "eval_every": (0, 10_000_000),
    "eval_tasks": (1, 1 << 20),
    "save_every": (1, 10_000_000),
    "keep": (1, 1000),
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
    "decay": (0.0, 1.0),
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
    algorithm: str = "dr-grpo"
    model: str = ""
    """A model folder, a hub name or the embedded model. Empty: a small random model of `layers` and `hidden` that reads the
    characters of `alphabet`."""
    chat: bool = False
    """Prompts are users' messages in the model's chat template."""
    alphabet: str = ALPHABET
    layers: int = 2
    hidden: int = 64
    device: str = ""
    """cpu, cuda or cuda:N. Empty: a CUDA device if there is one, for a small random model the CPU."""
    dtype: str = "float32"
    """Of weights and products: float32 or bfloat16. Master weights are float32."""
    invariant: bool = False
    """Sample and train by implementations whose rows do not depend on the batch. Needs a CUDA device."""
    quantize: str = ""
    """Sample and train by codes of the weights, in this format; the optimizer updates the weights. Empty: by the weights."""
    out: str = ""
    """Folder for checkpoints, the log, samples and, at the end, the model. Empty: nothing is kept."""
    save_every: int = 50
    keep: int = 2
    tensorboard: bool = False
    prompts: int = 128
    answers: int = 4
    max_tokens: int = 8
    """Of an answer."""
    temperature: float = 1.0
    top_k: int = 0
    """Draw from that many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    cache_bytes: int = 0
    """Of keys and values while sampling; 0: what the memory leaves."""
    free_cache: bool = False
    """Give the memory of keys and values back while the trainer works, and take it again to sample."""
    sampler: str = ""
    """Sample in a process of its own on this device: cpu, cuda or cuda:N; several with commas between, or in a list. ray:N: by
    N actors of a Ray cluster. Empty: in the trainer's process, on its weights."""
    handover: str = "memory"
    """With `sampler`: how weights get there. memory: through the host's. card: through memory of the one card that all work on.
    broadcast: by torch.distributed, NCCL between cards and gloo between CPUs."""
    staleness: int = 0
    """With `sampler`: updates that may be made between sampling and learning, so that both go on at once; 0: none."""
    turns: int = 1
    """Most answers of a conversation, where the environment replies."""
    max_reply_tokens: int = 64
    resample: int = 0
    """Rounds of further prompts that replace those whose answers all have one reward (DAPO's dynamic sampling)."""
    overlong: int = 0
    """Rewards fall by up to 1 over that many last tokens before the limit (DAPO's overlong shaping); 0: they do not."""
    updates: int = 250
    minibatches: int = 4
    epochs: int = 1
    learning_rate: float = 2e-3
    warmup: int = 5
    decay: float = 0.7
    """Share of the updates, at the end, over which learning rates and `entropy_bonus` fall to 0 in a line; 0: they do not."""
    kl: float = 0.0
    """Coefficient of the KL divergence from the weights at the start."""
    kl_estimator: str = "k3"
    correction: str = "none"
    """Advantages weighed by the trainer's over the sampler's probability: none, truncated or masked."""
    entropy_bonus: float = 0.025
    """Coefficient of the mean entropy of the distributions that tokens are drawn from, which is subtracted from the loss."""
    gamma: float = 1.0
    """Of PPO: discount a token."""
    lam: float = 0.95
    """Of PPO: lambda of generalised advantage estimation."""
    whiten: bool = True
    """PPO: advantages are shifted and scaled to mean 0 and deviation 1."""
    value_clip: float = 0.2
    """PPO: how far a value counts as moved from the one at sampling; 0: without a bound."""
    dual_clip: float = 0.0
    """PPO: bounds the loss at negative advantages to that many times the advantage; 0: without."""
    critic_learning_rate: float = 3e-3
    critic_warmup: int = 0
    """PPO: first steps in which the critic alone learns."""
    max_norm: float = 1.0
    tokens_per_pass: int = 16384
    """Most tokens of one forward and backward pass; results do not depend on it but for rounding."""
    reward_timeout_s: float = 5.0
    reward_workers: int = 1
    entropy_floor: float = 0.01
    """Mean -log p of the sampled tokens, in nats, below which a step warns that the policy has collapsed."""
    moved_every: int = 1
    """Steps between measurements of how far a step's updates have moved the policy, which take a forward pass; 0: none."""
    eval_every: int = 0
    """Steps between measurements on tasks that are never trained on; 0: none."""
    eval_tasks: int = 256
    seed: int = 0

    @property
    def drawing(self) -> Drawing:
        """How tokens are drawn."""
        return Drawing(temperature=float(self.temperature), top_k=self.top_k, top_p=float(self.top_p))

    @property
    def sampler_devices(self) -> list[str]:
        """Of the processes that sample; none where the trainer's does."""
        return [name.strip() for name in self.sampler.split(",") if name.strip()]

    @property
    def on_ray(self) -> bool:
        """Whether samplers are actors of a Ray cluster."""
        return self.sampler.startswith("ray:")

    @property
    def longest(self) -> int:
        """Most tokens that the policy chooses in one conversation."""
        return self.turns * self.max_tokens

    def __post_init__(self) -> None:
        if isinstance(self.sampler, list) and all(type(name) is str for name in self.sampler):
            object.__setattr__(self, "sampler", ",".join(self.sampler))
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
        if self.sampler and not _SAMPLERS.fullmatch(self.sampler):
            raise ValueError(f"sampler is {self.sampler!r}, wanted cpu, cuda, cuda:N, or several of these, or ray:N")
        known = {
            "algorithm": tuple(ALGORITHMS), "kl_estimator": tuple(ESTIMATORS), "dtype": ("float32", "bfloat16"),
            "correction": ("none", "truncated", "masked"), "handover": _HANDOVERS, "quantize": ("", *FORMATS),
        }  # fmt: skip
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name} is {value!r}, wanted one of {', '.join(filter(None, values))}")
        if self.staleness and not self.sampler:
            raise ValueError(f"staleness is {self.staleness}, but sampler is empty: one process has no older weights")
        if self.handover != "memory" and not self.sampler:
            raise ValueError(f"handover is {self.handover!r}, but sampler is empty: one process has nothing to hand over")
        if self.handover != "memory" and self.on_ray:
            raise ValueError(f"handover is {self.handover!r}, but weights go to Ray's actors through its store: leave it out")
        if self.free_cache and self.sampler:
            raise ValueError(
                f"free_cache is true, but sampler is {self.sampler!r}, a process with memory of its own: unset one"
            )
        if self.chat and (not self.model or self.turns > 1):
            raise ValueError("chat needs a model with a chat template, and one turn: replies are plain text")
        if self.tensorboard and not self.out:
            raise ValueError("tensorboard is true, but out is empty; name a folder with out")
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
