"""Optional libraries, imported where they are used."""

import importlib
from types import ModuleType

__all__ = ["needed"]


def needed(module: str, extra: str) -> ModuleType:
    """The module; raises ValueError with the command that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = (error.name or module).partition(".")[0]
        raise ValueError(f"{library} is not installed: pip install 'tilewright[{extra}]'") from None
