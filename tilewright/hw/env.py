"""The only reader of the process environment.

Behaviour is chosen by arguments and scopes, never by variables; what stands here is where the machine, not the caller, speaks:
the Triton interpreter, the cache folder, and which commit a copy of the code is of.
"""

import os
from pathlib import Path

__all__ = ["cache_dir", "commit", "interpreting", "library_path", "ray_address"]


def interpreting() -> bool:
    """True when Triton kernels run in Triton's Python interpreter, on CPU tensors (`TRITON_INTERPRET=1` at import)."""
    return _INTERPRETING


def cache_dir() -> Path:
    """Folder for what may be rebuilt (measurements, compiled bundles): `$XDG_CACHE_HOME/tilewright`, not created here."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tilewright"


def commit() -> str | None:
    """The commit that a copy of the code without its git history is of, for result files: `TILEWRIGHT_COMMIT`.

    Its value is what `git describe --always --dirty --abbrev=40 --exclude='*'` says where the history is.
    """
    return os.environ.get("TILEWRIGHT_COMMIT") or None


def library_path() -> list[str]:
    """Folders in which the dynamic loader looks first: `LD_LIBRARY_PATH`."""
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def ray_address() -> str | None:
    """The Ray cluster of this machine, if there is one: `RAY_ADDRESS`, as Ray itself reads it."""
    return os.environ.get("RAY_ADDRESS") or None


# Triton reads the variable when a kernel is decorated, so a later change could not be honoured.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
