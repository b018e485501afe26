"""The options of a model: its TOML file, with a default for everything.

    [model]
    source = "my_pkg.my_model:build"   # default: the exported model in the version's folder
    precision = "fp16"                 # optimise it; default: as it is
    max_batch = 64
    ...

The keys are the fields of `ModelConfig`, where they are explained; docs/deploy.md lists them all. An unknown key is an error
that names it, so that a misspelled key does not silently mean a default.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from tilewright.host.batcher import BatchPolicy

__all__ = ["ONNX", "HostConfig", "Member", "ModelConfig", "Step", "check_name", "read_config"]

ONNX = ".onnx"
"""The suffix of an ONNX file's name."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_TOML_BYTES = 1 << 20
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
NAN = ("error", "allow")


def _option(default: Any, help: str) -> Any:
    """A field that is also an option of `serve`."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """Options of a server of ordinary models. The last three apply to the models named on the command line."""

    repository: str | None = _option(None, "folder of ordinary models, each with numbered versions")
    packages: tuple[str, ...] | None = _option(
        None, "Python package from which models in the repository may load functions; may be given several times"
    )
    precision: str | None = _option(
        None, "optimise the models in this precision: fp32, fp16, bf16 or int8; default: no optimisation"
    )
    max_batch: int = _option(64, "most rows in a batch")
    max_delay_ms: float = _option(0.0, "longest time in milliseconds that a request waits for others to share its batch")


def check_name(name: str) -> str:
    """Return a model's name, which is used in URLs. Raises ValueError if it is not valid there."""
    if not NAME.fullmatch(name):
        raise ValueError(f"the model name {name[:80]!r} is invalid; wanted letters, digits, '.', '_' and '-', at most 128")
    return name


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a pipeline: a model, and where its inputs come from and its outputs go.

    `inputs` and `outputs` map the model's names to names of the pipeline.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One of the versions that share a model's requests. A `shadow` also computes a share, but its answers are not sent."""

    version: int
    weight: float
    shadow: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How one model is served.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    source: str | None = None
    """MODULE:FUNCTION of a package that the operator allows; None: the files of the version's folder."""
    precision: str | None = None
    """Optimise the model in this precision; None: run it as it is."""
    device: str | None = None
    """cpu, cuda or cuda:N; None: the first GPU, else the CPU."""
    max_batch: int = 64
    max_delay_ms: float = 0.0
    preferred: tuple[int, ...] = ()
    """Batch sizes in rows: a batch that reaches one is run at once, others are padded to the next one. (): batches are padded
    only if `precision` is given."""
    max_waiting: int = 1024
    max_wait_s: float = 2.0
    """Longest time that a request may wait in the queue; it is refused if the expected wait is longer."""
    instances: int = 1
    """Number of processes that run this model in parallel."""
    threads: int | None = None
    """Threads of each process on a CPU; None: its share of all cores but one, which is left to the server."""
    batching: bool | None = None
    """Whether the first dimension counts independent rows; None: determined by a test run."""
    same_shape: bool = False
    """Pad every batch to `max_batch` rows, so that an answer cannot depend on how many others were in its batch."""
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of inputs, by name, that replace those of the example; -1 means any size."""
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    nan: str = "error"
    """If the model returns a NaN for finite inputs: `error` fails the request, `allow` returns it."""
    cache: int = 0
    """Number of answers to cache and return again for equal inputs; 0: no cache."""
    state: Mapping[str, str] = field(default_factory=dict)
    """For sequences: maps an input to the output of the previous call that it gets. The first call of a sequence gets zeros."""
    max_sequences: int = 1024
    sequence_idle_s: float = 60.0
    batch_timeout_s: float = 60.0
    """A batch that takes longer counts as hung: its process is killed and replaced."""
    load_timeout_s: float = 600.0
    max_failures: int = 3
    """After this many batches in a row without an answer, the process is replaced and the circuit breaker opens."""
    max_bytes: int = 64 << 20
    """Most bytes in the inputs of a batch, for models with open dimensions."""
    lock_regions: bool = True
    """On a GPU: lock the pages of clients' shared memory, so that the GPU copies large inputs without a processor."""
    versions: tuple[Member, ...] = ()
    """Versions that answer requests which name no version; (): the newest."""
    steps: tuple[Step, ...] = ()
    """A pipeline of other models instead of a model of its own."""

    def __post_init__(self) -> None:
        self.policy()
        words = {"precision": (None, *PRECISIONS), "nan": NAN}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, wanted one of {', '.join(filter(None, known))}")
        ranges: dict[str, tuple[float, float]] = {
            "instances": (1, 64),
            "cache": (0, 1 << 20),
            "max_sequences": (1, 1 << 20),
            "sequence_idle_s": (0.001, 86400),
            "batch_timeout_s": (0.001, 86400),
            "load_timeout_s": (0.1, 86400),
            "max_failures": (1, 1000),
            "max_bytes": (1, 1 << 34),
        }
        if self.threads is not None:
            ranges["threads"] = (1, 1024)
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {low:g} to {high:g}")
        if any(not 0 <= member.weight <= 1e6 for member in self.versions):
            raise ValueError("a weight of versions is out of range; wanted 0 to 1000000")
        if self.versions and not any(member.weight > 0 and not member.shadow for member in self.versions):
            raise ValueError("versions has none that answers; wanted one with a weight above 0 that is not a shadow")

    def policy(self, most: int | None = None) -> BatchPolicy:
        """The batching policy. `most`: most rows of a batch, if the model was exported for fewer than `max_batch`."""
        rows = self.max_batch if most is None else min(self.max_batch, most)
        return BatchPolicy(
            max_rows=rows,
            max_delay_s=self.max_delay_ms / 1e3,
            preferred=tuple(sorted({size for size in self.preferred if most is None or size <= rows})),
            max_waiting=self.max_waiting,
            max_wait_s=self.max_wait_s,
        )

    def json(self) -> dict[str, Any]:
        """The config as JSON values, for the message that starts a process; `of` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "ModelConfig":
        """The config from a table of TOML or JSON. Raises ValueError for an unknown key or a value of the wrong type."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = [name for name in said if name not in fields]
        if unknown:
            raise ValueError(f"the key {unknown[0]!r} is unknown; wanted some of {', '.join(fields)}")
        try:
            return cls(**{name: _CONVERT.get(name, _plain(fields[name]))(value) for name, value in said.items()})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a value has the wrong type: {error}") from None


