"""Our engine: `tilewright.fuse.optimize`, as a user calls it.

Without a precision: fp16 on a GPU, fp32 on a CPU. Its decisions, launch by launch, are among the facts of a build. The whole
model is traced as for a user; its variants are parts of another trace (cutting.py), and are built in the same way from there.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from tilewright.bench.compare.cutting import Cutter, NotCut
from tilewright.bench.compare.engine import EngineError, Operation, Settings
from tilewright.bench.compare.engines.kernel_records import counters_of, node_ranges
from tilewright.bench.compare.engines.torch_engines import Ahead, Called, described, precision_name, shapes_of
from tilewright.bench.compare.results import Counter
from tilewright.bench.compare.variants import Variant
from tilewright.fuse.optimize import PRECISIONS, optimize

__all__ = ["Optimize"]


class _Replayed(Ahead):
    """A captured graph whose kernels are known by the layers that its calls are of."""

    exact = True

    def __init__(
        self, call: Callable[[], Any], settings: Settings, facts: dict[str, Any], replay: Callable[[], Any],
        fused: fx.GraphModule, inputs: tuple[Tensor, ...],
    ):  # fmt: skip
        super().__init__(call, settings, facts, alone=replay)
        self._run: Callable[[], Any] | None = node_ranges(fused, inputs)
        self._replay = replay
        self.operations: list[Operation] = []

    def counters(self) -> list[Counter]:
        assert self._run is not None, "not after close"
        found, self.operations = counters_of(self._replay, self._run, nullcontext)
        return found

    def close(self) -> None:
        super().close()
        self._run = None


class Optimize:
    """One `Optimized` a build."""

    def __init__(self, option: str, settings: Settings):
        cuda = settings.device.type == "cuda"
        self._settings = settings
        self._cutter: Cutter | None = None
        self._precision = option or ("fp16" if cuda else "fp32")
        if self._precision not in PRECISIONS:
            raise EngineError(
                f"engine optimize:{option} is not known; wanted optimize: followed by one of {', '.join(PRECISIONS)}"
            )
        self.facts: dict[str, Any] = {
            **described(settings),
            "precision": precision_name(None, settings.device) if self._precision == "fp32" else self._precision,
            "graph": "cuda graph" if cuda else False,
            "copies": "in and out: into and out of the graph's buffers" if cuda else "none",
        }

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Called:
        began = time.perf_counter()
        # On a GPU always the graph of our operators: torch's own calls, which `optimize` lets answer where they are faster, are
        # engines of their own here, and parts of a model must be made as the whole is.
        measure = False if self._settings.device.type == "cuda" else None
        optimized = optimize(module, inputs, precision=self._precision, report=False, measure=measure)
        with torch.inference_mode():
            optimized(*inputs)
        said = optimized.report.as_dict()
        facts = {"build_s": time.perf_counter() - began, "inputs": shapes_of(inputs), "optimize": said["facts"], "report": said}
        if self._precision == "int8" and not any(d["kind"] == "quantise" and d["taken"] for d in said["decisions"]):
            facts["computes in"] = "fp16, for no product is faster in int8"
        captured = getattr(optimized, "captured", None)
        if captured is None:
            return Called(lambda: optimized(*inputs), self._settings, facts)
        return _Replayed(lambda: optimized(*inputs), self._settings, facts, captured.replay, optimized.fused, inputs)

    def build_variant(self, variant: Variant) -> Called:
        """A part of the model that `variant` was made from."""
        try:
            if self._cutter is None or self._cutter.chain is not variant.chain:
                self._cutter = Cutter(variant.chain)
            module: nn.Module = self._cutter.known(variant)
        except NotCut as error:
            built = self.build(variant.module, variant.inputs, variant.name)
            built.facts["traced anew"] = str(error)
            return built
        return self.build(module, variant.inputs, variant.name)

    def close(self) -> None:
        self._cutter = None
