"""The interface of an engine for `compare`: it is built from a module, runs, and reports its time.

An engine is named as on the command line, NAME or NAME:OPTION:

    eager[:DTYPE]          the module as it is given, under inference_mode
    graph[:DTYPE]          the same in a CUDA graph
    compile[:DTYPE]        torch.compile, mode max-autotune
    aoti[:DTYPE]           an ahead-of-time package of Inductor
    onnxruntime            ONNX Runtime, of the module exported to ONNX
    openvino[:DTYPE]       OpenVINO, likewise
    optimize[:PRECISION]   tilewright.fuse.optimize
    cmd:COMMAND            any program that speaks JSON lines: engines/command.py has the protocol

DTYPE is fp32, fp16 or bf16: weights and floating-point inputs are cast once, before anything is timed.

`Built.time(calls)` gives the seconds of that many forward passes, one after the other, each waited for: the latency of one
answer. On a GPU this is measured from a CUDA event on an idle device to another after the last kernel. If the next call were
issued meanwhile, a call would take the longer of its host time and its device time, and layers would not add up: 19 layers of a
small captured model take as long as one (H100: 41 and 38 us, the host's). If one of the two engines has no such events, and on
a CPU, both sides are timed by the wall clock. Inputs are where the engine wants them (on its device) and outputs stay there;
copies within a call are part of its time.

Every step has a time limit. Engines in this process are stopped when they return to Python; one that never does ends the
process after a grace period. A foreign engine that may crash should run as `cmd:`.
"""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tilewright.bench.compare.results import Counter

if TYPE_CHECKING:
    from tilewright.bench.compare.variants import Variant

__all__ = [
    "DTYPES",
    "ENGINES",
    "Built",
    "Counting",
    "Cutting",
    "Engine",
    "EngineError",
    "Launching",
    "Operation",
    "Queued",
    "Settings",
    "Stepwise",
    "cast",
    "engine_of",
    "flat_outputs",
    "is_stepwise",
    "limited",
    "need",
    "repeated",
]  # fmt: skip

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

ENGINES = {
    "eager": "tilewright.bench.compare.engines.torch_engines:Eager",
    "graph": "tilewright.bench.compare.engines.torch_engines:Graph",
    "compile": "tilewright.bench.compare.engines.torch_engines:Compile",
    "aoti": "tilewright.bench.compare.engines.aoti:Aoti",
    "onnxruntime": "tilewright.bench.compare.engines.onnx_runtime:OnnxRuntime",
    "openvino": "tilewright.bench.compare.engines.open_vino:OpenVino",
    "optimize": "tilewright.bench.compare.engines.optimize:Optimize",
    "cmd": "tilewright.bench.compare.engines.command:Command",
}
"""Name -> where its class is; its package is imported when it is asked for."""

_GRACE_S = 20.0


class EngineError(ValueError):
    """An engine is not available, crashed, hung, or gave a wrong answer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that are the same for all engines of a comparison."""

    device: torch.device
    threads: int
    """Threads of one call on a CPU."""
    build_limit_s: float = 600.0
    run_limit_s: float = 60.0
    """Time limit in seconds for one batch of calls, and for fetching outputs."""
    host_clock: bool = False
    """On a GPU, whether both sides are timed by the wall clock and wait for the device, because one engine has no events."""

    @property
    def clock(self) -> str:
        """The name of the clock that `timed` uses."""
        return "wall clock" if self.device.type != "cuda" else "wall clock, synchronised" if self.host_clock else "cuda events"


class Built(Protocol):
    """A module inside an engine, with its example inputs."""

    facts: dict[str, Any]
    """Facts about this build, such as its seconds and decisions, as JSON values."""

    def time(self, calls: int) -> float:
        """Seconds of `calls` forward passes."""
        ...

    def outputs(self) -> list[Tensor]:
        """The outputs for the example inputs, flattened, on the CPU; floating-point outputs are float64."""
        ...

    def close(self) -> None:
        """Free memory and end processes."""
        ...


class Engine(Protocol):
    """An engine as a black box. `Engine(option, settings)` starts it, and raises EngineError if it is not available here."""

    facts: dict[str, Any]
    """Facts about all its builds: versions, requested precision, threads, graph, copies, clock; JSON values."""

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Built:
        """Prepare `module` for calls with `inputs`; neither is changed. `name` is used in error messages and file names."""
        ...

    def close(self) -> None:
        """Free everything that remains after its builds are closed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A node of the program given to an engine; it is used to assign the engine's counters to our layers."""

    names: tuple[str, ...]
    """Names of the node and of the values that it produces."""
    scope: str
    """Path of the module from which it was exported."""
    op: str
    """The operator from which it was exported: "conv2d", "layer_norm"."""
    reads: tuple[int, ...]
    """Indices, in the program's list, of the operations whose values it reads."""


