"""The share of one rank of a model that several ranks serve: memory plan and loading, the same on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.engine.config import EngineConfig
from tilewright.engine.places import place_of
from tilewright.engine.plan import MemoryPlan, plan_memory
from tilewright.hw.device import cuda_count
from tilewright.models import empty_model, load_config, load_model, random_model, resolve
from tilewright.models.config import ModelConfig
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.serving import ServedCut

__all__ = ["Share"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one rank.

    folder: the model's folder; None for random weights.
    """

    folder: Path | None
    config: ModelConfig
    options: EngineConfig
    device: torch.device
    dtype: torch.dtype
    cut: ServedCut

    @classmethod
    def of(cls, model: str | Path | ModelConfig, options: EngineConfig, rank: int) -> "Share":
        """The share of a rank. Raises ModelError, and ValueError for a plan that does not fit the model or the machine."""
        plan = options.plan
        on, wanted = place_of(options)
        if on.type == "cuda" and plan.ranks > 1:
            if (count := cuda_count()) < plan.ranks:
                raise ValueError(f"tp {plan.tp} x pp {plan.pp} takes {plan.ranks} cards, and this machine has {count}")
            on = torch.device("cuda", rank)
        folder, config = (None, model) if isinstance(model, ModelConfig) else _found(model)
        if config.quantization is not None and plan.slices > 1:
            raise ValueError("tp cuts no weights that are stored in 8 or 4 bits; take the unquantised model, or pp")
        dtype = wanted or (config.dtype if on.type == "cuda" else torch.float32)
        empty = empty_model(config, device="meta", dtype=dtype)
        return cls(
            folder=folder, config=config, options=options, device=on, dtype=dtype, cut=ServedCut(empty, plan, plan.place(rank))
        )

    def planned(self) -> MemoryPlan:
        """The memory plan of this rank. Raises NoMemory, ValueError."""
        empty = empty_model(self.config, device="meta", dtype=self.dtype)
        self.cut.all(empty)
        return plan_memory(self.cut.part(empty, Mesh()), self.options, device=self.device, dtype=self.dtype)

    def loaded(self, mesh: Mesh, max_model_len: int, report: Callable[[str], None]) -> Any:
        """The share (`ServedPart`) with its weights, on this rank's device. Raises ModelError."""
        place = {"device": self.device, "dtype": self.dtype, "convert": self.cut.convert}
        if self.folder is None:
            whole = random_model(self.config.limited(max_model_len), **place)
        else:
            whole = load_model(
                self.folder, progress=lambda done, total: report(f"loading weights {done:,}/{total:,}"),
                max_positions=max_model_len, **place,
            )  # fmt: skip
        return self.cut.part(whole, mesh)


def _found(model: str | Path) -> tuple[Path, ModelConfig]:
    folder = resolve(model)
    return folder, load_config(folder)
