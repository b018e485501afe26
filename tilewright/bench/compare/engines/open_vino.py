"""OpenVINO as an engine: the module exported to ONNX, on the CPU, optimised for latency.

Without a DTYPE it computes in the type that it considers best for this processor, as for its users (bf16 if there are matrix
units for it); openvino:fp32 and openvino:bf16 choose one.

Its counters come from the same file compiled again, with PERF_COUNT.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.bench.compare.clocks import timed
from tilewright.bench.compare.engine import EngineError, Operation, Settings, need, repeated
from tilewright.bench.compare.engines.onnx_cut import OnnxParts
from tilewright.bench.compare.engines.onnx_export import export_onnx, input_arrays
from tilewright.bench.compare.engines.torch_engines import shapes_of
from tilewright.bench.compare.results import MOST_KIND, MOST_NAME, Counter
from tilewright.bench.compare.variants import Variant

__all__ = ["OpenVino"]

_TYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_NAMES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}


class OpenVino:
    """One compiled model a build."""

    def __init__(self, option: str, settings: Settings):
        if option and option not in _TYPES:
            raise EngineError(
                f"engine openvino:{option} is not known; wanted openvino, or openvino: followed by one of {', '.join(_TYPES)}"
            )
        if settings.device.type != "cpu":
            raise EngineError(f"engine openvino runs on the CPU, but the device is {settings.device}; give --device cpu")
        self._settings, self._ov = settings, need("openvino", "openvino")
        self._core, self._parts = self._ov.Core(), OnnxParts()
        self._kept = tempfile.TemporaryDirectory(prefix="tilewright-onnx-")
        self._config: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": settings.threads}
        if option:
            self._config["INFERENCE_PRECISION_HINT"] = _TYPES[option]
        self.facts: dict[str, Any] = {
            "device": "cpu",
            "versions": {"openvino": self._ov.__version__, "torch": torch.__version__},
            "precision": option or "fp32",
            "threads": settings.threads,
            "graph": False,
            "copies": "none: inputs are shared, outputs stay in the request's buffers",
            "clock": settings.clock,
        }

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> "_Request":
        return self._built(lambda path: export_onnx(module, inputs, path, name), inputs, keep=name == "whole")

    def build_variant(self, variant: Variant) -> "_Request":
        """A part of the model's one exported graph."""
        return self._built(lambda path: self._parts.save(variant, path), variant.inputs)

    def _built(
        self, write: Callable[[Path], Sequence[Operation] | None], inputs: tuple[Tensor, ...], keep: bool = False
    ) -> "_Request":
        """`keep`: the file, for a model with counters."""
        began = time.perf_counter()
        arrays = input_arrays(inputs)
        with tempfile.TemporaryDirectory(prefix="tilewright-onnx-") as folder:
            path = Path(self._kept.name if keep else folder) / "model.onnx"
            operations = write(path)
            exported = time.perf_counter() - began
            compiled = self._compiled(path, self._config)
        hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        built = _Request(self._ov, compiled, arrays, settings=self._settings)
        built.time(1)
        built.facts = {
            "export_s": exported,
            "build_s": time.perf_counter() - began,
            "inputs": shapes_of(inputs),
            "precision": _NAMES.get(hint, hint),  # without a DTYPE its own choice, which it tells when it has compiled
        }
        built.operations = operations or ()
        if keep:
            built.profile = lambda: self._profile(path, arrays)
        return built

    def _compiled(self, path: Path, config: dict[str, Any]) -> Any:
        return self._core.compile_model(self._core.read_model(path), "CPU", config)

    def _profile(self, path: Path, arrays: dict[str, np.ndarray]) -> list[Counter]:
        """Of the file, compiled once more: nodes that ran, called as the operations that OpenVINO says they are made of."""
        compiled = self._compiled(path, {**self._config, "PERF_COUNT": True})
        built = _Request(self._ov, compiled, arrays, settings=self._settings)
        ran = self._ov.ProfilingInfo.Status.EXECUTED
        found: dict[tuple[str, str], list[float]] = defaultdict(list)

        def run() -> None:
            built.request.infer()
            for info in built.request.get_profiling_info():
                if info.status == ran:
                    found[info.node_name, f"{info.node_type}, {info.exec_type}"].append(info.real_time.total_seconds())

        repeated(built.request.infer)
        repeated(run)
        made_of = {op.get_friendly_name(): _original(op) for op in compiled.get_runtime_model().get_ordered_ops()}
        built.close()
        return [
            Counter(name=made_of.get(name) or name[:MOST_NAME], kind=kind[:MOST_KIND], seconds=statistics.median(times))
            for (name, kind), times in found.items()
        ]

    def close(self) -> None:
        del self._core
        self._kept.cleanup()


def _original(op: Any) -> str:
    """ "node_conv + node_relu": what a compiled node is made of, as many names as fit; "" where it is nothing of the model."""
    info = op.get_rt_info()
    names = str(info["originalLayersNames"].value).split(",") if "originalLayersNames" in info else []
    while names and len(" + ".join(names)) > MOST_NAME:
        names.pop()
    return " + ".join(names)


class _Request:
    def __init__(self, ov: Any, compiled: Any, arrays: dict[str, np.ndarray], settings: Settings):
        self._compiled, self.request = compiled, compiled.create_infer_request()
        names = {name for port in compiled.inputs for name in port.get_names()}
        for key, x in arrays.items():
            if key in names:
                self.request.set_tensor(key, ov.Tensor(x, shared_memory=True))
        self._held, self._settings = arrays, settings
        self.facts: dict[str, Any] = {}
        self.operations: Sequence[Operation] = ()
        self.profile: Callable[[], list[Counter]] | None = None

    def counters(self) -> list[Counter]:
        if self.profile is None:
            raise EngineError("openvino has counters only for the whole model")
        return self.profile()

    def time(self, calls: int) -> float:
        return timed(self.request.infer, calls, self._settings)

    def outputs(self) -> list[Tensor]:
        self.request.infer()
        found = [torch.from_numpy(self.request.get_output_tensor(i).data.copy()) for i in range(len(self._compiled.outputs))]
        return [x.double() if x.is_floating_point() else x for x in found]

    def close(self) -> None:
        del self.request
        del self._compiled
