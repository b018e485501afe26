"""Builds the parts of a run from its config: model, optimizer and learning rates; predicts memory and cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewright.hw.ceilings import ceilings, data_sheet
from tilewright.hw.device import default_device, device_of, memory_bytes
from tilewright.models import (
    SHAPES,
    Model,
    ModelConfig,
    ModelError,
    empty_model,
    initialise,
    load_config,
    load_model,
    resolve,
    weight_bytes_of,
)
from tilewright.ops.weights import QuantizedWeight
from tilewright.parallel.ranks import ALONE, Ranks
from tilewright.train.config import TrainConfig
from tilewright.train.lora import adapted, empty_base, load_base
from tilewright.train.mup import MuP, mup_for
from tilewright.train.optim import SGD, AdamW, AdamW8bit, Momentum, Muon, Optimizer
from tilewright.train.preference import Preference
from tilewright.train.schedules import SCHEDULES
from tilewright.train.step import NextToken, Objective, trainable

__all__ = [
    "STATE_BYTES",
    "Costs",
    "MemoryPlan",
    "build_model",
    "build_objective",
    "build_optimizer",
    "chosen_device",
    "costs_of",
    "device_for",
    "dtype_of",
    "feed_forward_numbers",
    "learning_rate",
    "model_config",
    "plan_memory",
    "planned_model",
]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STATE_BYTES = {"adamw": 8.0, "adamw-8bit": 2.0 + 8 / 256, "momentum": 4.0, "muon": 4.0, "sgd": 0.0}
"""Bytes of optimizer state per parameter, without master weights. With muon, the embedding and the head have those of adamw."""


def device_for(config: TrainConfig) -> torch.device:
    """The device of a run. Raises ValueError if it does not exist."""
    return default_device() if config.device is None else chosen_device(config.device)


def chosen_device(name: str) -> torch.device:
    """The device that a config names. Raises ValueError if it does not exist."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, wanted cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def model_config(config: TrainConfig) -> ModelConfig:
    """The model config, checked against the settings of the run.

    Raises:
        ModelError: the model cannot be found, or training it is not supported.
        ValueError: rows are longer than the model's context, weights are to be loaded for a shape that has none, or Muon is to
            train stacked experts.
    """
    named = SHAPES.get(config.model)
    if named is not None and config.init == "load":
        raise ValueError(
            f"model {config.model} is a shape without weights; set init to random, or set model to a folder with weights"
        )
    found = named if named is not None else load_config(resolve(config.model))
    if found.latent is not None or (found.experts is not None and found.experts.clamped is not None):
        raise ModelError(f"{found.architecture}: training is not supported yet for latent attention and for clamped experts")
    if found.experts is not None and found.experts.routing.biased:
        raise ModelError(
            f"{found.architecture}: training is not supported yet for a router whose bias affects only the choice of experts"
        )
    if found.experts is not None and config.optimizer == "muon":
        raise ValueError("optimizer muon needs separate matrices, but those of this model's experts are stacked; use adamw")
    if found.quantization is not None:
        raise ModelError(f"{config.model} has quantised weights, which have no gradients; use the unquantised model")
    if config.row_tokens > found.max_position_embeddings:
        most = found.max_position_embeddings
        raise ValueError(
            f"row_tokens is {config.row_tokens}, but {config.model} supports only {most} positions; lower row_tokens to "
            f"at most {most}"
        )
    return found


def dtype_of(config: TrainConfig) -> torch.dtype:
    """The dtype of the weights and the matrix products."""
    return _DTYPES[config.dtype]


def planned_model(config: TrainConfig) -> Model:
    """The model that `build_model` will make, on "meta". Raises the same errors as `build_model`."""
    shape, dtype = model_config(config), _DTYPES[config.dtype]
    if config.lora_rank:
        return adapted(config, empty_base(config, shape, dtype))
    return empty_model(shape, device="meta", dtype=dtype).requires_grad_(True)


