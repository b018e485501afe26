"""The provenance of a measured figure, so that it can be checked and repeated: code, machine, versions, command, kernels.

`environment` describes a result file as a whole, `ran_by` one row of it. `changed` compares a row with the present code.
"""

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewright import __version__
from tilewright.hw import env
from tilewright.hw.device import device_of
from tilewright.ops import ALL
from tilewright.tune.record import versions
from tilewright.tune.source import source_hash

__all__ = [
    "SAME",
    "Commit",
    "Hashes",
    "changed",
    "chosen_kernels",
    "commit",
    "environment",
    "forget",
    "package_hash",
    "ran_by",
    "shared_by",
]

SAME = ("commit", "dirty", "source", "device", "driver", "torch", "triton", "ptxas")
"""Facts that result files must have in common to belong to one set: the code, the card, the versions."""


def shared_by(name: str) -> tuple[str, ...]:
    """The facts that the parts of one result file must have in common.

    The ptxas is not compared for whole models, because Inductor loads its own one into their process.
    """
    return tuple(fact for fact in SAME if fact != "ptxas") if name.startswith("compare-") else SAME


_PACKAGE = Path(__file__).resolve().parent.parent
_COMMIT = re.compile(r"([0-9a-f]{7,40})(-dirty)?")

Hashes = dict[str, str]
"""Kernels as "op/implementation" -> 16 hex digits over the text of that implementation's modules."""


class Commit(NamedTuple):
    """Which version of the code this is."""

    name: str | None
    """The commit's hash; None if there is no git repository and TILEWRIGHT_COMMIT is not set."""
    dirty: bool | None
    """Whether tracked files differ from the commit; None if that is unknown."""


def commit() -> Commit:
    """The commit that is checked out in this package's folder; in a copy without .git, the one named by `hw.env.commit`.

    Raises:
        ValueError: `hw.env.commit` is not a commit, or not the one that is checked out.
    """
    here, told = _checked_out(), env.commit()
    if told is None:
        return here
    match = _COMMIT.fullmatch(told)
    if match is None:
        raise ValueError(f"TILEWRIGHT_COMMIT is {told!r}, wanted 7 to 40 hex digits, followed by -dirty if files were changed")
    if here.name is not None and not here.name.startswith(match[1]):
        raise ValueError(f"TILEWRIGHT_COMMIT is {told}, but {here.name} is checked out here; unset it")
    return here if here.name is not None else Commit(match[1], match[2] is not None)


@cache
def _checked_out() -> Commit:
    root = _PACKAGE.parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie inside another repository: only a repository that tracks these files counts.
    if git("ls-files", "--error-unmatch", "tilewright/__init__.py") is None:
        return Commit(None, None)
    changes = git("status", "--porcelain", "--untracked-files=no")
    return Commit(git("rev-parse", "HEAD"), None if changes is None else bool(changes))


@cache
def package_hash() -> str:
    """16 hex digits over the names and texts of all Python files of the package, which identify the code without git."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def environment(*, card: bool = True) -> dict[str, Any]:
    """Code, card, versions, date and command, as a result file must name them.

    Args:
        card: include the first GPU and its driver. This opens the GPU, which takes some of its memory.

    Raises:
        ValueError: as `commit` does.
    """
    code = commit()
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": code.name,
        "dirty": code.dirty,
        "source": package_hash(),
        "tilewright": __version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        **{name: versions()[name] for name in ("triton", "ptxas")},
    }
    if card and torch.cuda.is_available():
        facts |= {"device": device_of(0).name, "cuda": torch.version.cuda, "driver": versions()["driver"]}
    return facts


def _command() -> str:
    """The command that was typed, quoted for a shell: the command line tool, or a script of the repository."""
    program = Path(sys.argv[0])
    typed = ["python", f"scripts/{program.name}"] if program.parent.name == "scripts" else ["tilewright"]
    return shlex.join([*typed, *sys.argv[1:]])


# ---- kernels


def forget() -> None:
    """Forget the choices of all ops, so that `chosen_kernels` lists only later calls."""
    for op in ALL:
        op.forget()


def chosen_kernels() -> Hashes:
    """The implementations that ran since `forget`, and the hashes of their sources."""
    found = {f"{op.name}/{impl.name}": impl for op in ALL for impl in op.chosen_impls() if impl in op.impls}
    return {name: source_hash(impl.launch.__module__) for name, impl in sorted(found.items())}


def ran_by(call: Callable[[], Any]) -> Hashes:
    """Make a call once, and return the kernels that it launches."""
    forget()
    call()
    return chosen_kernels()


def changed(ran: Mapping[str, str]) -> list[str]:
    """The kernels of a row whose sources have changed, or that no longer exist."""
    return [name for name, was in ran.items() if _now().get(name) != was]


@cache
def _now() -> Hashes:
    return {f"{op.name}/{impl.name}": source_hash(impl.launch.__module__) for op in ALL for impl in op.impls}
