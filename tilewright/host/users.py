"""A user's own model: MODULE:FUNCTION, imported like any module of Python and called without arguments; or an ONNX file."""

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.extras import needed
from tilewright.host.config import ONNX

__all__ = ["users_model"]


def users_model(text: str, shapes: Mapping[str, Sequence[int]] | None = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What the function returns, or what the file holds: (module, example inputs).

    Args:
        text: MODULE:FUNCTION, or FILE.onnx.
        shapes: by name, shapes of an ONNX model's inputs with dimensions that the file leaves open.

    Raises:
        ValueError: the function cannot be imported, fails (the message has its line), or returns something else; or the file
            does not exist or is not supported.
        MissingExtra: it is an ONNX file, and the library that reads it is not installed.
    """
    if text.endswith(ONNX):
        return needed("tilewright.host.onnx.module", "onnx").onnx_model(Path(text), shapes)
    if shapes:
        raise ValueError(f"{text} has the shapes of its example inputs; shapes can be given only for ONNX files")
    path, _, function = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(path), function)()
    except Exception as error:  # the user's code may raise anything: the message names its line
        raise ValueError(f"the model {text} failed{_line_of(error)}: {type(error).__name__}: {error}") from error
    return _checked(text, found)


def _line_of(error: Exception) -> str:
    """ " in FILE:LINE" of the innermost frame outside this file and the import system."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" in {error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and "importlib" not in f.filename]
    users = [f for f in frames if "site-packages" not in f.filename] or frames
    return f" in {users[-1].filename}:{users[-1].lineno}" if users else ""


def _checked(text: str, found: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        got = type(found).__name__ if not isinstance(found, tuple) else f"({', '.join(type(x).__name__ for x in found)})"
        raise ValueError(f"the model {text} returned {got}, wanted (torch.nn.Module, example inputs)")
    module, inputs = found
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"the model {text} returned a TorchScript module, wanted one with Python code")
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(inputs, list | tuple) or not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise ValueError(f"the example inputs of the model {text} are {type(inputs).__name__}, wanted a tuple of tensors")
    return module, tuple(inputs)
