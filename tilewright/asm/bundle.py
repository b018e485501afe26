"""Bundles: the compiled kernels for one use (a model in an engine), made without a GPU and used when the engine starts.

    DIR/bundle.json             the use for which it was made, and a checksum of every file
    DIR/kernels/<key>/...       `<kernel>.cubin` and `<kernel>.json`, as in Triton's cache; <key> is Triton's

`write` compiles into a folder and describes it. `use` checks the description and the checksums, and makes Triton look for
kernels there before it looks into its own cache; nothing is copied, and the folder may be read-only. A kernel that is missing
in the bundle is compiled as usual: Triton's key covers source, constants, options and toolchain, so a bundle can be incomplete
but not wrong.

A bundle contains code for the GPU. Use only bundles that you made, or trust as you would trust a program. It contains no host
code: Triton before 3.7 builds a small C launcher for every kernel signature at its first launch on a machine, and keeps it in
its own cache.

Refused, with the reason: another format, tilewright, kernel source, triton, torch or ptxas; another card; other facts about the
use; files that are missing, changed or too large.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.cache import FileCacheManager

from tilewright import __version__
from tilewright.asm.facts import ptxas_version

__all__ = ["Bundle", "BundleRefused", "read", "toolchain", "use", "write"]

_SCHEMA = 1
_NAME = "bundle.json"
_LARGEST_DESCRIPTION = 16 << 20
_LARGEST_FILE = 64 << 20
_KEPT = (".cubin", ".json")
_KEY = re.compile(r"[A-Z2-7]{16,64}")
_FILE = re.compile(r"\w[\w.-]{0,199}")


class BundleRefused(ValueError):
    """The bundle is damaged or was made for something else; the message says what, got, wanted, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The contents of bundle.json."""

    toolchain: Mapping[str, str]
    use: Mapping[str, Any]
    """The facts for which it was made, which must be the same when it is used."""
    files: Mapping[str, str]
    """"<key>/<file>" -> SHA-256."""

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels, one for each variant."""
        return sorted(name.split("/")[1].removesuffix(".cubin") for name in self.files if name.endswith(".cubin"))


def toolchain(arch: int) -> dict[str, str]:
    """All facts, besides those of the use, that affect compiled kernels."""
    return {
        "arch": f"sm_{arch}",
        "kernel source": _source_hash(),
        "ptxas": ptxas_version(arch),
        "tilewright": __version__,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "triton": triton.__version__,
    }


def _source_hash() -> str:
    """A hash of all kernel files. Comments count, too, because Triton's keys cover line numbers."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1] / "kernels"
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def write(folder: Path, *, arch: int, use: Mapping[str, Any], compile: Callable[[], None]) -> Bundle:
    """Run `compile` with Triton's cache inside `folder`, then write a description of the folder.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder, or remove it first")
    kernels = folder / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    with _cache_in(kernels):
        compile()
    files = {}
    for path in sorted(kernels.rglob("*")):
        if path.is_file() and (path.suffix not in _KEPT or path.name.startswith("__grp__")):
            path.unlink()
        elif path.is_file():
            files[f"{path.parent.name}/{path.name}"] = _sha256(path)
    for place in kernels.iterdir():
        if not any(place.iterdir()):
            place.rmdir()
    bundle = Bundle(toolchain=toolchain(arch), use=use, files=files)
    (folder / _NAME).write_text(json.dumps({"schema": _SCHEMA, **asdict(bundle)}, indent=1) + "\n")
    return bundle


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    before = knobs.cache.dir
    knobs.cache.dir = str(folder)
    try:
        yield
    finally:
        knobs.cache.dir = before


def read(folder: Path) -> Bundle:
    """Read the description of a bundle. Raises BundleRefused if the folder is not a bundle."""
    path = folder / _NAME
    if not path.is_file():
        raise BundleRefused(f"{folder} is not a bundle: it has no {_NAME}; make one with `tilewright warmup`")
    if path.stat().st_size > _LARGEST_DESCRIPTION:
        raise BundleRefused(f"{path} has {path.stat().st_size} bytes, wanted at most {_LARGEST_DESCRIPTION}")
    try:
        found = json.loads(path.read_text())
        if found["schema"] != _SCHEMA:
            raise BundleRefused(f"{path} has format {found['schema']}, wanted {_SCHEMA}; make the bundle again")
        bundle = Bundle(toolchain=dict(found["toolchain"]), use=dict(found["use"]), files=dict(found["files"]))
        well_named = all(_well_named(name) and isinstance(digest, str) for name, digest in bundle.files.items())
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BundleRefused):
            raise
        raise BundleRefused(f"{path} does not describe a bundle ({error}); make it again with `tilewright warmup`") from error
    if not well_named:
        raise BundleRefused(f"{path} names files outside its folder, wanted <key>/<file>; do not use this bundle")
    return bundle


def _well_named(name: str) -> bool:
    key, _, file = name.partition("/")
    return bool(_KEY.fullmatch(key) and _FILE.fullmatch(file)) and file.endswith(_KEPT)


def use(folder: Path, *, arch: int, facts: Mapping[str, Any]) -> Bundle:
    """Check a bundle, and let Triton take its kernels from it in this process.

    Args:
        arch: architecture of the card that will run them.
        facts: the facts of the present use; they must equal those given to `write`.

    Raises:
        BundleRefused: see the top of this file.
    """
    folder = folder.resolve()
    bundle = read(folder)
    _compare(folder, bundle.toolchain, toolchain(arch))
    _compare(folder, bundle.use, facts)
    groups: dict[str, dict[str, str]] = {}
    for name, digest in bundle.files.items():
        path = folder / "kernels" / name
        if not path.is_file() or path.stat().st_size > _LARGEST_FILE or _sha256(path) != digest:
            raise BundleRefused(f"{path} is missing or changed; make the bundle again with `tilewright warmup`")
        groups.setdefault(path.parent.name, {})[path.name] = str(path)
    knobs.cache.manager_class = _manager(groups)
    return bundle


def _compare(folder: Path, made: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    other = [f"{key} {made.get(key)}, here {now.get(key)}" for key in sorted({*made, *now}) if made.get(key) != now.get(key)]
    if other:
        raise BundleRefused(f"{folder} was made for {'; '.join(other)}. Make one for this use with `tilewright warmup`")


def _manager(groups: Mapping[str, Mapping[str, str]]) -> type[FileCacheManager]:
    """A cache that takes kernels from the bundle if it has them, else from Triton's own folder."""

    class BundleCache(FileCacheManager):
        def get_group(self, filename: str) -> dict[str, str] | None:
            held = groups.get(self.key)
            return dict(held) if held and filename in held else super().get_group(filename)

    return BundleCache


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
