"""PyTorch as it is used: eager, in a CUDA graph, compiled with max-autotune.

    eager      the module under inference_mode, called in a loop
    graph      the same captured once and replayed; needs a GPU. Inputs and outputs stay in their buffers: nothing is copied
    compile    torch.compile(mode="max-autotune") with frozen weights, which captures a CUDA graph and copies inputs into it

PyTorch's settings are not changed: on a GPU, float32 convolutions use tf32, which is PyTorch's default.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import __version__
from tilewright.bench.compare.clocks import Behind, launched, timed
from tilewright.bench.compare.engine import DTYPES, EngineError, Operation, Settings, cast, dtype_of, flat_outputs
from tilewright.bench.compare.engines.kernel_records import counters_of
from tilewright.bench.compare.engines.torch_counters import module_ranges, profiled
from tilewright.bench.compare.results import Counter
from tilewright.hw.device import device_of
from tilewright.hw.tf32 import allows_tf32

__all__ = ["Ahead", "Called", "Compile", "Eager", "Graph", "described", "device_name", "precision_name", "shapes_of"]


class Called:
    """A build that is a Python call."""

    def __init__(
        self, call: Callable[[], Any], settings: Settings, facts: dict[str, Any], renew: Callable[[], None] = lambda: None
    ):  # fmt: skip
        self._call: Callable[[], Any] | None = call
        self._settings, self._renew = settings, renew
        self.facts = facts

    def time(self, calls: int) -> float:
        assert self._call is not None, "not after close"
        self._renew()
        with torch.inference_mode():
            return timed(self._call, calls, self._settings)

    def outputs(self) -> list[Tensor]:
        assert self._call is not None, "not after close"
        self._renew()
        with torch.inference_mode():
            return flat_outputs(self._call())

    def close(self) -> None:
        self._call = None


class Ahead(Called):
    """One whose host can be ahead of its GPU. `alone`: what the device is timed by, where that is not a whole call."""

    def __init__(
        self, call: Callable[[], Any], settings: Settings, facts: dict[str, Any], renew: Callable[[], None] = lambda: None,
        *, alone: Callable[[], Any] | None = None,
    ):  # fmt: skip
        super().__init__(call, settings, facts, renew)
        self._alone, self._behind = alone, None

    def device_time(self, calls: int, *, cold: bool) -> float:
        assert self._call is not None, "not after close"
        self._renew()
        with torch.inference_mode():
            if self._behind is None:
                self._behind = Behind(self._alone or self._call, self._settings)
            return self._behind.time(calls, cold=cold)

    def close(self) -> None:
        super().close()
        self._alone = self._behind = None


class _Kernels(Called):
    """One on a GPU whose kernels are known by the modules that launch them; captured or not."""

    exact = True

    def __init__(
        self, call: Callable[[], Any], module: nn.Module, inputs: tuple[Tensor, ...], settings: Settings, facts: dict[str, Any],
        renew: Callable[[], None],
    ):  # fmt: skip
        super().__init__(call, settings, facts, renew)
        self._module: nn.Module | None = module
        self._inputs = inputs
        self.operations: list[Operation] = []

    def counters(self) -> list[Counter]:
        assert self._call is not None, "not after close"
        assert self._module is not None, "not after close"
        module, inputs = self._module, self._inputs
        with torch.inference_mode():
            found, self.operations = counters_of(self._call, lambda: module(*inputs), lambda: module_ranges(module))
        return found

    def close(self) -> None:
        super().close()
        self._module = None


class _Launched(_Kernels, Ahead):
    """One whose work a host starts, operator by operator."""

    def host_time(self, calls: int) -> float:
        assert self._call is not None, "not after close"
        self._renew()
        with torch.inference_mode():
            return launched(self._call, calls, self._settings)


class _Profiled(Called):
    """One whose operators are those of a module as it is."""

    def __init__(
        self, call: Callable[[], Any], module: nn.Module, settings: Settings, facts: dict[str, Any], renew: Callable[[], None]
    ):  # fmt: skip
        super().__init__(call, settings, facts, renew)
        self._module: nn.Module | None = module
        self.operations: list[Operation] = []

    def counters(self) -> list[Counter]:
        assert self._call is not None, "not after close"
        assert self._module is not None, "not after close"
        found, self.operations = profiled(self._call, self._module)
        return found

    def close(self) -> None:
        super().close()
        self._module = None


class Eager:
    """The module as a user has it, or in DTYPE."""

    name = "eager"
    graph: bool | str = False
    copies = "none"
    stepwise = True

    def __init__(self, option: str, settings: Settings):
        self._dtype, self._settings = dtype_of(option, self.name), settings
        self.facts = {
            **described(settings),
            "precision": precision_name(self._dtype, settings.device),
            "graph": self.graph,
            "copies": self.copies,
        }

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Called:
        began = time.perf_counter()
        module, inputs = cast(module, inputs, self._dtype, copy.deepcopy)
        inputs, renew = _renewed(module, inputs)
        with torch.inference_mode():
            call = self._made(module, inputs)
            call()
            if self._settings.device.type == "cuda":
                torch.cuda.synchronize(self._settings.device)
        facts = {"build_s": time.perf_counter() - began, "inputs": shapes_of(inputs)}
        if self.name == "eager" and self._settings.device.type == "cpu":
            return _Profiled(call, module, self._settings, facts, renew)
        if self.name in ("eager", "graph"):
            kind = _Launched if self.name == "eager" else _Kernels
            return kind(call, module, inputs, self._settings, facts, renew)
        return Called(call, self._settings, facts, renew)

    def _made(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        return lambda: module(*inputs)

    def close(self) -> None:
        pass


def _renewed(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """(inputs to run on, what makes them again what they were). A module that writes to its inputs is given copies of its own:
    the other engine reads the same ones, and each call would begin with what the last one left."""
    given = tuple(x.clone() for x in inputs)
    with torch.no_grad():
        module(*given)
    if all(torch.equal(x, y) for x, y in zip(given, inputs, strict=True)):
        return inputs, lambda: None

    def renew() -> None:
        with torch.no_grad():
            for x, y in zip(given, inputs, strict=True):
                x.copy_(y)

    return given, renew


class Graph(Eager):
    """Eager, captured."""

    name = "graph"
    graph = "cuda graph"
    copies = "none: inputs and outputs stay in the graph's buffers"

    def __init__(self, option: str, settings: Settings):
        if settings.device.type != "cuda":
            raise EngineError(f"engine graph needs a GPU, but the device is {settings.device}; use eager")
        super().__init__(option, settings)

    def _made(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        side = torch.cuda.Stream(self._settings.device)
        side.wait_stream(torch.cuda.current_stream(self._settings.device))
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries choose their kernels and take their workspaces
                module(*inputs)
        torch.cuda.current_stream(self._settings.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            held = module(*inputs)

        def replay(kept: Any = (module, inputs)) -> Any:  # what the graph reads must not be freed before it
            graph.replay()
            return held

        return replay


class Compile(Eager):
    """torch.compile at its best."""

    name = "compile"
    stepwise = False

    def __init__(self, option: str, settings: Settings):
        self.graph = "cuda graph" if settings.device.type == "cuda" else False
        self.copies = "in: inputs into the graph's buffers" if self.graph else "none"
        super().__init__(option, settings)
        self.facts |= {"mode": "max-autotune, frozen weights"}

    def _made(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        from torch._inductor import config  # seconds to import

        compiled = torch.compile(module, mode="max-autotune", dynamic=False)
        # Batch norms are folded and weights laid out anew; as an option of torch.compile `freezing` does nothing.
        with config.patch(freezing=True), torch.no_grad():
            for _ in range(3):  # compiled, warmed up, recorded
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*inputs)

        def call() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*inputs)

        return call


def described(settings: Settings) -> dict[str, Any]:
    """Facts that every engine in this process has."""
    return {
        "device": device_name(settings.device),
        "versions": {"torch": torch.__version__, "tilewright": __version__},
        "threads": settings.threads,
        "clock": settings.clock,
    }


def device_name(device: torch.device) -> str:
    """ "cpu", "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    return f"{device} ({device_of(device.index or 0).name})" if device.type == "cuda" else str(device)


def precision_name(dtype: torch.dtype | None, device: torch.device) -> str:
    """What float32 means on this device, by PyTorch's settings, or the type asked for."""
    if dtype not in (None, torch.float32):
        return next(name for name, known in DTYPES.items() if known == dtype)
    if device.type != "cuda":
        return "fp32"
    parts = ["convolutions"] if allows_tf32("conv") else []
    parts += ["products"] if allows_tf32("matmul") else []
    return f"fp32 (tf32 {' and '.join(parts)})" if parts else "fp32"


def shapes_of(inputs: tuple[Tensor, ...]) -> list[str]:
    """ "float32[32,3,224,224]" of each."""
    return [f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]" for x in inputs]
