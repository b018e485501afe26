"""tilewright: GPU operators you can prove, and the engine that serves language models on them."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> its module; loaded at first use, so that `import tilewright` costs milliseconds.
_PUBLIC = {
    "LLM": "tilewright.engine.llm:LLM",
    "SamplingParams": "tilewright.engine.request:SamplingParams",
    "TrainConfig": "tilewright.train.config:TrainConfig",
    "formats": "tilewright.formats",
    "invariant": "tilewright.op:invariant",
    "load_optimized": "tilewright.fuse:load_optimized",
    "nn": "tilewright.nn",
    "ops": "tilewright.ops",
    "optimize": "tilewright.fuse:optimize",
    "prefer": "tilewright.op:prefer",
    "quantize": "tilewright.quant:quantize",
    "save_quantized": "tilewright.models:save_quantized",
    "train_model": "tilewright.train.main:train",
}

__all__ = [
    "LLM",
    "SamplingParams",
    "TrainConfig",
    "__version__",
    "formats",
    "invariant",
    "load_optimized",
    "nn",
    "ops",
    "optimize",
    "prefer",
    "quantize",
    "save_quantized",
    "train_model",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _PUBLIC[name].partition(":")
    value = import_module(module)
    return getattr(value, attribute) if attribute else value


def __dir__() -> list[str]:
    return __all__
