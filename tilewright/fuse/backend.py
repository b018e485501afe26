"""`torch.compile(model, backend="tilewright")`: Inductor, with operators of this package in its graphs.

Inductor works as usual. Before its own passes, our pass replaces matrix products, convolutions and attention, together with the
operations after them, by calls of our operators. The rules are in post_grad.py. The pass handles forward and backward graphs,
with known or symbolic sizes.

    compiled = torch.compile(model, backend="tilewright", mode="max-autotune", options={"tilewright.cpu": True})
    compiled(x)
    print(explain_last())

`mode` and `options` are Inductor's. We add one option: with "tilewright.cpu", calls on CPU tensors are replaced too. This is
for tests; it is not faster. A pass of the user (`post_grad_custom_pre_pass` in Inductor's config or in `options`) runs before
ours, on the original graph. No global state is changed: our pass applies to this compilation only.

The decisions of a compilation are available from `explain_last()`, from the logger "tilewright.fuse.backend" at level INFO, and
as the artifact "tilewright_fusions" in torch's structured trace (TORCH_TRACE).

Not here: folding batch norms (Inductor's `freezing` does this), CUDA graphs (use mode="reduce-overhead"), and a precision other
than the model's. `tilewright.optimize` does all three.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, fx
from torch import _logging as torch_logging
from torch._dynamo.backends.registry import register_backend

# Inductor's documented extension point. Its import takes seconds, so no other module of `tilewright.fuse` imports this one.
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tilewright import __version__
from tilewright.fuse.decisions import Decision, table_of, totals
from tilewright.fuse.post_grad import fuse_graph
from tilewright.op import scope

__all__ = ["Explanation", "FusePass", "explain_last", "tilewright"]

_HOOK = "post_grad_custom_pre_pass"
_OURS = "tilewright."
_log = logging.getLogger(__name__)


@dataclass
class Explanation:
    """The decisions of one compilation by `torch.compile`."""

    graphs: list[tuple[Decision, ...]] = field(default_factory=list)
    """The decisions for each graph that Inductor has compiled: the forward graph, and later the backward graph if needed."""
    stored: Path | None = None
    """A file with the decisions. It is read if Inductor takes the code from its cache, because our pass does not run then."""

    def noted(self, decisions: Sequence[Decision]) -> None:
        """Add the decisions of one more graph."""
        self.graphs.append(tuple(decisions))
        if self.stored is not None:
            self.stored.parent.mkdir(parents=True, exist_ok=True)
            self.stored.write_text(json.dumps([[d.to_json() for d in graph] for graph in self.graphs]), encoding="utf-8")

    def all_graphs(self) -> list[tuple[Decision, ...]]:
        """The decisions for each graph. If the code came from Inductor's cache: those that were made when it was filled."""
        if self.graphs or self.stored is None or not self.stored.exists():
            return self.graphs
        return [tuple(Decision(**row) for row in graph) for graph in json.loads(self.stored.read_text(encoding="utf-8"))]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions for all graphs."""
        return tuple(decision for graph in self.all_graphs() for decision in graph)

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return {"graphs": [[d.to_json() for d in graph] for graph in self.all_graphs()], **totals(self.decisions)}

    def __str__(self) -> str:
        if not (graphs := self.all_graphs()):
            return (
                "no graph was compiled, because Inductor took the code from its cache, which does not contain the decisions. "
                'To see them, compile with options={"force_disable_caches": True}'
            )
        return "\n\n".join(f"graph {i}\n{table_of(graph)}" for i, graph in enumerate(graphs))


_LAST: list[Explanation] = []
"""The explanation of the last compilation, in a list; read by `explain_last` only."""


def explain_last() -> Explanation | None:
    """The decisions of the last compilation in this process; None if there was none.

    A model with graph breaks is compiled in several parts, and each part has its own explanation.
    """
    return _LAST[0] if _LAST else None


@lru_cache(maxsize=1)
def _sources() -> str:
    """A digest of everything that determines decisions: the sources of passes, operators and kernels, and version numbers."""
    digest = hashlib.sha256()
    home = Path(__file__).parent.parent
    for part in ("fuse", "ops", "kernels", "tune", "hw", "op.py"):
        files = sorted((home / part).rglob("*.*")) if (home / part).is_dir() else [home / part]
        for file in files:
            if file.suffix in (".py", ".json"):
                digest.update(str(file.relative_to(home)).encode() + b"\0" + file.read_bytes())
    digest.update(f"{__version__} {torch.__version__} {triton.__version__}".encode())
    return digest.hexdigest()


class FusePass(CustomGraphPass):
    """The pass that Inductor runs; it runs the user's passes first."""

    def __init__(self, before: Sequence[Callable[[fx.Graph], None]] = (), *, cpu: bool = False):
        self.before, self.cpu = tuple(before), cpu
        self.explanation = Explanation()

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's passes, then replace anchors in the graph in place."""
        for one in self.before:
            one(graph)
        decisions = tuple(fuse_graph(graph, cpu=self.cpu))
        self.explanation.noted(decisions)
        _log.info("graph %d\n%s", len(self.explanation.graphs) - 1, table_of(decisions))
        torch_logging.trace_structured(  # pyright: ignore[reportPrivateImportUsage]
            "artifact",
            metadata_fn=lambda: {"name": "tilewright_fusions", "encoding": "json"},
            payload_fn=lambda: json.dumps([d.to_json() for d in decisions]),
        )

    def uuid(self) -> Any | None:
        """The identifier of the pass in Inductor's cache keys. None disables caching: a pass of the user has no identifier."""
        theirs = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.before]
        if any(name is None for name in theirs):
            return None
        return ("tilewright", _sources(), self.cpu, str(scope()), *theirs)


