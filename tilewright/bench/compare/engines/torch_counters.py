"""Counters from PyTorch's profiler for a module in eager mode on a CPU: seconds of each operator, and the module that called
it.

On a GPU kernels are counted instead (kernel_records.py), with the same ranges around modules.

An operator's time includes operators that it calls itself. Calls of modules are observed by hooks, which are removed
afterwards. Compiled modules are not supported, because it is unknown to which module their kernels belong.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tilewright.bench.compare.engine import EngineError, Operation, repeated
from tilewright.bench.compare.engines.kernel_records import RANGE as _MODULE
from tilewright.bench.compare.results import Counter

__all__ = ["module_ranges", "profiled"]

_RUN = "tilewright run"
"""Of ranges that are put around a run; those around a module's call are called by its path."""


def profiled(call: Callable[[], Any], module: nn.Module) -> tuple[list[Counter], list[Operation]]:
    """Operators of `call`, which calls `module`, in their order: medians of several runs. And the modules that they are of.

    EngineError: two runs are not of the same operators.
    """

    def run() -> None:
        with record_function(_RUN):
            call()

    with torch.inference_mode(), module_ranges(module), _silent():
        repeated(call)
        found = profile(use_kineto=False)
        with found:
            repeated(run)
    runs = _operators(found.function_events or [])
    if len({tuple((path, op) for path, op, _ in one) for one in runs}) != 1:
        raise EngineError("eager runs different operators from call to call, so there is no median of their times")
    counters, operations = [], []
    for i, several in enumerate(zip(*runs, strict=True)):
        path, op, _ = several[0]
        name = f"{i + 1}: {path}"
        counters.append(Counter(name=name, kind=op, seconds=statistics.median(seconds for _, _, seconds in several)))
        # One after the other: a module that is called again is further on in the model.
        reads = (i - 1,) if i else ()
        operations.append(Operation(names=(name,), scope=path, op=op.removeprefix("aten::"), reads=reads))
    return counters, operations


def _operators(events: list[FunctionEvent]) -> list[list[tuple[str, str, float]]]:
    """(module, operator, seconds) of what no other operator calls, of each run."""
    runs: dict[int, list[tuple[str, str, float]]] = {}
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.name == _RUN:
            runs[event.id] = []
        around, above = event.cpu_parent, None
        while around is not None and not around.name.startswith((_RUN, _MODULE)):
            above, around = around, around.cpu_parent
        if above is not None or around is None or event.name.startswith((_RUN, _MODULE)):
            continue
        path = around.name.removeprefix(_MODULE) if around.name != _RUN else ""
        while around is not None and around.name != _RUN:
            around = around.cpu_parent
        if around is not None:
            runs[around.id].append((path, event.name, event.cpu_time_total * 1e-6))
    return list(runs.values())


@contextmanager
def module_ranges(module: nn.Module) -> Iterator[None]:
    """Calls of `module` and those inside are ranges of the profile."""
    paths = {id(one): path for path, one in module.named_modules()}
    open_ranges: list[tuple[int, record_function]] = []

    def before(one: nn.Module, given: Any) -> None:
        if id(one) in paths:
            open_ranges.append((id(one), record_function(_MODULE + paths[id(one)])))
            open_ranges[-1][1].__enter__()

    def after(one: nn.Module, given: Any, made: Any) -> None:
        if open_ranges and open_ranges[-1][0] == id(one):
            open_ranges.pop()[1].__exit__(None, None, None)

    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(before).remove)
        hooks.callback(register_module_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """Standard error goes nowhere: the profiler's library writes a line to it whenever it starts and ends (torch 2.13)."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
