"""The two processes that `tilewright.fuse.tuning` uses: `python -m tilewright.fuse.tuner search`, which starts `... measure`.

`search` reads one JSON object from stdin, {"top", "limit_s", "wanted": [{"op", "problem", "arguments"}, ...]}. It writes a line
of JSON for each answer, and in between {"progress": text} and {"failed": text}. It does not use the GPU, because it forks
compilers. `measure` uses the GPU. It has the protocol of `tilewright.tune.worker`, and gets its arguments from
`tilewright.fuse.spec`.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.fuse.spec import arguments_of
from tilewright.hw.cpu import cpu
from tilewright.hw.device import device_of
from tilewright.op import Inputs, on_card
from tilewright.ops import ALL
from tilewright.tune.candidates import Task
from tilewright.tune.database import Database, DatabaseError
from tilewright.tune.ground import gpu_ground
from tilewright.tune.measurer import MeasureError, Measurer
from tilewright.tune.offline import compile_all
from tilewright.tune.search import Report, planned, search, settled
from tilewright.tune.worker import serve

__all__ = ["main", "task_of"]

_OPS = {op.name: op for op in ALL}
_KEY = "arguments="
_COMMAND = (sys.executable, "-m", "tilewright.fuse.tuner", "measure")


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def task_of(wanted: dict[str, str], device: Any) -> Task:
    """The search task for a problem. Raises ValueError if the arguments made from the shapes belong to another problem."""
    op = _OPS[wanted["op"]]
    args = arguments_of(wanted["arguments"], Inputs("meta"))
    task = Task(
        op=op, dims={"arguments": wanted["arguments"]}, args=args, device=device, refused=op.refusals(device, op.problem(*args))
    )
    if task.problem_text != wanted["problem"]:
        raise ValueError(f"arguments with these shapes and dtypes belong to another problem: {task.problem_text}")
    return task


def _answer(task: Task, report: Report) -> dict[str, Any]:
    best = report.ranking[0] if report.ranking else None
    return {
        "op": task.op.name,
        "problem": json.loads(task.problem_text),
        "how": report.how,
        "best": best and {"impl": best.impl, "config": json.loads(best.config)},
        "us": best and best.us,
        "notes": report.notes,
    }


def _search() -> None:
    order = json.load(sys.stdin)
    device = device_of(0)
    limits = {"workers": cpu().cores, "limit_s": float(order["limit_s"])}
    tasks = []
    for wanted in order["wanted"]:
        try:
            tasks.append(task_of(wanted, device))
        except ValueError as reason:
            problem = json.loads(wanted["problem"])
            _say(op=wanted["op"], problem=problem, how="refused", best=None, us=None, notes=[str(reason)])
    # on_card: an implementation may call another op (conv calls `linear`). This op must be chosen and compiled for the GPU,
    # exactly as in the measurement.
    with Database() as rows, on_card(device):
        fresh = [task for task in tasks if len(task.impls) and not settled(task, rows)]
        firsts = [(c.impl, c.config, task.args) for task in fresh for c in planned(task, top=order["top"]).first]
        # Compiling for all problems at once keeps all cores busy. Each search then finds its kernels in Triton's cache.
        for done, _ in enumerate(compile_all(firsts, device, **limits)):
            _say(progress=f"compiled {done + 1} of {len(firsts)} configs for {len(fresh)} problems")
        with Measurer(_COMMAND, limit_s=limits["limit_s"]) as measurer:
            for place, task in enumerate(tasks):
                _say(progress=f"measuring {task.op.name}, {place + 1} of {len(tasks)} problems")
                report = search(task, rows, command=_COMMAND, top=order["top"], measurer=measurer, **limits)
                _say(**_answer(task, report))


def _arguments(op: Any, words: Sequence[str], seed: int) -> tuple[Any, ...]:
    return arguments_of(words[0].removeprefix(_KEY), Inputs("cuda", seed, here=True))


def main(role: str) -> None:
    """Run one of the two processes: "search" or "measure"."""
    if role == "measure":
        serve(lambda: gpu_ground(_OPS.__getitem__, _arguments))
        return
    try:
        with torch.inference_mode():
            _search()
    except (MeasureError, DatabaseError) as error:
        _say(failed=str(error))


if __name__ == "__main__":
    main(sys.argv[1])
