"""Optional dependencies: which extra of the package brings a library, and the sentence that says so where it is missing."""

from importlib.util import find_spec

__all__ = ["EXTRAS", "MissingExtra", "advice", "require"]


class MissingExtra(ImportError):
    """A library is not installed; the message names the extra that brings it."""


EXTRAS = {
    "fastapi": "serve",
    "huggingface_hub": "hub",
    "onnx": "compare",
    "onnxruntime": "compare",
    "onnxscript": "compare",
    "openvino": "compare",
    "prometheus_client": "serve",
    "tokenizers": "llm",
    "uvicorn": "serve",
    "vl_convert": "compare",
}
"""Name that is imported -> extra."""


def advice(what: str, library: str) -> str:
    """One sentence: `what` needs the library, and how to get it."""
    return f"{what} needs {library}, which is not installed: pip install 'tilewright[{EXTRAS[library]}]'"


def require(what: str, *libraries: str) -> None:
    """Check that libraries are installed, without importing them.

    Raises:
        MissingExtra: one of them is not; the message says what needs it, and what to install.
    """
    for library in libraries:
        if find_spec(library) is None:
            raise MissingExtra(advice(what, library))
