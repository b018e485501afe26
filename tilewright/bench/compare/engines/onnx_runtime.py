"""ONNX Runtime on the module exported to ONNX: every graph optimisation, inputs and outputs bound where the provider has them.

`onnxruntime` takes the exporter's opset, `onnxruntime:opset18` another one. On a GPU it is the CUDA provider, from a package of
its own (onnxruntime-gpu); where that is missing the engine refuses rather than running on the CPU. Threads stop spinning when a
call ends: the other engine's turn comes next.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.bench.compare.engine import EngineError, Settings, need, timed
from tilewright.bench.compare.engines.onnx_cut import OnnxParts
from tilewright.bench.compare.engines.onnx_export import export_onnx, input_arrays
from tilewright.bench.compare.engines.torch_engines import device_name, shapes_of
from tilewright.bench.compare.variants import Variant

__all__ = ["OnnxRuntime"]


class OnnxRuntime:
    """One session a build."""

    def __init__(self, option: str, settings: Settings):
        digits = option.removeprefix("opset")
        if option and not (option.startswith("opset") and digits.isdecimal()):
            raise EngineError(
                f"engine onnxruntime:{option} is not known; wanted onnxruntime, or an opset as onnxruntime:opset18"
            )
        self._opset = int(digits) if digits else None
        self._settings = settings
        self._parts = OnnxParts(self._opset)
        self._ort = need("onnxruntime", "onnxruntime")
        cuda = settings.device.type == "cuda"
        self._provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
        if self._provider not in (have := self._ort.get_available_providers()):
            raise EngineError(f"onnxruntime here has {', '.join(have)}, wanted {self._provider}: pip install onnxruntime-gpu")
        self.facts: dict[str, Any] = {
            "device": device_name(settings.device),
            "versions": {"onnxruntime": self._ort.__version__, "torch": torch.__version__},
            "precision": "fp32",
            "threads": settings.threads,
            "graph": False,
            "copies": "none: inputs and outputs are bound to buffers",
            "provider": self._provider,
            "clock": settings.clock,
        }

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> "_Session":
        return self._built(lambda path: export_onnx(module, inputs, path, name, self._opset), inputs)

    def build_variant(self, variant: Variant) -> "_Session":
        """A part of the model's one exported graph."""
        return self._built(lambda path: self._parts.save(variant, path), variant.inputs)

    def _built(self, write: Callable[[Path], None], inputs: tuple[Tensor, ...]) -> "_Session":
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="tilewright-onnx-") as folder:
            path = Path(folder) / "model.onnx"
            write(path)
            exported = time.perf_counter() - began
            session = self._ort.InferenceSession(str(path), self._options(), providers=[self._provider])
        built = _Session(self._ort, session, input_arrays(inputs), self._settings)
        built.time(1)
        facts = {"export_s": exported, "build_s": time.perf_counter() - began, "inputs": shapes_of(inputs)}
        built.facts = facts
        return built

    def _options(self) -> Any:
        options = self._ort.SessionOptions()
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = self._settings.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return options

    def close(self) -> None:
        pass


class _Session:
    def __init__(self, ort: Any, session: Any, arrays: dict[str, np.ndarray], settings: Settings):
        self._session, self._settings = session, settings
        self._binding = session.io_binding()
        where = (settings.device.type, settings.device.index or 0)
        # Named by the exporter as the arrays are; an input that does nothing is not in the file.
        wanted = {node.name for node in session.get_inputs()}
        self._held = {key: ort.OrtValue.ortvalue_from_numpy(x, *where) for key, x in arrays.items() if key in wanted}
        for key, value in self._held.items():
            self._binding.bind_ortvalue_input(key, value)
        for node in session.get_outputs():
            self._binding.bind_output(node.name, *where)
        self.facts: dict[str, Any] = {}

    def time(self, calls: int) -> float:
        return timed(self._run, calls, self._settings)

    def _run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def outputs(self) -> list[Tensor]:
        self._run()
        found = [torch.from_numpy(np.ascontiguousarray(x)) for x in self._binding.copy_outputs_to_cpu()]
        return [x.double() if x.is_floating_point() else x for x in found]

    def close(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._held = {}
        del self._session