@runtime_checkable
class Counting(Protocol):
    """A build whose engine has a profiler.

    Counters are requested once, for the whole model, after all measurements, because profiling disturbs them.
    """

    operations: Sequence[Operation]
    """Operations of the given program, in topological order; empty if none has a name. Read this after `counters`."""
    # A build may also have `exact = True`: its counters are the device's own records of its kernels (kernel_records.py).

    def counters(self) -> list[Counter]:
        """The profiler's time of each operation in one run, as the median of several runs; `layers` stay empty.

        May take as long as building the model again. Raises EngineError with the reason if there are none.
        """
        ...


@runtime_checkable
class Cutting(Protocol):
    """An engine that can make a variant from parts of the model that it already has, faster than from a module.

    The result is the same as that of `build`. The whole model is always given to `build`, as its user has it.
    """

    def build_variant(self, variant: "Variant") -> Built:
        """The same as `build(variant.module, variant.inputs, variant.name)`."""
        ...


@runtime_checkable
class Stepwise(Protocol):
    """An engine that may run a module's operators one by one, unchanged."""

    stepwise: bool
    """Whether it does; then inputs and outputs of a program are not converted or copied."""


@runtime_checkable
class Queued(Protocol):
    """A build whose calls return when their last piece of work was started, while the device still works."""

    def device_time(self, calls: int, *, cold: bool) -> float:
        """Device seconds of `calls` calls, each of which begins when all of its work is queued.

        For a captured graph this is its replay, without copies in and out, which belong to the call and not to a layer.
        `cold`: each call begins with none of its data in the device's caches.
        """
        ...


@runtime_checkable
class Launching(Queued, Protocol):
    """A queued build whose host starts the work piece by piece."""

    def host_time(self, calls: int) -> float:
        """Seconds of `calls` calls until each returns. Waiting for the device before each call does not count."""
        ...


def is_stepwise(engine: Engine) -> bool:
    """Whether the engine is known to run a module's operators one by one; never known for a foreign program."""
    return isinstance(engine, Stepwise) and engine.stepwise


def engine_of(text: str, settings: Settings) -> Engine:
    """The engine named on a command line."""
    name, colon, option = text.partition(":")
    if name not in ENGINES:
        raise EngineError(
            f"there is no engine {name!r}; wanted one of {', '.join(ENGINES)} (cmd:COMMAND for any other program)"
        )
    if colon and not option:
        raise EngineError(
            f"engine {text!r} has nothing after the colon; leave the colon out, or see docs/compare.md for the options"
        )
    module, _, kind = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), kind)(option, settings)


def need(package: str, engine: str) -> Any:
    """Import an optional package. Raises EngineError if it is missing; the message says what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise EngineError(f"engine {engine} needs the package {package}: pip install 'tilewright[compare]' ({error})") from None


def dtype_of(option: str, engine: str) -> torch.dtype | None:
    """The dtype for DTYPE; None: that of the module."""
    if option and option not in DTYPES:
        raise EngineError(
            f"engine {engine}:{option} is not known; wanted {engine}, or {engine}: followed by one of {', '.join(DTYPES)}"
        )
    return DTYPES.get(option)


def cast(
    module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype | None, copy: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """`module` and `inputs` in `dtype`; integers are unchanged. The module is copied unless there is nothing to cast."""
    if dtype is None:
        return module, inputs
    return copy(module).to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def flat_outputs(answer: Any) -> list[Tensor]:
    """All tensors of an answer in the order of its structure, in the form of `Built.outputs`."""
    from torch.utils._pytree import tree_leaves

    tensors = [x.detach().cpu() for x in tree_leaves(answer) if isinstance(x, Tensor)]
    return [x.double() if x.is_floating_point() else x for x in tensors]


def repeated(call: Callable[[], Any]) -> int:
    """Make calls for a quarter of a second, 3 to 50 times, for a median of counters; return their number."""
    began, calls = time.perf_counter(), 0
    while calls < 3 or (calls < 50 and time.perf_counter() - began < 0.25):
        call()
        calls += 1
    return calls


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Raise EngineError if the block takes longer; end the process if the block does not return to Python after that.

    The signal works only in the main thread; in another thread only the second limit applies.
    """

    def late(number: int, frame: FrameType | None) -> None:
        raise EngineError(f"{what} took longer than {seconds:g} s; raise the limit, or leave this engine out")

    def end() -> None:
        sys.stderr.write(f"error: {what} hangs and did not return within {seconds + _GRACE_S:g} s\n")
        sys.stderr.flush()
        os._exit(1)

    main = threading.current_thread() is threading.main_thread()
    watchdog = threading.Timer(seconds + _GRACE_S, end)
    watchdog.daemon = True
    watchdog.start()
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, late) if main else None
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds) if main else (0.0, 0.0)
    try:
        yield
    finally:
        if main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if left:  # an outer block has a limit, too
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), every)
        watchdog.cancel()
