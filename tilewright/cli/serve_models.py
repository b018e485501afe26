"""What `tilewright serve` makes of ordinary models: functions, exported folders and a repository become a `Host`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.extras import require

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
    models: Sequence[str], repository: Path | None, packages: Sequence[str], options: dict[str, Any], name: str | None
) -> "Host":
    """The host of [NAME=]SOURCE models and a repository. Raises ValueError: a name twice, no such folder, a wrong option."""
    require("serving ordinary models", "fastapi", "uvicorn", "prometheus_client")
    from tilewright.host.config import ModelConfig
    from tilewright.host.host import Host, Source
    from tilewright.host.repository import Repository

    sources = dict[str, Source]()
    for text in models:
        given, equals, source = text.partition("=")
        if not equals:
            given, source = name or _name_of(text), text
        if not is_ordinary(source):
            raise ValueError(f"the model {source!r} is neither MODULE:FUNCTION nor a folder that `tilewright export` wrote")
        if given in sources:
            raise ValueError(f"two models have the name {given!r}; give one of them another, as in other={source}")
        folder = Path(source).resolve() if Path(source).is_dir() else None
        sources[given] = Source(ModelConfig(source=None if folder else source, **options), folder)
    return Host(None if repository is None else Repository(repository, tuple(packages)), sources)


def _name_of(source: str) -> str:
    """The name of a model that has none: its folder's, or that of its module, without the package."""
    path = Path(source)
    return path.resolve().name if path.is_dir() else source.partition(":")[0].rpartition(".")[2]
