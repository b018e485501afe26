"""Tunes the ops of a model for the shapes of its calls, before it runs: `optimize(..., tune=True)`.

    calls of the model -> distinct problems -> search in another process -> rows of the user's database -> chosen from then on

The search is the same as in `tilewright tune` (`tilewright.tune.search`). It tries certified configs in the order of the
analytical performance model, and compiles them on all cores. Each config is checked against the definition of the op and timed.
The best configs are then timed in turns, together with libraries. Results that were measured earlier with the same versions are
not measured again, so a second run takes only seconds. If arguments cannot be made from their shapes (tables of indices), the
op keeps its default, and the answer states this.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.fuse.spec import Unspoken, spelled
from tilewright.hw.device import device_of
from tilewright.op import Op
from tilewright.ops import ALL
from tilewright.tune import lookup
from tilewright.tune.record import problem_json

__all__ = ["Called", "calls_of", "choices", "tune"]

_OPS = {op.name: op for op in ALL}


@dataclass(frozen=True)
class Called:
    """An op with certain arguments, and the number of its calls in a run."""

    op: Op
    args: tuple[Any, ...]
    """The arguments, with tensors on the meta device."""
    problem: Any
    text: str
    """The problem as text, as in the rows of the database."""
    index: int
    """Index of the CUDA device; negative for a CPU."""
    count: int


class _Listener(TorchDispatchMode):
    """Records every call of our ops, and runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], Called] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilewright":
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        op = _OPS[func._schema.name.split("::")[1]]
        whole = (*args, *(argument.default_value for argument in func._schema.arguments[len(args) :]))
        problem = op.problem(*whole)
        text = problem_json(problem)
        before = self.found.get((op.name, text))
        count = before.count + 1 if before else 1
        self.found[op.name, text] = Called(op, tuple(_shape_of(a) for a in whole), problem, text, args[0].get_device(), count)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def calls_of(run: Callable[[], Any]) -> list[Called]:
    """The distinct problems of our ops in one run, in order."""
    with torch.inference_mode(), _Listener() as listener:
        run()
    return list(listener.found.values())


def choices(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The choice for each op of a run, and its source: {"op", "problem", "count", "impl", "config", "source", "us"}.

    "source" is "exact" or "bucket" if a measured row decided; its microseconds are then in "us". Otherwise it is "default" or
    "fixed".
    """
    return [
        {
            "op": called.op.name,
            "problem": json.loads(called.text),
            "count": called.count,
            "impl": choice.impl.name,
            "config": dict(choice.config),
            "source": choice.source,
            "us": choice.entry.us if choice.entry else None,
        }
        for called in calls_of(run)
        for choice in [called.op.choose(device_of(called.index), called.problem)]
    ]


def tune(
    run: Callable[[], Any], *, top: int = 6, limit_s: float = 25.0, progress: Callable[[str], None] = lambda words: None
) -> list[dict[str, Any]]:
    """Search for the best implementation and config of every op in a run, on the GPU on which it runs.

    Args:
        run: a function that calls the model once. The call must not be captured in a graph.
        top: number of configs to measure for each problem, in addition to its default and libraries.
        limit_s: time limit in seconds for compiling one config, and for measuring one.
        progress: called with a text that describes the progress of the search.

    Returns:
        One row per problem: {"op", "problem", "how", "best", "us", "notes"}. "how" is "search", "verified again", "known", or
        "refused"; in the last case "notes" contains the reason. Empty if no op runs on a GPU.

    Raises:
        RuntimeError: the search process failed; its output contains the reason.
    """
    wanted, refused = [], []
    for called in calls_of(run):
        if called.index < 0:
            continue
        head = {"op": called.op.name, "problem": json.loads(called.text)}
        try:
            spec = spelled(called.args)
        except Unspoken as reason:
            refused.append({**head, "how": "refused", "best": None, "us": None, "notes": [str(reason)]})
            continue
        wanted.append({"op": called.op.name, "problem": called.text, "arguments": spec})
    answers = _searched(wanted, top, limit_s, progress) if wanted else []
    lookup.refresh()
    for op in ALL:
        op.forget()
    return answers + refused


def _searched(wanted: list[dict[str, Any]], top: int, limit_s: float, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """The answers of `python -m tilewright.fuse.tuner`. This process has no CUDA context, so that it may fork compilers."""
    torch.cuda.empty_cache()
    order = json.dumps({"top": top, "limit_s": limit_s, "wanted": wanted})
    command = [sys.executable, "-m", "tilewright.fuse.tuner", "search"]
    answers = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order)
        process.stdin.close()
        for line in process.stdout:
            said = json.loads(line)
            if "progress" in said:
                progress(said["progress"])
            elif "failed" in said:
                raise RuntimeError(f"tuning: {said['failed']}")
            else:
                answers.append(said)
    if process.returncode:
        raise RuntimeError(
            f"tuning: the searching process ended with exit code {process.returncode}; its error output is above"
        )
    return answers
