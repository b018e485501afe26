"""What a run is: one frozen dataclass, read from TOML, from whose fields the command line is made. Imports no torch."""

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
    "compute": ("dtype", "fp8", "fp8-tensor"),
}  # fmt: skip

TABLES = ("dpo", "lora")
"""Tables that a file may have: rank in [lora] is the field lora_rank."""

FREE = frozenset(
    (
        "out", "device", "log_every", "save_every", "save_async", "keep", "eval_every", "eval_rows", "sample_every",
        "sample_prompt", "sample_tokens", "tensorboard", "max_skipped",
    )
)  # fmt: skip
"""Fields that a resumed run may change: they do not touch what is computed."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run. Tokens of one update: row_tokens * micro_rows * micro_batches.

    Raises ValueError for a value that no model or data can make right.
    """

    model: str = _option("bookworm", "the embedded model, a model folder, a hub name, or the name of a shape (qwen3-0.6b ...)")
    init: str = _option("load", "load the weights of model, or begin with random ones")
    init_std: float = _option(0.02, "standard deviation of random weights")
    depth_scaled: bool = _option(True, "random weights: divide those of output layers by sqrt(2 * layers), as GPT-2 does")
    mup_base: int | None = _option(
        None, "muP: hidden size whose learning rate and init_std hold at this width; default: no muP"
    )
    tokenizer: str | None = _option(None, "folder with a tokenizer.json, or bookworm; default: that of model")
    data: tuple[str, ...] = _option((), "files (JSON lines, parquet, text; compressed or not), or folders of token shards")
    weights: tuple[float, ...] | None = _option(None, "share of each of data in the tokens; default: equal shares")
    text_field: str = _option("text", "field of JSON lines and parquet that has the text")
    chat: bool = _option(False, "data are conversations: loss on the assistant's messages alone, by the chat template")
    shuffle: bool = _option(True, "read documents in a new order each epoch; no: as they lie in the shards")
    piece_tokens: int = _option(
        0, "cut texts into pieces of this many tokens before they are shuffled, so that an update reads many texts; 0: do not"
    )
    out: str = _option("run", "folder of the run: checkpoints, log.jsonl, the final model")
    device: str | None = _option(None, "cpu, cuda or cuda:N; default: the first GPU, else the CPU")
    dtype: str = _option("bfloat16", "bfloat16 or float32, of weights and products; master weights are float32")
    compute: str = _option(
        "dtype", "of products in blocks: dtype; fp8 (a scale for each row) or fp8-tensor, where that is faster (sm_89 on)"
    )
    graphs: bool = _option(False, "capture the passes as a CUDA graph: the same bits, less work for the host; on one GPU")
    seed: int = _option(0, "of random weights and of the order of documents")
    row_tokens: int = _option(1024, "tokens of a packed row: the longest context")
    micro_rows: int = _option(4, "rows that go through the model at once")
    micro_batches: int = _option(1, "passes whose gradients are added up for one update")
    accumulate: str = _option("running", "how they are added: running, or tree (the same bits on any number of ranks)")
    steps: int = _option(100, "updates")
    optimizer: str = _option("adamw", f"one of {', '.join(OPTIMIZERS)}")
    lr: float = _option(3e-4, "highest learning rate")
    lr_floor: float = _option(0.0, "last learning rate")
    schedule: str = _option("cosine", f"one of {', '.join(_SCHEDULES)}")
    warmup: int = _option(10, "updates of linear growth of the learning rate")
    decay: int | None = _option(None, "wsd: updates of the decay at the end; default: a tenth of steps")
    beta1: float = _option(0.9, "decay of the mean of gradients; what momentum keeps of itself")
    beta2: float = _option(0.95, "decay of the mean of their squares")
    eps: float = _option(1e-8, "added to the root of that mean")
    weight_decay: float = _option(0.1, "of matrices")
    max_norm: float = _option(1.0, "gradients are scaled down to this norm; inf: never")
    loss: str = _option("next-token", "next-token; dpo or ipo: data are pairs of a chosen and a rejected answer")
    dpo_beta: float = _option(0.1, "dpo, ipo: how much a pair's log-ratio counts; large: stay near the model as it was")
    dpo_smoothing: float = _option(0.0, "dpo: the share of pairs that may be the wrong way round, below 0.5")
    lora_rank: int = _option(0, "train a low-rank adapter of this rank beside a frozen model; 0: train the model")
    lora_alpha: float = _option(16.0, "the adapter's product is scaled by alpha / rank")
    lora_rslora: bool = _option(False, "scale by alpha / sqrt(rank)")
    lora_dropout: float = _option(0.0, "share of a layer's input that its adapter does not see while training")
    lora_targets: tuple[str, ...] = _option((), "layers with an adapter: q_proj, *.layers.0.* ...; default: all of the blocks")
    lora_base: str = _option("float", "float, or int4: the frozen weights in 4 bits (QLoRA)")
    lora_adapter: str | None = _option(None, "folder of the adapter to go on from, ours or of peft; its sizes are taken")
    z_loss: float = _option(0.0, "weight of log(softmax sum)^2 in the loss")
    label_smoothing: float = _option(0.0, "share of the target that all tokens have in equal parts")
    deterministic: bool = _option(True, "the same bits from the same run; no: kernels may add in any order, on a GPU")
    max_skipped: int = _option(10, "updates in a row that may be skipped because gradients are not finite")
    log_every: int = _option(10, "updates between lines on the screen")
    save_every: int = _option(100, "updates between checkpoints; the last is always saved")
    save_async: bool = _option(True, "write checkpoints while training goes on")
    keep: int = _option(2, "checkpoints that stay")
    eval_data: str | None = _option(None, "file of texts that are never trained on: bits per byte are measured on them")
    eval_every: int = _option(100, "updates between measurements on eval_data; once more at the end")
    eval_rows: int = _option(64, "rows of eval_data that are measured; 0: all")
    sample_every: int = _option(0, "updates between texts that the model writes; 0: none")
    sample_prompt: str = _option("", "what it continues")
    sample_tokens: int = _option(64, "tokens that it writes")
    parallel: Plan = _option(Plan(), "spread over devices, such as dp=2,zero=3,tp=2,sp,pp=2; default: one device")  # noqa: RUF009
    tensorboard: bool = _option(False, "also write the log for TensorBoard, to the folder of the run")

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
            raise ValueError("piece_tokens is 1, wanted 0, or 2 or more: a piece's last token has nothing to predict")
        if self.piece_tokens and (self.chat or self.loss != "next-token" or not self.shuffle):
            raise ValueError(
                "piece_tokens is for texts that are shuffled: leave it out with chat, with pairs, and where shuffle is off"
            )
        if not (0 < self.lr < math.inf and 0 <= self.lr_floor <= self.lr):
            raise ValueError(f"lr is {self.lr} and lr_floor {self.lr_floor}, wanted 0 <= lr_floor <= lr, lr above 0")
        if self.mup_base is not None and self.mup_base < 1:
            raise ValueError(f"mup_base is {self.mup_base}, wanted a hidden size of 1 or more")
        if not 0 < self.init_std < math.inf:
            raise ValueError(f"init_std is {self.init_std}, wanted a finite number above 0")
        if self.weights is not None and len(self.weights) != len(self.data):
            raise ValueError(f"weights has {len(self.weights)} numbers for {len(self.data)} of data, wanted one for each")
        if self.warmup + (self.decay or 0) > self.steps:
            raise ValueError(f"warmup {self.warmup} and decay {self.decay or 0} are longer than the run of {self.steps} steps")

        self._check_tuning()

    def _check_tuning(self) -> None:
        if not (0 < self.dpo_beta < math.inf and 0 <= self.dpo_smoothing < 0.5):
            raise ValueError(
                f"dpo_beta is {self.dpo_beta} and dpo_smoothing {self.dpo_smoothing}, wanted above 0, and 0 to 0.5"
            )
        if not (0 < self.lora_alpha < math.inf and 0 <= self.lora_dropout < 1):
            got = f"lora_alpha is {self.lora_alpha} and lora_dropout {self.lora_dropout}"
            raise ValueError(f"{got}, wanted above 0, and 0 to below 1")
        if not self.lora_rank and (self.lora_base != "float" or self.lora_adapter or self.lora_targets):
            raise ValueError("lora_base, lora_adapter and lora_targets are of an adapter: set lora_rank")
        if self.lora_rank and self.mup_base is not None:
            raise ValueError("mup_base scales by the width of what is trained, and an adapter has none: leave one of them out")
        if self.lora_rank and self.init != "load":
            raise ValueError("an adapter beside random weights learns nothing of use: set init to load, or lora_rank to 0")
        if self.compute != "dtype" and (self.lora_rank or self.loss != "next-token"):
            raise ValueError(f"compute is {self.compute}, which is for training all weights on next tokens: set it to dtype")
        if self.loss != "next-token" and (self.chat or self.z_loss or self.label_smoothing or self.eval_data):
            raise ValueError(f"loss is {self.loss}, which has no chat, z_loss, label_smoothing or eval_data: leave them out")

    @property
    def step_tokens(self) -> int:
        """Tokens of one update, at most."""
        return self.row_tokens * self.micro_rows * self.micro_batches