def build_model(config: TrainConfig, device: torch.device) -> Model:
    """The model, with trainable weights: those of the model itself, or those of an adapter.

    Raises:
        ModelError: as `model_config`; or the folder of an adapter is damaged, or for another model.
        ValueError: as `model_config`; or the sizes or targets of an adapter contradict the model.
    """
    shape, dtype = model_config(config), _DTYPES[config.dtype]
    if config.lora_rank:
        return adapted(config, load_base(config, device, dtype, empty_base(config, shape, dtype)))
    if config.init == "load":
        model = load_model(config.model, device=device, dtype=dtype)
    else:
        model = empty_model(shape, device=device, dtype=dtype)
        scale: dict[str, Any] = {} if config.mup_base is None else {"scale": _mup(config, shape).std}
        initialise(model, std=config.init_std, depth_scaled=config.depth_scaled, seed=config.seed, **scale)
    assert not any(isinstance(module, QuantizedWeight) for module in model.modules())
    return model.requires_grad_(True)


def build_optimizer(config: TrainConfig, model: Model, weights: Mapping[str, torch.Tensor] | None = None) -> Optimizer | Muon:
    """The optimizer. It updates `weights`, by default the trainable weights of the model, and replaces their memory."""
    common: dict[str, Any] = {"weight_decay": config.weight_decay, "max_norm": config.max_norm}
    if config.mup_base is not None:
        rules = _mup(config, model.config)
        common |= {"lr_scale": rules.rate, "decay": partial(rules.decay, config.weight_decay)}
    betas = (config.beta1, config.beta2)
    kinds = {
        "adamw": partial(AdamW, betas=betas, eps=config.eps),
        "adamw-8bit": partial(AdamW8bit, betas=betas, eps=config.eps),
        "momentum": partial(Momentum, momentum=config.beta1),
        "muon": partial(Muon, betas=betas, eps=config.eps),
        "sgd": SGD,
    }
    return kinds[config.optimizer](trainable(model) if weights is None else weights, **common)


def build_objective(config: TrainConfig, device: torch.device, replicas: Ranks = ALONE) -> Objective:
    """The objective to minimise. Preference learning without an adapter needs a second, frozen model, which is loaded here.

    replicas: the ranks that compute other micro-batches of the same updates.
    """
    if config.loss == "next-token":
        return NextToken(z_loss=config.z_loss, label_smoothing=config.label_smoothing, deterministic=config.deterministic)
    reference = None if config.lora_rank else build_model(config, device).requires_grad_(False)
    return Preference(
        config.loss, beta=config.dpo_beta, smoothing=config.dpo_smoothing, reference=reference,
        deterministic=config.deterministic, replicas=replicas,
    )  # fmt: skip


def _mup(config: TrainConfig, shape: ModelConfig) -> MuP:
    assert config.mup_base is not None
    return mup_for(shape, config.mup_base, config.optimizer)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of the update that follows `step` earlier updates."""
    more: dict[str, Any] = {"decay": config.decay} if config.schedule == "wsd" else {}
    rate = SCHEDULES[config.schedule]
    return rate(step, steps=config.steps, warmup=config.warmup, peak=config.lr, floor=config.lr_floor, **more)


# ---- memory and cost


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes on the device. Nothing is allocated to predict them."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    available: int | None
    """Memory of the device; None for a CPU."""

    @property
    def total(self) -> int:
        """The number of bytes at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations", "logits")
        words = ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in parts)
        room = "" if self.available is None else f" of {self.available / 2**30:.1f}"
        return f"memory: {self.total / 2**30:.2f}{room} GiB ({words})"


def feed_forward_numbers(shape: ModelConfig) -> int:
    """Number of values per token that the backward pass of a feed-forward layer reads. In a mixture, each of a token's experts
    counts."""
    if shape.experts is None:
        return 3 * shape.intermediate_size
    one = 3 * shape.experts.inner + 2 * shape.hidden_size
    return shape.experts.routing.chosen * one + 3 * shape.experts.shared


