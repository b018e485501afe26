"""Finds the NCCL library that this process has loaded, and all others that the system could load instead. Two different
versions are a common cause of hanging or slow jobs.

The version is read from text inside the library ("NCCL version 2.28.9+cuda13.0"), so no foreign code runs.
"""

import mmap
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import torch

from tilewright.hw import env

__all__ = ["Nccl", "configured_folders", "installed", "version_of_torch"]

# Where the dynamic loader looks by default, and where NCCL is installed by hand.
_SYSTEM = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_SYSTEM += ("/usr/local/lib", "/usr/local/cuda/lib64", "/usr/local/nccl/lib", "/opt/nccl/lib")
_LOADER_CONFIG = Path("/etc/ld.so.conf")
_VERSION = re.compile(rb"NCCL version (\d+\.\d+(?:\.\d+)?)")


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """One NCCL library file (libnccl)."""

    path: str
    version: str
    """"2.28.9", or "unknown" if the file does not contain it (a stub, a broken file)."""
    loaded: bool
    """Whether this process has loaded it."""


def installed() -> list[Nccl]:
    """Every libnccl that is loaded or found in the usual folders; the loaded one first."""
    loaded = set(_loaded())
    paths = loaded | {p.resolve() for folder in _folders() for p in folder.glob("libnccl*.so*") if p.is_file()}
    paths = {p for p in paths if p.name.startswith("libnccl.so")}  # not its plug-ins, libnccl-net.so ...
    found = [Nccl(path=str(p), version=_version(p), loaded=p in loaded) for p in paths]
    return sorted(found, key=lambda n: (not n.loaded, n.path))


def version_of_torch() -> str | None:
    """The NCCL that torch calls, which distributed jobs will use; None for a torch without CUDA."""
    if not torch.cuda.is_available():
        return None
    from torch.cuda import nccl  # only CUDA builds have it

    return ".".join(map(str, nccl.version()))


def _loaded() -> Iterator[Path]:
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.is_file() else ():
        path = line.split(maxsplit=5)[-1]
        if "/libnccl" in path and Path(path).is_file():
            yield Path(path).resolve()


def _folders() -> Iterator[Path]:
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")} | {p for p in sys.path if p}
    yield from (folder for package in packages for folder in Path(package).glob("nvidia/*/lib"))
    yield Path(sys.prefix, "lib")  # conda
    yield from (Path(folder) for folder in (*env.library_path(), *_SYSTEM))
    yield from configured_folders(_LOADER_CONFIG)


def configured_folders(config: Path) -> Iterator[Path]:
    """The folders in a configuration file of the dynamic loader (ld.so.conf), and those in the files that it includes."""
    if not config.is_file():
        return
    for line in config.read_text(errors="replace").splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"]:
            for pattern in words[1:]:
                for included in sorted(glob(str(config.parent / pattern))):
                    yield from configured_folders(Path(included))
        else:
            yield from map(Path, words)


def _version(path: Path) -> str:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _VERSION.search(content)
            return found[1].decode() if found else "unknown"
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return "unknown"