def _plain(of: "dataclasses.Field[Any]") -> Any:
    """A function that returns values of the field's type, and raises TypeError for others."""
    wanted = set(get_args(of.type) or (of.type,))
    if float in wanted:
        wanted.add(int)

    def convert(value: Any) -> Any:
        if type(value) not in wanted:
            names = " or ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in wanted if kind is not type(None)))
            raise TypeError(f"{of.name} is {value!r}, wanted {names}")
        return value

    return convert


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(n) is not int for n in value):
        raise TypeError(f"{value!r} is not a list of whole numbers")
    return tuple(value)


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise TypeError(f"{value!r} is not a list of names")
    return tuple(value)


def _table(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise TypeError(f"{value!r} is not a table of names")
    return dict(value)


_CONVERT: dict[str, Any] = {
    "preferred": _numbers,
    "input_names": _words,
    "output_names": _words,
    "state": _table,
    "inputs": lambda value: {name: _numbers(shape) for name, shape in value.items()},
    "steps": lambda value: tuple(
        Step(model=check_name(s["model"]), inputs=_table(s["inputs"]), outputs=_table(s["outputs"])) for s in value
    ),
    "versions": lambda value: tuple(
        Member(version=int(m["version"]), weight=float(m["weight"]), shadow=bool(m.get("shadow", False))) for m in value
    ),
}


def read_config(path: Path, defaults: ModelConfig | None = None) -> ModelConfig:
    """Read the config from a model's TOML; `defaults` if there is no file.

    Raises:
        ValueError: the file is not valid TOML, or has something unknown; the message names the file and the key.
    """
    base = {} if defaults is None else {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)}
    if not path.is_file():
        return ModelConfig(**base)
    try:
        if path.stat().st_size > MAX_TOML_BYTES:
            raise ValueError(f"it is larger than {MAX_TOML_BYTES} bytes")
        said = tomllib.loads(path.read_text(encoding="utf-8"))
        unknown = [name for name in said if name != "model"]
        if unknown or not isinstance(said.get("model", {}), dict):
            raise ValueError(f"it has {', '.join(map(repr, said))}; wanted one table, [model]")
        own = ModelConfig.of(said.get("model", {}))
        given = {name: getattr(own, name) for name in said.get("model", {})}
        return ModelConfig(**{**base, **given})
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
