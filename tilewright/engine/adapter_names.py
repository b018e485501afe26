"""Names of adapters in requests and on the command line. No tensors."""

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
    """A request names an adapter that is not loaded."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A loaded adapter."""

    name: str
    folder: str
    number: int
    """The adapter's number for the layers, from 1 on."""
    salt: bytes
    """Start value of the digests of pages, so that two adapters, or two loads of one, never share keys and values."""


def named_folders(given: Iterable[str]) -> dict[str, Path]:
    """Parses "NAME=FOLDER" texts: name -> folder. Raises ValueError for any other text, or a name that occurs twice."""
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
    """Raise ValueError if this is not a valid name for an adapter."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"the adapter's name is {name[:200]!r}, wanted at most {MAX_NAME} letters, digits and . _ / : -")


def place_of(adapters: "Adapters | None", name: str | None) -> tuple[int, bytes]:
    """(number, salt) of the adapter that a request names; (0, b"") for None. Raises UnknownAdapter."""
    if name is None:
        return 0, b""
    if adapters is None or not isinstance(name, str):
        why = "the engine has no room for adapters, or this is not a valid name"
        raise UnknownAdapter(f"there is no adapter {shown(name)} here: {why}")
    held = adapters.get(name)
    return held.number, held.salt
