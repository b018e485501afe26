"""Training of a planned run with `tilewright train`, on a config.json of its shape. Its loss is measured on held-out text."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.scaling.plan import Plan, PlannedRun
from tilewright.train.config import TrainConfig, merged, read_toml

__all__ = ["command_of", "held_out_loss", "model_config", "shared_data"]

_MANY = 1 << 60
"""A number of updates that is longer than any warm-up, for checks in which the number does not matter."""
_PLANNED = frozenset(("model", "init", "out", "row_tokens", "steps", "data"))


def model_config(run: PlannedRun, sequence: int) -> dict[str, object]:
    """The config.json of a Llama model with the shape of the run."""
    shape = run.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": sequence,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }


def shared_data(base: Path, plan: Plan, home: Path, say: Callable[[str], None]) -> list[Path]:
    """The data of the config file `base`, with texts converted to token shards under `home`, once for all runs of the plan.

    Existing shards are reused. Conversations and folders of shards are used as they are.

    Raises:
        ValueError: a file has no texts, or the tokenizer is not found.
        OSError: a file is missing, or `home` cannot be written.
    """
    from tilewright.train.data import text_shards
    from tilewright.train.main import Encoder, tokenizer_folder

    config: TrainConfig = merged(read_toml(base), {})
    paths = [Path(name) for name in config.data]
    at = tokenizer_folder(config)
    if config.chat or config.loss != "next-token" or at is None:
        return paths
    encode = Encoder(at)
    vocab = max(run.shape.vocab for run in plan.runs)
    made: list[Path] = []
    for path in paths:
        if path.is_dir():
            made.append(path)
            continue
        facts = {"identity": encode.identity, "text_field": config.text_field, "progress": say}
        made.append(text_shards([path], encode, vocab, home, **facts).folder)
    return made


def command_of(base: Path, plan: Plan, data: Sequence[Path] = ()) -> Callable[[PlannedRun, Path], list[str]]:
    """(run, its folder) -> the command that trains it. The config file `base` has data, tokenizer, batch and learning rate.

    The options of a run override those of the file. data: if not empty, used instead of the data of the file.

    Raises:
        ValueError: the trainer does not accept the config of a run, the config has no tokenizer or no eval_data, or the options
            of a run set a field that the plan determines.
    """
    values = read_toml(base)
    configs = {run.name: _config(values, run, plan.sequence) for run in plan.runs}
    if any(config.tokenizer is None or config.eval_data is None for config in configs.values()):
        raise ValueError(
            f"{base} must set tokenizer, because the models of a plan have none, and eval_data, for the held-out loss"
        )

    def command(run: PlannedRun, folder: Path) -> list[str]:
        shape = folder / "shape"
        shape.mkdir(exist_ok=True)
        (shape / "config.json").write_text(json.dumps(model_config(run, plan.sequence)), encoding="utf-8")
        options = {"model": shape, "init": "random", "out": folder / "train", "row-tokens": plan.sequence}
        options |= {"steps": configs[run.name].steps} | {name.replace("_", "-"): value for name, value in run.options.items()}
        pairs = [*options.items(), *(("data", path) for path in data)]
        words = [word for name, value in pairs for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "tilewright.cli", "train", str(base), *words]

    return command


def _config(values: Mapping[str, Any], run: PlannedRun, sequence: int) -> TrainConfig:
    """The training config of a run, with its number of updates."""
    try:
        if taken := sorted(_PLANNED & run.options.keys()):
            raise ValueError(f"its options contain {', '.join(taken)}, which the plan determines")
        over = run.options | {"init": "random", "row_tokens": sequence}
        an_update = merged({**values, **over, "steps": _MANY}, {}).step_tokens
        return merged({**values, **over, "steps": max(1, round(run.tokens / an_update))}, {})
    except ValueError as error:
        raise ValueError(f"run {run.name} cannot be trained: {error}") from None


def held_out_loss(folder: Path) -> float:
    """The final loss on eval_data in nats per byte, from the log of the run (bits per byte times log 2).

    Raises:
        ValueError: the log does not contain this measurement.
    """
    path = folder / "train" / "log.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    measured = [row["bits_per_byte"] for row in rows if "bits_per_byte" in row]
    if not measured:
        raise ValueError(f"{path} contains no bits_per_byte; see {folder / 'log.txt'}")
    return float(measured[-1]) * math.log(2)
