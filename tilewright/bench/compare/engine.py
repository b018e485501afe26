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
    """An engine that cannot be had, crashed, hung, or answered something else than it should."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every engine of a comparison is told alike."""

    device: torch.device
    threads: int
    """Of one call on a CPU."""
    build_limit_s: float = 600.0
    run_limit_s: float = 60.0
    """Of one batch of calls, and of fetching outputs."""
    host_clock: bool = False
    """On a GPU: the wall clock around waiting for the device, on both sides, since one engine has no events to offer."""

    @property
    def clock(self) -> str:
        """What `timed` reads."""
        return "wall clock" if self.device.type != "cuda" else "wall clock, synchronised" if self.host_clock else "cuda events"


class Built(Protocol):
    """A module inside an engine, with its example inputs."""

    facts: dict[str, Any]
    """What is particular to this build: seconds, what was decided; JSON."""

    def time(self, calls: int) -> float:
        """Seconds of `calls` forward passes."""
        ...

    def outputs(self) -> list[Tensor]:
        """Of the example inputs, flattened, on the CPU; floating-point ones in float64."""
        ...

    def close(self) -> None:
        """Give back memory and processes."""
        ...


class Engine(Protocol):
    """A black box. `Engine(option, settings)` starts it and raises EngineError when it cannot be had here."""

    facts: dict[str, Any]
    """What holds for all its builds: versions, precision asked for, threads, graph, copies, clock; JSON."""

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Built:
        """Make `module` ready for calls with `inputs`; neither is changed. `name` is for error messages and files."""
        ...

    def close(self) -> None:
        """Give back what outlives its builds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A node of the program that an engine was given, by which the engine's counters are found again among our layers."""

    names: tuple[str, ...]
    """The node's and those of the values that it makes."""
    scope: str
    """Path of the module that it was exported from."""
    op: str
    """What it was exported from: "conv2d", "layer_norm"."""
    reads: tuple[int, ...]
    """Places, in the program's list, of the operations whose values it reads."""


@runtime_checkable
class Counting(Protocol):
    """A build whose engine has a profiler. Asked once, of the whole model, when everything is measured: profiling disturbs."""

    operations: Sequence[Operation]
    """Of the program as it was given, each behind what it reads; empty where none has a name. Read after `counters`."""
    # A build may also have `exact = True`: its counters are the device's own records of its kernels (kernel_records.py).

    def counters(self) -> list[Counter]:
        """What its profiler says of each of its operations in one run, the median of several. `layers` are not its business.

        May take as long as building the model once more. EngineError: why it does not tell.
        """
        ...


@runtime_checkable
class Cutting(Protocol):
    """An engine that can make a variant from a part of what it knows of the model, sooner than from a module.

    What it builds is what `build` would build. The whole model is always given to `build`, as its user has it.
    """

    def build_variant(self, variant: "Variant") -> Built:
        """The same as `build(variant.module, variant.inputs, variant.name)`."""
        ...


@runtime_checkable
class Stepwise(Protocol):
    """An engine that may run a module's operators one by one, as they stand."""

    stepwise: bool
    """Whether it does: nothing is then done to what goes into a program and comes out of it."""


@runtime_checkable
class Queued(Protocol):
    """A build whose calls are back when their last piece of work was started, while a device goes on."""

    def device_time(self, calls: int, *, cold: bool) -> float:
        """Seconds that `calls` calls take the device, when all of a call's work is there before it begins.

        Of a captured graph that is its replay, without copies in and out, which are a call's and not a layer's.
        `cold`: and when nothing of what a call reads is in the device's caches.
        """
        ...


@runtime_checkable
class Launching(Queued, Protocol):
    """One whose host starts that work piece by piece."""

    def host_time(self, calls: int) -> float:
        """Seconds of `calls` calls until each is back; the device is waited for before each, which does not count."""
        ...


def is_stepwise(engine: Engine) -> bool:
    """Whether it is known to run a module's operators one by one; of a foreign program it never is."""
    return isinstance(engine, Stepwise) and engine.stepwise


def engine_of(text: str, settings: Settings) -> Engine:
    """The engine that a command line names."""
    name, colon, option = text.partition(":")
    if name not in ENGINES:
        raise EngineError(f"no engine {name!r}; wanted one of {', '.join(ENGINES)} (cmd:COMMAND for any other program)")
    if colon and not option:
        raise EngineError(
            f"engine {text!r} has nothing behind the colon; leave it out, or see docs/compare.md for what it takes"
        )
    module, _, kind = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), kind)(option, settings)


def need(package: str, engine: str) -> Any:
    """Import a package that is not among tilewright's own; EngineError says what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise EngineError(f"engine {engine} needs the package {package}: pip install 'tilewright[compare]' ({error})") from None


def dtype_of(option: str, engine: str) -> torch.dtype | None:
    """What DTYPE asks for; None: as the module is."""
    if option and option not in DTYPES:
        raise EngineError(f"engine {engine}:{option} is not known; wanted {engine} or {engine}: and one of {', '.join(DTYPES)}")
    return DTYPES.get(option)


def cast(
    module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype | None, copy: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """`module` and `inputs` in `dtype`, integers as they are; a copy of the module, unless there is nothing to cast."""
    if dtype is None:
        return module, inputs
    return copy(module).to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def flat_outputs(answer: Any) -> list[Tensor]:
    """Every tensor of an answer in the order of its structure, as `Built.outputs` has them."""
    from torch.utils._pytree import tree_leaves

    tensors = [x.detach().cpu() for x in tree_leaves(answer) if isinstance(x, Tensor)]
    return [x.double() if x.is_floating_point() else x for x in tensors]


def repeated(call: Callable[[], Any]) -> int:
    """Calls it for a quarter of a second, 3 to 50 times, and returns how often: as many runs as a median of counters needs."""
    began, calls = time.perf_counter(), 0
    while calls < 3 or (calls < 50 and time.perf_counter() - began < 0.25):
        call()
        calls += 1
    return calls


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """EngineError when the block takes longer; the process ends when the block does not come back to Python after that.

    The signal needs the main thread; in another one only the second limit holds.
    """

    def late(number: int, frame: FrameType | None) -> None:
        raise EngineError(f"{what} took longer than {seconds:g} s; raise the limit, or leave this engine out")

    def end() -> None:
        sys.stderr.write(f"error: {what} hangs: it did not come back within {seconds + _GRACE_S:g} s\n")
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
            if left:  # somebody around this block has a limit too
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), every)
        watchdog.cancel()