def _passes(given: Any) -> tuple[Callable[[fx.Graph], None], ...]:
    """The user's passes. Inductor accepts one, or several since torch 2.13."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _place(graph: fx.GraphModule, inputs: Sequence[Any], name: Any, patches: dict[str, Any]) -> Path | None:
    """The file next to Inductor's cache with the decisions of a compilation with these arguments; None if caching is off."""
    if name is None:
        return None
    of_inputs = [(i.shape, i.stride(), i.dtype, i.device, i.requires_grad) if isinstance(i, Tensor) else i for i in inputs]
    options = {key: value for key, value in patches.items() if key != _HOOK}
    text = repr((graph.code, of_inputs, name, sorted(options.items()), torch.is_grad_enabled()))
    return Path(cache_dir()) / "tilewright" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def tilewright(
    graph: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend. `torch.compile(..., backend="tilewright", mode=..., options=...)` calls it for every graph.

    Raises:
        ValueError: an unknown option that begins with "tilewright.".
    """
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    given = dict(options or {})
    cpu = bool(given.pop(f"{_OURS}cpu", False))
    if unknown := [name for name in given if name.startswith(_OURS)]:
        raise ValueError(f"unknown option {unknown[0]!r}; wanted {_OURS}cpu, or an option of Inductor")
    patches = {**(list_mode_options(mode) if mode else {}), **given}
    patches = {name.replace("-", "_"): value for name, value in patches.items()}
    ours = FusePass(_passes(patches.get(_HOOK, getattr(config, _HOOK))), cpu=cpu)
    ours.explanation.stored = _place(graph, inputs, ours.uuid(), patches)
    _LAST[:] = [ours.explanation]
    return compile_fx(graph, list(inputs), config_patches={**patches, _HOOK: ours})  # pyright: ignore[reportReturnType]


# An installed package is found by its entry point (pyproject.toml). A source tree has none, so the backend is registered when
# this module is imported.
if not entry_points(group="torch_dynamo_backends", name="tilewright"):
    register_backend(compiler_fn=tilewright, name="tilewright")
