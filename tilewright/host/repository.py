"""A model repository: a folder of models, each with numbered versions.

    models/
      tabular/
        model.toml          only if the defaults do not fit
        1/                  written by `tilewright export`
        2/
      ranker/
        1/ ...

A model without numbered folders, but with a source or a pipeline in its TOML, has version 1. Names of files in client requests
are checked against `NAME` before they are used in paths; links that lead out of the repository are not followed.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tilewright.host.config import NAME, ModelConfig, read_config

__all__ = ["CONFIG", "Found", "Repository"]

CONFIG = "model.toml"
MAX_MODELS = 4096


class Found(NamedTuple):
    """A model in the repository."""

    config: ModelConfig
    versions: dict[int, Path | None]
    """Version number -> its folder; None if the source is not a folder."""
    marks: dict[int, str]
    """Version number -> a text that changes if its files or the config change."""


class Repository:
    """The folder, which is read again at each call."""

    def __init__(self, folder: Path, packages: tuple[str, ...] = ()):
        self.folder, self._packages = folder, packages
        if not folder.is_dir():
            raise ValueError(f"the model repository {folder} is not a folder")

    def names(self) -> Iterator[str]:
        """Names of all models, whether or not they can be loaded. Raises ValueError if there are too many."""
        found = sorted(path.name for path in self.folder.iterdir() if NAME.fullmatch(path.name) and self._inside(path))
        if len(found) > MAX_MODELS:
            raise ValueError(f"the model repository has {len(found)} folders, wanted at most {MAX_MODELS}")
        yield from found

    def __contains__(self, name: str) -> bool:
        return bool(NAME.fullmatch(name)) and self._inside(self.folder / name)

    def _inside(self, path: Path) -> bool:
        return path.is_dir() and path.resolve().is_relative_to(self.folder.resolve())

    def find(self, name: str) -> Found:
        """Find a model. Raises ValueError if it does not exist, or if its TOML is wrong."""
        if name not in self:
            raise ValueError(f"the model repository has no model {name[:80]!r}")
        folder = self.folder / name
        config = read_config(folder / CONFIG)
        self._check_source(name, config)
        numbered = {
            int(path.name): path
            for path in folder.iterdir()
            if path.name.isdecimal() and path.name.isascii() and len(path.name) <= 9 and int(path.name) and self._inside(path)
        }
        versions: dict[int, Path | None] = dict(numbered)
        if not versions:
            if config.source is None and not config.steps:
                raise ValueError(f"model {name} has no version; wanted a folder {folder / '1'}")
            versions = {1: None}
        said = repr(config)
        return Found(config, versions, {number: _mark(said, path) for number, path in versions.items()})

    def _check_source(self, name: str, config: ModelConfig) -> None:
        """Raise ValueError if a TOML names a function of a package that the operator does not allow."""
        if config.source is None:
            return
        package = config.source.partition(":")[0].partition(".")[0]
        if ":" not in config.source or package not in self._packages:
            raise ValueError(
                f"model {name} names the function {config.source!r}; allow its package with --package {package or 'NAME'} "
                "if you trust it: it would be imported"
            )


def _mark(said: str, folder: Path | None) -> str:
    """A text that changes if a file of the folder or `said` changes."""
    digest = hashlib.sha256(said.encode())
    for path in sorted(folder.rglob("*")) if folder is not None else ():
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\n".encode())
    return digest.hexdigest()
