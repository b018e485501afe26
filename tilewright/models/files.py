"""Reads the small files of a model folder, with a limit on their size; refuses pipes and devices, which could be endless."""

import json
import stat
from pathlib import Path
from typing import Any

from tilewright.models.errors import ModelError

__all__ = ["MAX_TEXT_BYTES", "check_plain_file", "read_json", "read_text"]

MAX_TEXT_BYTES = 256 << 20
"""Largest JSON or text file; the largest tokenizer.json in use have some 35 MB."""


def check_plain_file(path: Path) -> int:
    """The size of an ordinary file, symbolic links followed, in bytes.

    Raises:
        FileNotFoundError: there is nothing at that path.
        ModelError: it is a folder, a pipe, a device or a socket, or may not be looked at.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); wanted an ordinary file") from error
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path} is not an ordinary file but {_kind(found.st_mode)}; download the model again")
    return found.st_size


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((words for is_kind, words in kinds if is_kind(mode)), "a device")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        FileNotFoundError: it is missing.
        ModelError: it is not an ordinary file, too large, or not UTF-8.
    """
    size = check_plain_file(path)
    if size > MAX_TEXT_BYTES:
        raise ModelError(f"{path} has {size:,} bytes, but at most {MAX_TEXT_BYTES:,} are allowed; download the model again")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); download it again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError when the file is missing or broken."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; a model folder has config.json and *.safetensors") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); download it again") from error
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply; download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object, got {type(value).__name__}")
    return value
