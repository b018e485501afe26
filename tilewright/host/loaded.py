"""A model in its process: its source, its signature, and calls of it.

| source                                   | what is run                                                              |
|------------------------------------------|--------------------------------------------------------------------------|
| MODULE:FUNCTION                          | the module of (module, example inputs), which the function returns       |
| the same, and a saved file               | the function's module with the saved weights, examples and options       |
| a folder that `tilewright export` wrote  | the program in it: data, no code (exported.py)                           |

Names of inputs are those of `forward`'s arguments; those of outputs are the keys of a dict, `output`, or `output_0` and so on.
Datatypes and shapes are those of the example. A test determines whether the first dimension counts independent rows: the
example is passed twice in one call, and its output must then occur twice.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewright.fuse import Optimized, load_optimized, optimize
from tilewright.fuse.structure import flatten
from tilewright.host.config import ONNX, ModelConfig
from tilewright.host.exported import Exported, load_exported
from tilewright.host.tensors import DATATYPES, Signature, TensorSpec
from tilewright.host.users import users_model
from tilewright.hw.device import cuda_count, default_device

__all__ = ["NAMES", "Loaded", "buckets_of", "load", "rows_of", "signature_of"]

NAMES = {getattr(torch, kind.torch): name for name, kind in DATATYPES.items()}
"""torch's dtype -> the protocol's name."""
SAVED = "model.safetensors"
"""The file that `Optimized.save` writes into a version's folder."""
ONNX_FILE = f"model{ONNX}"
"""An ONNX model in a version's folder, used if there is no model written by `tilewright export`."""


