"""The configuration of a reinforcement learning run, read from a TOML file; every number has bounds."""

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
    """A reinforcement learning run. docs/rl.md describes all fields.

    Each step samples `answers` answers to each of `prompts` prompts. It learns from them in `epochs` passes, each of which
    makes `minibatches` weight updates. With a single weight update per step, every ratio is 1. For `environment`, see
    `environments.named`.
    """

    environment: str
    algorithm: str = "dr-grpo"
    model: str = ""
    """A model folder, a hub name or the embedded model. Empty: a small random model with `layers` layers, hidden size `hidden`,
    and the characters of `alphabet` as tokens."""
    chat: bool = False
    """Render each prompt as a user message in the model's chat template."""
    alphabet: str = ALPHABET
    layers: int = 2
    hidden: int = 64
    device: str = ""
    """cpu, cuda or cuda:N. Empty: a CUDA device if there is one, but the CPU for a small random model."""
    dtype: str = "float32"
    """Dtype of the weights and matrix products: float32 or bfloat16. The optimizer's master weights are always float32."""
    invariant: bool = False
    """Sample and train with batch-invariant implementations. Needs a CUDA device."""
    quantize: str = ""
    """Sample and train with weights quantised to this format; the optimizer updates the unquantised ones. Empty: off."""
    out: str = ""
    """Folder for checkpoints, the log, samples and the final model. Empty: nothing is saved."""
    save_every: int = 50
    keep: int = 2
    tensorboard: bool = False
    prompts: int = 128
    answers: int = 4
    max_tokens: int = 8
    """Greatest number of tokens in an answer."""
    temperature: float = 1.0
    top_k: int = 0
    """Sample from this many most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability; 1: from all."""
    cache_bytes: int = 0
    """Size of the KV cache for sampling, in bytes; 0: all memory that is left."""
    free_cache: bool = False
    """Free the KV cache's memory while the trainer works, and allocate it again for sampling."""
    sampler: str = ""
    """Sample in a separate process on this device: cpu, cuda or cuda:N. Several devices are separated by commas, or given as a
    list. ray:N: sample in N actors of a Ray cluster. Empty: sample in the trainer's process, with its weights."""
    handover: str = "memory"
    """With `sampler`: how it receives new weights. memory: through host memory. card: through GPU memory, if all processes use
    the same GPU. broadcast: by torch.distributed, with NCCL between GPUs and gloo between CPUs."""
    staleness: int = 0
    """With `sampler`: by how many updates the weights that sampled an answer may be older than the newest weights. This lets
    sampling and learning overlap. 0: no overlap."""
    turns: int = 1
    """Greatest number of answers in a conversation, for environments that reply."""
    max_reply_tokens: int = 64
    resample: int = 0
    """Greatest number of additional sampling rounds, in which new prompts replace those whose answers all have the same reward
    (DAPO's dynamic sampling)."""
    overlong: int = 0
    """In this many tokens before the length limit, the reward falls linearly by up to 1 (DAPO's overlong shaping); 0: off."""
    updates: int = 250
    minibatches: int = 4
    epochs: int = 1
    learning_rate: float = 2e-3
    warmup: int = 5
    decay: float = 0.7
    """Share of the updates, at the end of the run, over which learning rates and `entropy_bonus` fall linearly to 0; 0: they
    stay constant."""
    kl: float = 0.0
    """Coefficient of the KL divergence from the initial weights."""
    kl_estimator: str = "k3"
    correction: str = "none"
    """How advantages are weighted by the ratio of the trainer's probability to the sampler's: none, truncated or masked."""
    entropy_bonus: float = 0.025
    """Coefficient of the entropy bonus: this times the mean entropy of the sampling distribution is subtracted from the
    loss."""
    gamma: float = 1.0
    """PPO: discount per token."""
    lam: float = 0.95
    """PPO: lambda of generalised advantage estimation."""
    whiten: bool = True
    """PPO: shift and scale the advantages to mean 0 and standard deviation 1."""
    value_clip: float = 0.2
    """PPO: bound on the change of a value since sampling; 0: no bound."""
    dual_clip: float = 0.0
    """PPO: bound on the loss of tokens with a negative advantage, as a multiple of the advantage's magnitude; 0: no bound."""
    critic_learning_rate: float = 3e-3
    critic_warmup: int = 0
    """PPO: number of steps, at the start of the run, in which only the critic learns."""
    max_norm: float = 1.0
    tokens_per_pass: int = 16384
    """Greatest number of tokens in one forward and backward pass. It changes the results only by rounding."""
    graphs: bool = False
    """Capture the policy's forward and backward pass as a CUDA graph, and replay it. Needs a CUDA device."""
    reward_timeout_s: float = 5.0
    reward_workers: int = 1
    entropy_floor: float = 0.01
    """Warn of a collapsed policy if the mean -log p of a step's sampled tokens is below this, in nats."""
    moved_every: int = 1
    """Measure after every so many steps how far the updates moved the policy. This takes one more forward pass. 0: never."""
    eval_every: int = 0
    """Measure on held-out tasks after every so many steps; 0: never."""
    eval_tasks: int = 256
    seed: int = 0

    @property
    def drawing(self) -> Drawing:
        """The sampling settings: temperature, top-k and top-p."""
        return Drawing(temperature=float(self.temperature), top_k=self.top_k, top_p=float(self.top_p))

    @property
    def sampler_devices(self) -> list[str]:
        """The devices of the sampler processes; empty if the trainer's process samples."""
        return [name.strip() for name in self.sampler.split(",") if name.strip()]

    @property
    def on_ray(self) -> bool:
        """Whether samplers are actors of a Ray cluster."""
        return self.sampler.startswith("ray:")

    @property
    def longest(self) -> int:
        """The greatest number of tokens that the policy can choose in one conversation."""
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
            raise ValueError(
                f"sampler is {self.sampler!r}, wanted cpu, cuda, cuda:N, several of these separated by commas, or ray:N"
            )
        known = {
            "algorithm": tuple(ALGORITHMS), "kl_estimator": tuple(ESTIMATORS), "dtype": ("float32", "bfloat16"),
            "correction": ("none", "truncated", "masked"), "handover": _HANDOVERS, "quantize": ("", *FORMATS),
        }  # fmt: skip
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name} is {value!r}, wanted one of {', '.join(filter(None, values))}")
        if self.staleness and not self.sampler:
            raise ValueError(
                f"staleness is {self.staleness}, but sampler is empty, and a single process has no older weights; set "
                "sampler, or leave staleness out"
            )
        if self.handover != "memory" and not self.sampler:
            raise ValueError(
                f"handover is {self.handover!r}, but sampler is empty, and a single process transfers no weights; set "
                "sampler, or leave handover out"
            )
        if self.handover != "memory" and self.on_ray:
            raise ValueError(
                f"handover is {self.handover!r}, but Ray's actors receive weights through Ray's object store; leave "
                "handover out"
            )
        if self.free_cache and self.sampler:
            raise ValueError(
                f"free_cache is true, but sampler is {self.sampler!r}, a process with its own memory; leave one of them out"
            )
        if self.chat and (not self.model or self.turns > 1):
            raise ValueError(
                "chat needs model to have a chat template, and turns to be 1, because the environment's replies are plain text"
            )
        if self.tensorboard and not self.out:
            raise ValueError("tensorboard is true, but out is empty; set out to a folder")
        if self.prompts * self.answers < self.minibatches:
            raise ValueError(
                f"prompts times answers is {self.prompts * self.answers} samples per step, which is fewer than the "
                f"{self.minibatches} minibatches"
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def read_config(path: Path) -> RLConfig:
    """Read a config from a TOML file.

    Raises:
        ValueError: the file is not valid TOML, or a field is unknown, missing or out of range.
    """
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"{path} is larger than {_LARGEST_FILE >> 20} MiB; wanted a config in TOML")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    known = [field.name for field in fields(RLConfig)]
    if unknown := [name for name in raw if name not in known]:
        raise ValueError(f"{path} has unknown fields {', '.join(unknown)}; the fields are {', '.join(known)}")
    if "environment" not in raw:
        raise ValueError(f'{path} has no field environment; add one, such as environment = "reversal:digits=4"')
    try:
        return RLConfig(**raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
