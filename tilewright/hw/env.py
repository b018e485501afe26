"""The only reader of the process environment.

Behaviour is chosen by arguments and scopes, never by variables. The exceptions are variables that describe the machine:
Triton's interpreter, the cache folder, the commit of a copy of the code, and the number of PyTorch's threads.
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
    "threads_chosen",
    "variables_of_rank",
]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The values that torchrun, or a similar launcher, gives a process: its rank and the number of ranks, its index on its
    machine, and the address at which the ranks meet."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int


def interpreting() -> bool:
    """True when Triton kernels run in Triton's Python interpreter, on CPU tensors (`TRITON_INTERPRET=1` at import)."""
    return _INTERPRETING


def cache_dir() -> Path:
    """Folder for data that can be rebuilt (measurements, compiled bundles): `$XDG_CACHE_HOME/tilewright`, not created here."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tilewright"


def commit() -> str | None:
    """The commit of a copy of the code that has no git history, for result files: `TILEWRIGHT_COMMIT`.

    Set it to the output of `git describe --always --dirty --abbrev=40 --exclude='*'` in the original repository.
    """
    return os.environ.get("TILEWRIGHT_COMMIT") or None


def library_path() -> list[str]:
    """Folders that the dynamic loader searches first: `LD_LIBRARY_PATH`."""
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def ray_address() -> str | None:
    """The Ray cluster of this machine, if there is one: `RAY_ADDRESS`, which Ray itself also reads."""
    return os.environ.get("RAY_ADDRESS") or None


def threads_chosen() -> bool:
    """Whether the user chose the number of PyTorch's threads: by OMP_NUM_THREADS or MKL_NUM_THREADS, which PyTorch reads."""
    return "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ


def launched() -> Launched | None:
    """This process's rank, if a launcher started it: from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: only some of them are set, or one is not a number.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return Launched(rank=rank, world=world, local_rank=local, address=os.environ["MASTER_ADDR"], port=port)
    except (KeyError, ValueError) as error:
        wanted = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        raise ValueError(f"the environment has RANK, but not all of {wanted} as torchrun sets them: {error}") from error


def variables_of_rank(place: Launched) -> dict[str, str]:
    """The environment for a process that starts as a rank on this machine: torchrun's variables, and its share of cores."""
    threads = str(max(1, (os.cpu_count() or 1) // place.world))
    return {
        "OMP_NUM_THREADS": threads, **os.environ, "RANK": str(place.rank), "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.world), "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


# Triton reads the variable when a kernel is decorated, so a later change would have no effect.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
