"""Optional dependencies: which extra of the package installs a library, and the error message if the library is missing."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

__all__ = ["EXTRAS", "MissingExtra", "advice", "needed", "require"]


class MissingExtra(ImportError):
    """A library is not installed; the message names the extra that installs it."""


EXTRAS = {
    "llm": ("tokenizers",),
    "hub": ("huggingface_hub",),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "zmq", "msgpack"),
    "structured": ("llguidance",),
    "grpc": ("grpc",),
    "images": ("PIL",),
    "onnx": ("onnx",),
    "compare": ("onnx", "onnxscript", "onnxruntime", "openvino", "vl_convert"),
    "data": (
        *("brotli", "lxml_html_clean", "phonenumbers", "py3langid", "pyarrow", "resiliparse", "sklearn", "spacy"),
        "trafilatura",
    ),
    "ray": ("ray", "aiohttp_cors"),
    "traces": ("opentelemetry",),
    "train": ("tensorboard",),
    "scaling": ("scipy", "vl_convert"),
    "rl": ("math_verify", "reasoning_gym"),
    "lab": ("vl_convert",),
    "load": ("aiohttp", "vl_convert"),
}
"""Extra -> the names under which its libraries are imported."""


def advice(what: str, library: str) -> str:
    """A sentence that says that `what` needs the library, and how to install it."""
    extra = next(extra for extra, libraries in EXTRAS.items() if library in libraries)
    return f"{what} needs {library}, which is not installed: pip install 'tilewright[{extra}]'"


def require(what: str, *libraries: str) -> None:
    """Check that libraries are installed, without importing them.

    Raises:
        MissingExtra: one of them is not; the message says what needs it, and what to install.
    """
    for library in libraries:
        if find_spec(library) is None:
            raise MissingExtra(advice(what, library))


def needed(module: str, extra: str) -> ModuleType:
    """Import a module of an optional library.

    Raises:
        MissingExtra: it, or a library that it imports, is not installed; the message says what to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = (error.name or module).partition(".")[0]
        raise MissingExtra(f"{library} is not installed: pip install 'tilewright[{extra}]'") from None