def plan_memory(config: TrainConfig, model: Model, device: torch.device) -> MemoryPlan:
    """Predict the memory of an update. `model` may be on "meta".

    Raises:
        ValueError: the update needs more memory than the device has. The message states which setting to lower.
    """
    shape = model.config
    count, item = sum(p.numel() for p in trainable(model).values()), _DTYPES[config.dtype].itemsize
    frozen = weight_bytes_of(model) - sum(p.nbytes for p in trainable(model).values())
    if config.loss != "next-token" and not config.lora_rank:
        frozen += count * item  # the reference model
    tokens = config.row_tokens * config.micro_rows
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Values that backward passes read, per token and layer: the inputs of both norms, the residual stream and the outputs; q, k
    # and v before and after the rotation, and the result of attention; gate, up and their product.
    layer = 6 * shape.hidden_size + 2 * (q + 2 * kv) + 2 * q + feed_forward_numbers(shape)
    accumulated = 4 if config.micro_batches > 1 else 0
    if config.graphs and config.micro_batches > 1:
        accumulated += item  # a copy of the gradients, made before the next pass overwrites them
    if config.accumulate == "tree":
        accumulated = 4 * (1 + math.ceil(math.log2(config.micro_batches + 1)))
    chunk = min(tokens, max(2048, shape.hidden_size))
    kept = 0 if config.compute == "dtype" else sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)  # float8 w^T
    plan = MemoryPlan(
        weights=count * item + frozen,
        gradients=count * (item + accumulated),
        optimizer=int(count * (STATE_BYTES[config.optimizer] + (4 if item == 2 else 0))),
        activations=tokens * item * (layer * shape.num_hidden_layers + 4 * shape.hidden_size) + kept,
        logits=chunk * shape.vocab_size * item + 4 * shape.vocab_size * shape.hidden_size,
        available=memory_bytes(device) if device.type == "cuda" else None,
    )
    if plan.available is not None and plan.total > plan.available:
        raise ValueError(
            f"{plan}, which does not fit on {device}; lower micro_rows (and raise micro_batches), or use optimizer adamw-8bit"
        )
    return plan


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Operations per token in matrix products and attention, forward and backward. A multiply-add counts as two operations.

    causal: with attention over half of the row. This is the most that is computed; documents shorter than a row need less.
    full: with attention over the whole row (Chowdhery et al., "PaLM", 2022, appendix B), as most reports count.
    peak: operations per second of the run's devices together, from the data sheet or measured; None for CPUs.
    """

    causal: float
    full: float
    peak: float | None

    def mfu(self, tokens_per_s: float) -> dict[str, float]:
        """Model FLOPs utilisation: the share of the peak at this speed, in both conventions. Empty on a CPU."""
        if self.peak is None:
            return {}
        return {"mfu_causal": self.causal * tokens_per_s / self.peak, "mfu_full": self.full * tokens_per_s / self.peak}


def costs_of(config: TrainConfig, model: Model, device: torch.device) -> Costs:
    """The costs, from the shape of the model and the length of a row. For a frozen matrix, no weight gradient is computed: 4
    operations per token instead of 6."""
    shape = model.config
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("embed.")}
    if shape.tie_word_embeddings:
        matrices["head"] = model.embed.weight
    # Each token uses only some of the experts.
    share = 1.0 if shape.experts is None else shape.experts.routing.chosen / shape.experts.routing.experts
    met = {name: p.numel() * (share if ".ffn.experts_" in name else 1) for name, p in matrices.items()}
    codes = sum(module.shape.numel() for module in model.modules() if isinstance(module, QuantizedWeight))
    frozen = codes + sum(met[name] for name, p in matrices.items() if not p.requires_grad)
    trained = sum(met[name] for name, p in matrices.items() if p.requires_grad)
    passes = 2 if config.loss != "next-token" else 0  # the forward pass of the reference model
    products = (6 + passes) * trained + (4 + passes) * frozen
    width = shape.num_attention_heads * shape.head_dim
    seen = [min(config.row_tokens, window or config.row_tokens) for window in shape.windows]
    attention = (12 + 2 * passes) * width * sum(seen)
    peak = None
    if device.type == "cuda":
        unit = "bf16" if config.dtype == "bfloat16" else "fp32"
        card = device_of(device.index or 0)
        peak = (data_sheet(card) or ceilings(card)).flops[unit] * config.parallel.ranks
    return Costs(causal=products + attention / 2, full=products + attention, peak=peak)
