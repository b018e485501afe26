"""Creates a `Host` from the models named on the command line: functions, exported folders and a repository."""

from collections.abc import Sequence
from pathlib import Path

from tilewright.host.config import ONNX, HostConfig, ModelConfig
from tilewright.host.host import Host, Source
from tilewright.host.repository import Repository

__all__ = ["MANIFEST", "host_of_sources", "is_ordinary", "sources_of"]

MANIFEST = "program.json"
"""The file by which a folder written by `tilewright export` is recognised."""


def is_ordinary(model: str) -> bool:
    """Whether the name of a model is MODULE:FUNCTION, an exported folder or an ONNX file, and not a language model."""
    path = Path(model)
    if model.endswith(ONNX):
        return path.is_file()
    if path.is_dir():
        return (path / MANIFEST).is_file()
    module, colon, function = model.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def sources_of(models: Sequence[str], config: HostConfig) -> dict[str, Source]:
    """The models given as [NAME=]SOURCE, by name. Raises ValueError if two have the same name, or a source is invalid."""
    own = {name: getattr(config, name) for name in ("precision", "max_batch", "max_delay_ms")}
    sources = dict[str, Source]()
    for text in models:
        given, equals, source = text.partition("=")
        if not equals:
            given, source = _name_of(text), text
        if not is_ordinary(source):
            raise ValueError(
                f"the model {source!r} is neither MODULE:FUNCTION nor a folder that `tilewright export` wrote, nor FILE.onnx"
            )
        if given in sources:
            raise ValueError(f"two models have the name {given!r}; give one of them another name, as in other={source}")
        folder = Path(source).resolve() if Path(source).is_dir() else None
        if source.endswith(ONNX):
            source = str(Path(source).resolve())
        sources[given] = Source(ModelConfig(source=None if folder else source, **own), folder)
    return sources


def host_of_sources(models: Sequence[str], config: HostConfig) -> Host | None:
    """The host of these models and of the repository; None if there are neither. Raises ValueError, as `sources_of`."""
    if not models and config.repository is None:
        return None
    sources = sources_of(models, config)
    repository = None if config.repository is None else Repository(Path(config.repository), tuple(config.packages or ()))
    return Host(repository, sources)


def _name_of(source: str) -> str:
    """The name of a model for which none is given: that of its folder, file or module, without the package."""
    path = Path(source)
    if source.endswith(ONNX):
        return path.stem
    return path.resolve().name if path.is_dir() else source.partition(":")[0].rpartition(".")[2]
