"""The only reader of the process environment.

Behaviour is chosen by arguments and scopes, never by variables; what stands here is where the machine, not the caller, speaks:
the Triton interpreter, the cache folder, and which commit a copy of the code is of.
"""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Launched",
    "cache_dir",
    "commit",
    "interpreting",
    "launched",
    "library_path",
    "ray_address",
    "variables_of_rank",
]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What torchrun, or a launcher like it, tells a process: its rank of how many, which process of its machine it is, where
    the ranks meet."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int


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


def launched() -> Launched | None:
    """This process's place among others, if a launcher gave it one: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

    Raises:
        ValueError: they are not all there, or no numbers.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return Launched(rank=rank, world=world, local_rank=local, address=os.environ["MASTER_ADDR"], port=port)
    except (KeyError, ValueError) as error:
        wanted = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        raise ValueError(f"the environment has RANK, and not all of {wanted} as torchrun sets them: {error}") from error


def variables_of_rank(place: Launched) -> dict[str, str]:
    """The environment of a process that is started as a rank of this machine: what torchrun sets, and its share of cores."""
    threads = str(max(1, (os.cpu_count() or 1) // place.world))
    return {
        "OMP_NUM_THREADS": threads, **os.environ, "RANK": str(place.rank), "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.world), "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


# Triton reads the variable when a kernel is decorated, so a later change could not be honoured.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
