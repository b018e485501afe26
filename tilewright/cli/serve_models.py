"""What `tilewright serve` makes of ordinary models: functions, exported folders and a repository become a `Host`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.extras import require
from tilewright.host.config import HostConfig

if TYPE_CHECKING:
    from tilewright.host.host import Host

__all__ = ["MANIFEST", "host_of", "is_ordinary"]

MANIFEST = "program.json"
"""The file that a folder of `tilewright export` has."""


def is_ordinary(model: str) -> bool:
    """Whether MODEL is MODULE:FUNCTION or an exported folder, not a language model."""
    path = Path(model)
    if path.is_dir():
        return (path / MANIFEST).is_file()
    module, colon, function = model.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def host_of(
    model: str, beside: Sequence[str], config: HostConfig, *, named: bool, name: str | None
) -> tuple[str | None, "Host | None"]:
    """(the language model, the host of ordinary ones), of which either may be None.

    Args:
        model: MODEL of the command line, or its default.
        beside: [NAME=]SOURCE of further models.
        config: of the host.
        named: whether MODEL was given. A default steps back behind models that were.
        name: of MODEL.

    Raises:
        ValueError: two models of one name, no such folder, a wrong option.
    """
    ordinary = is_ordinary(model)
    models = ([f"{name}={model}" if name else model] if ordinary else []) + list(beside)
    if not models and config.repository is None:
        return model, None
    require("serving ordinary models", "fastapi", "uvicorn", "prometheus_client")
    from tilewright.host.config import ModelConfig
    from tilewright.host.host import Host, Source
    from tilewright.host.repository import Repository

    own = {name: getattr(config, name) for name in ("precision", "max_batch", "max_delay_ms")}
    sources = dict[str, Source]()
    for text in models:
        given, equals, source = text.partition("=")
        if not equals:
            given, source = _name_of(text), text
        if not is_ordinary(source):
            raise ValueError(f"the model {source!r} is neither MODULE:FUNCTION nor a folder that `tilewright export` wrote")
        if given in sources:
            raise ValueError(f"two models have the name {given!r}; give one of them another, as in other={source}")
        folder = Path(source).resolve() if Path(source).is_dir() else None
        sources[given] = Source(ModelConfig(source=None if folder else source, **own), folder)
    repository = None if config.repository is None else Repository(Path(config.repository), tuple(config.packages or ()))
    return (model if named and not ordinary else None), Host(repository, sources)


def _name_of(source: str) -> str:
    """The name of a model that has none: its folder's, or that of its module, without the package."""
    path = Path(source)
    return path.resolve().name if path.is_dir() else source.partition(":")[0].rpartition(".")[2]
