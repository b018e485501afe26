"""Adapters by name, without tensors: what requests ask for, and what a command line says."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.engine.request import shown

if TYPE_CHECKING:
    from tilewright.engine.adapters import Adapters  # imports torch

__all__ = ["MAX_NAME", "Held", "UnknownAdapter", "check_name", "named_folders", "place_of"]

MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*")


class UnknownAdapter(ValueError):
    """A request asks for an adapter that the engine does not hold."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """An adapter in its place."""

    name: str
    folder: str
    number: int
    """From 1 on: what the layers are told."""
    salt: bytes
    """Of the digests of pages: no two adapters, nor two loads of one, share keys and values."""


def named_folders(given: Iterable[str]) -> dict[str, Path]:
    """Name -> folder of "NAME=FOLDER" texts. Raises ValueError for one that is none, or a name that is there twice."""
    found: dict[str, Path] = {}
    for one in given:
        name, sign, folder = one.partition("=")
        if not sign or not folder:
            raise ValueError(f"adapter {one[:200]!r} is no NAME=FOLDER, such as sql=./sql-adapter")
        check_name(name)
        if name in found:
            raise ValueError(f"the adapter's name {name!r} is given twice, wanted one folder for each name")
        found[name] = Path(folder)
    return found


def check_name(name: str) -> None:
    """Raise ValueError for a name that no adapter may have."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"the adapter's name is {name[:200]!r}, wanted at most {MAX_NAME} letters, digits and . _ / : -")


def place_of(adapters: "Adapters | None", name: str | None) -> tuple[int, bytes]:
    """(number, salt) of the adapter of a request; 0 and nothing where it names none. Raises UnknownAdapter."""
    if name is None:
        return 0, b""
    if adapters is None or not isinstance(name, str):
        raise UnknownAdapter(f"there is no adapter {shown(name)} here: the engine has room for none, or it is no name")
    held = adapters.get(name)
    return held.number, held.salt