class Loaded(NamedTuple):
    """A model that can be called."""

    module: Callable[..., Any]
    signature: Signature
    device: torch.device
    buckets: tuple[int, ...]
    """Numbers of rows to which batches are padded, ascending; (): no padding."""

    def moved(self, inputs: list[Tensor]) -> list[Tensor]:
        """Inputs on the model's device. From locked memory they are copied asynchronously."""
        return [x.to(self.device, non_blocking=True) for x in inputs]

    def begin(self, inputs: list[Tensor]) -> list[Tensor]:
        """Call the model: outputs in the signature's order, where it makes them. A GPU may still have to compute them.

        They are valid until the next call begins.
        """
        with torch.no_grad():
            found = _named(self.module(*self.moved(inputs)))
        return [found[spec.name].detach() for spec in self.signature.outputs]

    def call(self, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs in the signature's order, on the host."""
        return [x.cpu() for x in self.begin(inputs)]

    def bring(self, outputs: list[Tensor], places: list[Tensor]) -> None:
        """Copy outputs into tensors on the host, which are complete after `wait`. Into locked memory a GPU copies by itself."""
        alone = self.copies_inputs  # a user's module may have outputs on several devices; `wait` waits for one of them
        for place, x in zip(places, outputs, strict=True):
            place.copy_(x, non_blocking=alone)

    def mark(self) -> torch.cuda.Event | None:
        """A timed event behind what the current thread has begun; None: there is no GPU, so that it is done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: torch.cuda.Event | None = None) -> None:
        """Wait until a GPU has done what the current thread has begun, or what it had begun at a mark."""
        if mark is not None:
            mark.synchronize()
        elif self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def replays(self, inputs: list[Tensor]) -> bool:
        """Whether `begin`, with such inputs after they were padded, only replays a CUDA graph.

        It then does not wait for the GPU, and runs no code of the user's.
        """
        given = self._given
        if not isinstance(given, Optimized | Exported):
            return False
        if not self.signature.batched:
            return given.replays([(x.shape, x.dtype) for x in inputs])
        return given.replays([((self.padded(len(x)), *x.shape[1:]), x.dtype) for x in inputs])

    @property
    def _given(self) -> Any:
        """The module, with its own names of outputs."""
        return self.module.module if isinstance(self.module, _Renamed) else self.module

    @property
    def optimised(self) -> bool:
        """Whether the first call with a new number of rows makes a graph, which takes seconds."""
        return isinstance(self._given, Optimized)

    @property
    def copies_inputs(self) -> bool:
        """Whether a call copies its inputs on a GPU before it may write to them."""
        return isinstance(self._given, Optimized | Exported)

    @property
    def most(self) -> int | None:
        """Most rows of a batch, if the model was exported for a limited number; else None."""
        return self.buckets[-1] if isinstance(self.module, Exported) and self.buckets else None

    def padded(self, rows: int) -> int:
        """The number of rows to which a batch of `rows` rows is padded."""
        return next((size for size in self.buckets if size >= rows), rows)


class _Renamed(NamedTuple):
    """A model whose outputs are renamed."""

    module: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(self, *args: Any) -> dict[str, Tensor]:
        found = list(_named(self.module(*args)).values())
        if len(found) != len(self.names):
            raise ValueError(f"output_names has {len(self.names)} names, but the model has {len(found)} outputs")
        return dict(zip(self.names, found, strict=True))


def _named(outputs: Any) -> dict[str, Tensor]:
    """Outputs by name."""
    if isinstance(outputs, Tensor):
        return {"output": outputs}
    if isinstance(outputs, Mapping) and all(isinstance(x, Tensor) for x in outputs.values()):
        return {str(name): x for name, x in outputs.items()}
    tensors, _ = flatten(outputs)
    return {f"output_{i}": x for i, x in enumerate(tensors)}


def buckets_of(config: ModelConfig, *, optimised: bool) -> tuple[int, ...]:
    """Numbers of rows to which batches are padded. Each is a separate shape, for which a graph may be captured."""
    if config.same_shape:
        return (config.max_batch,)
    if config.preferred or not optimised:
        return tuple(sorted({*config.preferred, config.max_batch})) if config.preferred else ()
    return tuple(sorted({*(1 << i for i in range(config.max_batch.bit_length())), config.max_batch} - {0}))


def load(config: ModelConfig, folder: Path | None, note: Callable[[str], None] = lambda stage: None) -> Loaded:
    """Load a model, without warming it up. `note` is called with each stage.

    Raises:
        ValueError: the model cannot be built or run; the message is for the model's owner.
    """
    device = default_device() if config.device is None else torch.device(config.device)
    if device.type == "cuda" and not cuda_count():
        raise ValueError(f"device is {config.device!r}, but there is no GPU here")
    if config.threads is not None and device.type == "cpu":
        torch.set_num_threads(config.threads)
    note("reading the model")
    module, examples, signature = _built(config, folder, device)
    if signature is None:
        note("running its example")
        signature = signature_of(module, examples, config)
    optimised = isinstance(module, Optimized) or config.precision is not None
    buckets = buckets_of(config, optimised=optimised) if signature.batched else ()
    if isinstance(module, Exported):
        buckets = module.rows
    elif config.precision is not None and not isinstance(module, Optimized):
        rows = tuple(rows_of(x, config.max_batch) for x in examples) if signature.batched else examples
        assert isinstance(module, nn.Module)
        note(f"optimising for batch {config.max_batch}, the largest" if signature.batched else "optimising")
        module = optimize(module, rows, config.precision, report=False, max_shapes=len(buckets) + 2)
    if config.output_names:
        module = _Renamed(module, config.output_names)
    return Loaded(module, signature, device, buckets)


def _built(
    config: ModelConfig, folder: Path | None, device: torch.device
) -> tuple[Callable[..., Any], tuple[Tensor, ...], Signature | None]:
    """(the model, example inputs, its signature if the source contains it)."""
    text = config.source
    if text is None:
        if folder is None:
            raise ValueError("the model has no source: neither MODULE:FUNCTION nor a folder")
        if (folder / ONNX_FILE).is_file():
            text = str(folder / ONNX_FILE)
    if text is None:
        assert folder is not None
        exported, signature = load_exported(folder, device)
        return exported, (), signature
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, examples = users_model(text)
    module, examples = module.eval().requires_grad_(False), tuple(x.to(device) for x in examples)
    if not isinstance(module, Optimized):
        module = module.to(device)
    saved = None if folder is None else folder / SAVED
    if saved is not None and saved.is_file():
        module = load_optimized(saved, module, report=False)
    return module, examples, None


def rows_of(x: Tensor, rows: int) -> Tensor:
    """The example repeated to so many rows."""
    return x.repeat(-(-rows // len(x)), *[1] * (x.dim() - 1))[:rows].contiguous()


# ---- the signature


def signature_of(module: Callable[..., Any], examples: tuple[Tensor, ...], config: ModelConfig) -> Signature:
    """The signature of a model, from a call with its examples. Raises ValueError if it does not fit the config."""
    plain = module.as_given if isinstance(module, Optimized) else module
    with torch.no_grad():
        outputs = _named(plain(*(x.clone() for x in examples)))  # the model may change its inputs
    if not outputs:
        raise ValueError("the model gives no tensor for its example inputs")
    batched = _is_batched(plain, examples, outputs) if config.batching is None else config.batching
    if config.batching is None and config.max_batch == 1:
        batched = False
    names = config.input_names or _argument_names(module, len(examples))
    if len(names) != len(examples):
        raise ValueError(f"input_names has {len(names)} names, but the example has {len(examples)} inputs")
    unknown = [name for name in (*config.inputs, *config.state) if name not in names]
    if unknown:
        raise ValueError(f"the config names an input {unknown[0]!r}; the model has {', '.join(names)}")
    out_names = config.output_names or tuple(outputs)
    inputs = (_spec(n, x, batched, config.inputs.get(n)) for n, x in zip(names, examples, strict=True))
    given = [
        TensorSpec(spec.name, spec.datatype, (*spec.shape[:1], *[-1] * (len(spec.shape) - 1)) if config.inputs else spec.shape)
        for spec in (_spec(n, x, batched, None) for n, x in zip(out_names, outputs.values(), strict=False))
    ]
    return Signature(tuple(inputs), tuple(given), batched)


def _spec(name: str, example: Tensor, batched: bool, shape: tuple[int, ...] | None) -> TensorSpec:
    if example.dtype not in NAMES:
        raise ValueError(f"{name!r} is {str(example.dtype).removeprefix('torch.')}, which the protocol does not support")
    own = (-1, *example.shape[1:]) if batched else tuple(example.shape)
    if shape is not None and (
        len(shape) != len(own) or any(s not in (-1, n) for s, n in zip(shape, example.shape, strict=True))
    ):
        raise ValueError(f"the shape {list(shape)} of input {name!r} does not fit the example's {list(example.shape)}")
    return TensorSpec(name, NAMES[example.dtype], own if shape is None else ((-1, *shape[1:]) if batched else shape))


def _argument_names(module: Any, count: int) -> tuple[str, ...]:
    """The names of `forward`'s first arguments; `input_0` and so on if they are unknown."""
    given = module.model if isinstance(module, Optimized) else module
    said: Any = getattr(given, "input_names", ())  # of an ONNX file
    if len(said) == count:
        return tuple(said)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(given.forward).parameters.values()
    except (TypeError, ValueError):
        parameters = []
    names = tuple(p.name for p in parameters if p.kind in kinds)[:count]
    return names if len(names) == count else tuple(f"input_{i}" for i in range(count))


def _is_batched(module: Callable[..., Any], examples: tuple[Tensor, ...], outputs: dict[str, Tensor]) -> bool:
    """Whether a call with the example twice gives its output twice."""
    rows = {x.shape[0] if x.dim() else None for x in (*examples, *outputs.values())}
    if len(rows) != 1 or None in rows or 0 in rows:
        return False
    try:
        with torch.no_grad():
            twice = _named(module(*(torch.cat([x, x]) for x in examples)))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    return all(
        name in twice
        and twice[name].shape == (2 * len(x), *x.shape[1:])
        and torch.allclose(twice[name].double(), torch.cat([x, x]).double(), rtol=1e-2, atol=1e-3, equal_nan=True)
        for name, x in outputs.items()
    )
