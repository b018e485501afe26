"""ONNX Runtime as an engine: all graph optimisations; inputs and outputs are bound to the provider's memory.

`onnxruntime` takes the exporter's opset, `onnxruntime:opset18` another one. On a GPU it uses the CUDA provider, which is in a
separate package (onnxruntime-gpu); without it the engine refuses, rather than running on the CPU. Threads stop spinning when a
call ends, because the other engine runs next.

Its counters come from its profiler in a second session with the same file, on a CPU only: on a GPU it times launches, not
kernels.
"""

import json
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
from tilewright.bench.compare.engines.torch_engines import device_name, shapes_of
from tilewright.bench.compare.results import Counter
from tilewright.bench.compare.variants import Variant

__all__ = ["OnnxRuntime", "counters_of"]

_KERNEL, _BLOCKED = "_kernel_time", "_nchwc"


class OnnxRuntime:
    """One session a build."""

    def __init__(self, option: str, settings: Settings):
        digits = option.removeprefix("opset")
        if option and not (option.startswith("opset") and digits.isdecimal()):
            raise EngineError(
                f"engine onnxruntime:{option} is not known; wanted onnxruntime, or onnxruntime with an opset, such "
                "as onnxruntime:opset18"
            )
        self._opset = int(digits) if digits else None
        self._settings = settings
        self._parts = OnnxParts(self._opset)
        self._kept = tempfile.TemporaryDirectory(prefix="tilewright-onnx-")
        self._ort = need("onnxruntime", "onnxruntime")
        cuda = settings.device.type == "cuda"
        self._provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
        if self._provider not in (have := self._ort.get_available_providers()):
            raise EngineError(f"this onnxruntime has {', '.join(have)}, wanted {self._provider}: pip install onnxruntime-gpu")
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
        return self._built(lambda path: export_onnx(module, inputs, path, name, self._opset), inputs, keep=name == "whole")

    def build_variant(self, variant: Variant) -> "_Session":
        """A part of the model's one exported graph."""
        return self._built(lambda path: self._parts.save(variant, path), variant.inputs)

    def _built(
        self, write: Callable[[Path], Sequence[Operation] | None], inputs: tuple[Tensor, ...], keep: bool = False
    ) -> "_Session":
        """`keep`: the file, for a session that is profiled."""
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="tilewright-onnx-") as folder:
            path = Path(self._kept.name if keep else folder) / "model.onnx"
            operations = write(path)
            exported = time.perf_counter() - began
            session = self._session(path, self._options())
        arrays = input_arrays(inputs)
        built = _Session(self._ort, session, arrays, self._settings)
        built.time(1)
        facts = {"export_s": exported, "build_s": time.perf_counter() - began, "inputs": shapes_of(inputs)}
        built.facts, built.operations = facts, operations or ()
        if keep:
            built.profile = lambda: self._profile(path, arrays)
        return built

    def _session(self, path: Path, options: Any) -> Any:
        return self._ort.InferenceSession(str(path), options, providers=[self._provider])

    def _profile(self, path: Path, arrays: dict[str, np.ndarray]) -> list[Counter]:
        """Of the file, in a session of its own."""
        if self._settings.device.type == "cuda":
            raise EngineError("onnxruntime has no counters on a GPU, because its profiler measures launches there, not kernels")
        options = self._options()
        with tempfile.TemporaryDirectory(prefix="tilewright-profile-") as folder:
            options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
            profiled = self._session(path, options)
            session = _Session(self._ort, profiled, arrays, self._settings)
            warm = repeated(session.run)
            repeated(session.run)
            found = counters_of(json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8")), warm)
            session.close()
        return found

    def _options(self) -> Any:
        options = self._ort.SessionOptions()
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = self._settings.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return options

    def close(self) -> None:
        self._kept.cleanup()


def counters_of(events: Sequence[Any], skipped: int) -> list[Counter]:
    """Nodes of a profile of ONNX Runtime, in the order in which they first ran: the median of all runs but the first `skipped`.

    EngineError: it has no runs beyond those, or is no such profile.
    """
    try:
        runs = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "Session" and e["name"] == "model_run")
        kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_KERNEL)]
        kernels.sort(key=lambda e: e["ts"])
        microseconds: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * len(runs[skipped:]))
        at = 0
        for event in kernels:
            while at < len(runs) and event["ts"] > runs[at][1]:
                at += 1
            name, kind = event["name"].removesuffix(_KERNEL), event["args"].get("op_name", "")
            key = name, kind, event["args"].get("node_index", "")
            if skipped <= at < len(runs):
                microseconds[key][at - skipped] += event["dur"]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"onnxruntime's profile does not have the expected format: {type(error).__name__}: {error}") from None
    if len(runs) <= skipped:
        raise EngineError(f"onnxruntime's profile has {len(runs)} runs, wanted more than {skipped}")
    return [
        # Where its convolutions have a layout of their own they are called as the value that they make.
        Counter(name=name.removesuffix(_BLOCKED), kind=f"{kind}, nchwc" if name.endswith(_BLOCKED) else kind,
                seconds=statistics.median(found) * 1e-6)
        for (name, kind, _), found in microseconds.items()
    ]  # fmt: skip


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
        self.operations: Sequence[Operation] = ()
        self.profile: Callable[[], list[Counter]] | None = None

    def time(self, calls: int) -> float:
        return timed(self.run, calls, self._settings)

    def counters(self) -> list[Counter]:
        if self.profile is None:
            raise EngineError("onnxruntime has counters only for the whole model")
        return self.profile()

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def outputs(self) -> list[Tensor]:
        self.run()
        found = [torch.from_numpy(np.ascontiguousarray(x)) for x in self._binding.copy_outputs_to_cpu()]
        return [x.double() if x.is_floating_point() else x for x in found]

    def close(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._held = {}
        del self._session
