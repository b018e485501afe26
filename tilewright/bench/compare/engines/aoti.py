"""AOTInductor: the module compiled ahead of time into a package, loaded and called as a server without Python would.

With max-autotune, as `compile`; a package captures no CUDA graph. Building one calls a C++ compiler: seconds to a minute each.
"""

import copy
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tilewright.bench.compare.engine import Settings, cast, dtype_of
from tilewright.bench.compare.engines.torch_engines import Called, described, precision_name, shapes_of

__all__ = ["Aoti"]


class Aoti:
    """Packages in a folder that goes with the engine."""

    def __init__(self, option: str, settings: Settings):
        self._dtype, self._settings = dtype_of(option, "aoti"), settings
        self._folder = tempfile.TemporaryDirectory(prefix="tilewright-aoti-")
        self._builds = 0
        self.facts = {
            **described(settings),
            "precision": precision_name(self._dtype, settings.device),
            "graph": False,
            "copies": "none",
            "mode": "max-autotune",
        }

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Called:
        began = time.perf_counter()
        self._builds += 1
        module, inputs = cast(module, inputs, self._dtype, copy.deepcopy)
        path = Path(self._folder.name) / f"{self._builds}.pt2"
        with torch.no_grad():
            program = torch.export.export(module, inputs)
            # Both names are PyTorch's documented ones for this, in spite of the underscore.
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={"max_autotune": True}
            )
            loaded = torch._inductor.aoti_load_package(package)
            loaded(*inputs)
        facts = {"build_s": time.perf_counter() - began, "inputs": shapes_of(inputs)}
        return Called(lambda: loaded(*inputs), self._settings, facts)

    def close(self) -> None:
        self._folder.cleanup()
