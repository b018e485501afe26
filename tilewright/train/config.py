"""The configuration of a training run: a frozen dataclass that is read from TOML. Its fields are also the options of
`tilewright train`.

Does not import torch.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from tilewright.parallel.plan import Plan

__all__ = ["FREE", "OPTIMIZERS", "TrainConfig", "differences", "merged", "read_toml", "to_toml"]

OPTIMIZERS = ("adamw", "adamw-8bit", "momentum", "muon", "sgd")
_SCHEDULES = ("constant", "cosine", "linear", "wsd")
_CHOICES = {
    "init": ("load", "random"), "dtype": ("bfloat16", "float32"), "optimizer": OPTIMIZERS, "schedule": _SCHEDULES,
    "accumulate": ("running", "tree"), "loss": ("next-token", "dpo", "ipo"), "lora_base": ("float", "int4"),
    "compute": ("dtype", "fp8", "fp8-all", "fp8-tensor"),
}  # fmt: skip

TABLES = ("dpo", "lora")
"""Tables that a config file may contain. For example, `rank` in the table [lora] is the field lora_rank."""

FREE = frozenset(
    (
        "out", "device", "log_every", "save_every", "save_async", "keep", "eval_every", "eval_rows", "sample_every",
        "sample_prompt", "sample_tokens", "tensorboard", "max_skipped",
    )
)  # fmt: skip
"""Fields that may differ when a run is resumed, because they do not affect results."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. One update reads row_tokens * micro_rows * micro_batches tokens.

    Raises:
        ValueError: a value is invalid for every model and all data.
    """

    model: str = _option(
        "bookworm",
        "model to train: bookworm (the embedded model), a model folder, a Hugging Face hub name, or a shape such as qwen3-0.6b",
    )
    init: str = _option("load", "initial weights: load (the model's own) or random")
    init_std: float = _option(0.02, "standard deviation of randomly initialised weights")
    depth_scaled: bool = _option(
        True, "with random weights, divide those of each block's output projections by sqrt(2 * layers), as GPT-2 does"
    )
    mup_base: int | None = _option(
        None, "turn on muP: lr and init_std are meant for this hidden size and are rescaled to the model's; default: no muP"
    )
    tokenizer: str | None = _option(None, "folder with a tokenizer.json, or bookworm; default: the model's tokenizer")
    data: tuple[str, ...] = _option(
        (), "training data: files (JSON lines, parquet or text, also compressed) or folders of token shards"
    )
    weights: tuple[float, ...] | None = _option(
        None, "one number for each entry of data: its share of the training tokens; default: equal shares"
    )
    text_field: str = _option("text", "field that holds the text in JSON lines and parquet files")
    chat: bool = _option(
        False, "the data are conversations: apply the chat template, and compute the loss on the assistant's messages only"
    )
    shuffle: bool = _option(True, "shuffle the documents anew in each epoch; otherwise read them in the order of the shards")
    piece_tokens: int = _option(
        0,
        "cut texts into pieces of this many tokens before shuffling, so that each update reads from many texts; 0: do not cut",
    )
    out: str = _option("run", "folder for the run's checkpoints, log.jsonl and final model")
    device: str | None = _option(None, "device: cpu, cuda or cuda:N; default: the first GPU, or the CPU if there is none")
    dtype: str = _option(
        "bfloat16",
        "dtype of the weights and matrix products: bfloat16 or float32; the optimizer's master weights are always float32",
    )
    compute: str = _option(
        "dtype",
        "precision of the matrix products in the blocks: dtype (that of the weights) or, from compute "
        "capability 8.9, fp8 (a scale for each row), fp8-all (the gradients of weights, too) or fp8-tensor, used for the "
        "layers that it makes faster",
    )
    graphs: bool = _option(
        False, "capture forward and backward pass as a CUDA graph: identical results with less work for the host; one GPU only"
    )
    seed: int = _option(0, "seed of the random weights and of the order of documents")
    row_tokens: int = _option(1024, "length of a packed row in tokens; this is also the longest context")
    micro_rows: int = _option(4, "rows in one forward and backward pass")
    micro_batches: int = _option(1, "passes whose gradients are summed for one update")
    accumulate: str = _option(
        "running",
        "how these gradients are summed: running (one after the other) or tree (identical results on any number of ranks)",
    )
    steps: int = _option(100, "number of updates")
    optimizer: str = _option("adamw", f"optimizer: one of {', '.join(OPTIMIZERS)}")
    lr: float = _option(3e-4, "peak learning rate")
    lr_floor: float = _option(0.0, "learning rate at the end of the schedule")
    schedule: str = _option("cosine", f"learning rate schedule: one of {', '.join(_SCHEDULES)}")
    warmup: int = _option(10, "updates during which the learning rate grows linearly to lr")
    decay: int | None = _option(None, "wsd schedule: length of the final decay, in updates; default: a tenth of steps")
    beta1: float = _option(0.9, "decay of the running mean of the gradients (momentum)")
    beta2: float = _option(0.95, "decay of the running mean of the squared gradients")
    eps: float = _option(1e-8, "number added to the root of the mean squared gradient, to avoid division by zero")
    weight_decay: float = _option(0.1, "weight decay, applied to matrices only")
    max_norm: float = _option(1.0, "clip the gradients to this total norm; inf: no clipping")
    loss: str = _option("next-token", "loss: next-token, or dpo or ipo for data of pairs of a chosen and a rejected answer")
    dpo_beta: float = _option(
        0.1, "dpo and ipo: strength of the pull towards the original model; larger values keep the trained model closer to it"
    )
    dpo_smoothing: float = _option(
        0.0, "dpo: share of the pairs assumed to have chosen and rejected answers swapped; 0 to below 0.5"
    )
    lora_rank: int = _option(0, "train a LoRA adapter of this rank and freeze the model; 0: train the model itself")
    lora_alpha: float = _option(16.0, "the adapter's output is multiplied by lora_alpha / lora_rank")
    lora_rslora: bool = _option(False, "rank-stabilised LoRA: multiply by lora_alpha / sqrt(lora_rank) instead")
    lora_dropout: float = _option(0.0, "dropout on the adapter's input during training; 0 to below 1")
    lora_targets: tuple[str, ...] = _option(
        (),
        "names or patterns of the layers that get an adapter, such as *.layers.0.*; default: all linear layers of the blocks",
    )
    lora_base: str = _option("float", "format of the frozen weights: float, or int4 for 4-bit weights (QLoRA)")
    lora_adapter: str | None = _option(
        None,
        "folder of an adapter to continue from, saved by tilewright or peft; its settings are used, and "
        "its rank must equal lora_rank",
    )
    z_loss: float = _option(0.0, "weight of the z-loss, the squared logarithm of the softmax sum; 0: off")
    label_smoothing: float = _option(0.0, "share of the target probability that is spread evenly over all tokens; 0: off")
    deterministic: bool = _option(True, "repeating the run gives identical bits; otherwise GPU kernels may add in any order")
    max_skipped: int = _option(
        10, "end the run after this many updates in a row were skipped because a gradient was not finite"
    )
    log_every: int = _option(10, "print a line after every so many updates")
    save_every: int = _option(100, "save a checkpoint after every so many updates; the last update is always saved")
    save_async: bool = _option(True, "write checkpoints in the background while training continues")
    keep: int = _option(2, "number of newest checkpoints to keep")
    eval_data: str | None = _option(
        None, "file of held-out texts, on which bits per byte are measured; they are not trained on"
    )
    eval_every: int = _option(100, "measure on eval_data after every so many updates, and once at the end")
    eval_rows: int = _option(64, "rows of eval_data to measure; 0: all")
    sample_every: int = _option(0, "let the model write a sample text after every so many updates; 0: never")
    sample_prompt: str = _option("", "prompt that the sample text continues")
    sample_tokens: int = _option(64, "length of the sample text in tokens")
    parallel: Plan = _option(Plan(), "parallel plan, such as dp=2,zero=3,tp=2,sp,pp=2; default: one device")  # noqa: RUF009
    tensorboard: bool = _option(False, "also write a TensorBoard log into the run's folder")

    def __post_init__(self) -> None:
        for name in ("data", "weights", "lora_targets"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        object.__setattr__(self, "parallel", Plan.read(self.parallel))
        for one in fields(self):
            _check_type(one.name, one.type, getattr(self, one.name))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, wanted one of {', '.join(choices)}")
        least = {"row_tokens": 2, "seed": 0, "piece_tokens": 0, "warmup": 0, "eval_rows": 0, "sample_every": 0}
        least |= {"micro_rows": 1, "micro_batches": 1, "steps": 1, "log_every": 1, "save_every": 1, "keep": 1}
        least |= {"eval_every": 1, "sample_tokens": 1, "max_skipped": 1, "lora_rank": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {low} or more")
        if self.piece_tokens == 1:
            raise ValueError(
                "piece_tokens is 1, but must be 0 (off) or at least 2, because a piece's last token has nothing to predict"
            )
        if self.piece_tokens and (self.chat or self.loss != "next-token" or not self.shuffle):
            raise ValueError(
                "piece_tokens is only for texts that are shuffled; leave it out with chat, with pairs, and if shuffle is off"
            )
        if not (0 < self.lr < math.inf and 0 <= self.lr_floor <= self.lr):
            raise ValueError(f"lr is {self.lr} and lr_floor is {self.lr_floor}; lr must be above 0, and lr_floor from 0 to lr")
        if self.mup_base is not None and self.mup_base < 1:
            raise ValueError(f"mup_base is {self.mup_base}, wanted a hidden size of 1 or more")
        if not 0 < self.init_std < math.inf:
            raise ValueError(f"init_std is {self.init_std}, wanted a finite number above 0")
        if self.weights is not None and len(self.weights) != len(self.data):
            raise ValueError(
                f"weights has {len(self.weights)} numbers, but data has {len(self.data)} entries; give one number for "
                "each entry"
            )
        if self.warmup + (self.decay or 0) > self.steps:
            raise ValueError(
                f"warmup ({self.warmup}) and decay ({self.decay or 0}) together are longer than the run of {self.steps} steps"
            )

        self._check_tuning()

    def _check_tuning(self) -> None:
        for name in ("dpo_beta", "lora_alpha"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted a finite number above 0")
        for name, high in (("dpo_smoothing", 0.5), ("lora_dropout", 1)):
            if not 0 <= getattr(self, name) < high:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 0 and below {high}")
        if not self.lora_rank and (self.lora_base != "float" or self.lora_adapter or self.lora_targets):
            raise ValueError("lora_base, lora_adapter and lora_targets need an adapter, but lora_rank is 0; set lora_rank")
        if self.lora_rank and self.mup_base is not None:
            raise ValueError(
                "mup_base cannot be combined with lora_rank, because it scales by the width of trained weights; leave "
                "one of them out"
            )
        if self.lora_rank and self.init != "load":
            raise ValueError(
                f"lora_rank is {self.lora_rank}, but init is {self.init}, and an adapter for random weights is useless; "
                "set init to load, or lora_rank to 0"
            )
        if self.compute != "dtype" and (self.lora_rank or self.loss != "next-token"):
            raise ValueError(
                f"compute is {self.compute}, which supports only training all weights on the next-token loss; set it to dtype"
            )
        if self.loss != "next-token" and (self.chat or self.z_loss or self.label_smoothing or self.eval_data):
            raise ValueError(
                f"loss is {self.loss}, which does not support chat, z_loss, label_smoothing or eval_data; leave them out"
            )

    @property
    def step_tokens(self) -> int:
        """The greatest number of tokens in one update."""
        return self.row_tokens * self.micro_rows * self.micro_batches


def _check_type(name: str, kind: Any, value: Any) -> None:
    """Raise ValueError unless the value of a field has the annotated type. An int is also accepted where a float is
    expected."""
    kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
    for one in kinds:
        if one is type(None) and value is None:
            return
        if one is float and isinstance(value, int | float) and not isinstance(value, bool):
            return
        if isinstance(one, type) and isinstance(value, one) and not (one is int and isinstance(value, bool)):
            return
        if get_args(one) and isinstance(value, tuple):
            for each in value:
                _check_type(f"an entry of {name}", get_args(one)[0], each)
            return
    wanted = " or ".join("nothing" if one is type(None) else getattr(one, "__name__", str(one)) for one in kinds)
    raise ValueError(f"{name} is {value!r}, wanted {wanted}")


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> TrainConfig:
    """A config from the values of a file and from options, which override them. Raises ValueError for an unknown name."""
    known = [one.name for one in fields(TrainConfig)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f"the config has {name!r}, which is not a field" + (f"; did you mean {close[0]!r}?" if close else "")
            )
    both = {**values, **over}
    table = both.get("parallel")
    if isinstance(table, Mapping) and "micro_batches" in table:
        inside = {name: value for name, value in table.items() if name != "micro_batches"}
        if both.get("micro_batches", table["micro_batches"]) != table["micro_batches"]:
            given = f"{table['micro_batches']!r} in parallel and {both['micro_batches']!r} outside it"
            raise ValueError(
                f"micro_batches is {given}, but it is one number, the micro-batches per update over all ranks; give one value"
            )
        both |= {"parallel": inside, "micro_batches": table["micro_batches"]}
    return TrainConfig(**both)


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a config file; tables are flattened. Raises ValueError if the file is not valid TOML."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    tables = {name: values.pop(name) for name in TABLES if isinstance(values.get(name), dict)}
    return values | {f"{name}_{key}": value for name, table in tables.items() for key, value in table.items()}


def to_toml(config: TrainConfig) -> str:
    """All fields that have a value, in the format that `read_toml` reads."""
    values = {**asdict(config), "parallel": str(config.parallel) or None}
    lines = [f"{name} = {_literal(value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else "\\" + c if c in '"\\' else c for c in value)
        return f'"{escaped}"'
    return repr(value)


def differences(saved: TrainConfig, now: TrainConfig) -> list[str]:
    """For each field that must not change when a run is resumed, but did: a sentence about it."""
    # The plan may differ, except for the division of the sums (`slices` and `chunks`), which `alone` keeps.
    alone = replace(saved, parallel=saved.parallel.alone())
    same = replace(now, **{name: getattr(saved, name) for name in FREE}, parallel=now.parallel.alone())
    pairs = ((one.name, getattr(alone, one.name), getattr(same, one.name)) for one in fields(TrainConfig))
    return [f"{name} was {_said(was)} and is now {_said(is_now)}" for name, was, is_now in pairs if was != is_now]


def _said(value: Any) -> str:
    return str(value) or "undivided" if isinstance(value, Plan) else repr(value)