def _check_type(name: str, kind: Any, value: Any) -> None:
    """A field's value is what its annotation says; an int is a float too."""
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
    """A config from a file's values, and options that overrule them. Raises ValueError for a name that there is not."""
    known = [one.name for one in fields(TrainConfig)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"the config has {name!r}, which is no field" + (f"; is {close[0]!r} meant?" if close else ""))
    both = {**values, **over}
    table = both.get("parallel")
    if isinstance(table, Mapping) and "micro_batches" in table:
        inside = {name: value for name, value in table.items() if name != "micro_batches"}
        if both.get("micro_batches", table["micro_batches"]) != table["micro_batches"]:
            given = f"{table['micro_batches']!r} in parallel and {both['micro_batches']!r} beside it"
            raise ValueError(f"micro_batches is {given}; they are those of an update, of all ranks together: give one number")
        both |= {"parallel": inside, "micro_batches": table["micro_batches"]}
    return TrainConfig(**both)


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a config file, flat. Raises ValueError where it is no TOML."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    tables = {name: values.pop(name) for name in TABLES if isinstance(values.get(name), dict)}
    return values | {f"{name}_{key}": value for name, table in tables.items() for key, value in table.items()}


def to_toml(config: TrainConfig) -> str:
    """Every field that has a value, as `read_toml` reads it."""
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
    """Sentences about fields that a resumed run must not change, and that differ."""
    # Another plan computes the same; what is cut into sums may be no other.
    alone = replace(saved, parallel=saved.parallel.alone())
    same = replace(now, **{name: getattr(saved, name) for name in FREE}, parallel=now.parallel.alone())
    pairs = ((one.name, getattr(alone, one.name), getattr(same, one.name)) for one in fields(TrainConfig))
    return [f"{name} was {_said(was)}, is {_said(is_now)}" for name, was, is_now in pairs if was != is_now]


def _said(value: Any) -> str:
    return str(value) or "no cuts" if isinstance(value, Plan) else repr(value)
