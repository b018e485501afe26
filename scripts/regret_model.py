"""The regret study as arrays: what the analytical model says of every measured candidate, fast enough to fit constants."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import regret_cases as cases
import torch

from tilewright.hw.ceilings import Ceilings, ceilings
from tilewright.hw.device import Device, device_named
from tilewright.op import Impl, Op
from tilewright.ops import ALL
from tilewright.tune.constants import Constants
from tilewright.tune.model import Held, Work, seconds_of

__all__ = ["Study", "arguments", "op_named"]

_EXACT = tuple(field for field in Work._fields if field not in ("unit", "library"))


def op_named(name: str) -> Op:
    """The op of a case."""
    return next(op for op in ALL if op.name == name)


def arguments(case: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a case on meta tensors, but with its lengths in attention, which a measurement had too."""
    args = cases.arguments(case, "meta")
    if case["op"] != "paged_attention":
        return args
    lengths = cases.lengths_of(case["lengths"])
    ends = np.cumsum([0, *(queries for queries, _ in lengths)])
    return (*args[:4], torch.tensor([keys for _, keys in lengths]), torch.from_numpy(ends), *args[6:])


class _Group(NamedTuple):
    """The candidates of one implementation in a case."""

    work: Work
    held: Held


class Study:
    """All measured candidates in one order: case after case, `case[i]` the number of the case of candidate i."""

    def __init__(self, rows: Sequence[dict[str, Any]], card: str = "h100"):
        self.device: Device = device_named(card)
        self.ceilings: Ceilings = ceilings(self.device)
        by_case: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            # What was measured of an implementation that is no more says nothing of what a choice costs today.
            if row["impl"] in {impl.name for impl in op_named(row["op"]).impls}:
                by_case.setdefault((row["op"], row["label"]), {}).setdefault(row["impl"], []).append(row)
        self.keys = list(by_case)
        self.rows: list[dict[str, Any]] = []
        case, works, held = [], [], []
        for number, ((op_name, _), impls) in enumerate(by_case.items()):
            for name, members in impls.items():
                group = self._group(op_name, name, members)
                self.rows += members
                case += [number] * len(members)
                works.append([np.broadcast_to(np.asarray(getattr(group.work, f), float), len(members)) for f in _EXACT])
                held.append([np.broadcast_to(np.asarray(v, float), len(members)) for v in group.held])
        self.case = np.array(case)
        self.us = np.array([row["us"] for row in self.rows])
        self.library = np.array([row["impl"] == "vendor" for row in self.rows])
        columns = [np.concatenate(column) for column in zip(*works, strict=True)]
        self.work = Work(**dict(zip(_EXACT, columns, strict=True)), unit="bf16")
        self.held = Held(*(np.concatenate(column) for column in zip(*held, strict=True)))
        self.best = np.array([self.us[self.case == i].min() for i in range(len(self.keys))])
        self.places = self._grid()

    def _group(self, op_name: str, impl_name: str, members: list[dict[str, Any]]) -> _Group:
        op = op_named(op_name)
        impl: Impl = next(impl for impl in op.impls if impl.name == impl_name)
        case = {"op": op_name, **members[0]["dims"]}
        args = arguments(case)
        assert impl.work is not None
        config = {name: np.array([row["config"][name] for row in members]) for name in members[0]["config"]}
        facts = [row["resources"] or {"warps": 4, "blocks_per_sm": 1, "spill_bytes": 0} for row in members]
        held = Held(*(np.array([f[name] for f in facts]) for name in ("warps", "blocks_per_sm", "spill_bytes")))
        return _Group(impl.work(self.device, config, *args), held)

    def _grid(self) -> np.ndarray:
        """[case, place] -> candidate, each case's padded with its first one."""
        members = [np.flatnonzero(self.case == i) for i in range(len(self.keys))]
        widest = max(map(len, members))
        return np.array([np.concatenate([m, np.full(widest - len(m), m[0])]) for m in members])

    def predicted_us(self, constants: Constants) -> np.ndarray:
        """The model's time of each candidate."""
        work = self.work._replace(library=self.library)
        return 1e6 * seconds_of(work, self.held, self.device, self.ceilings, constants)

    def regret(self, predicted_us: np.ndarray, top: int = 1) -> np.ndarray:
        """[case]: what the best of the first `top` loses, a library being always one of them when there is more than one."""
        first = np.array(predicted_us)
        if top > 1:
            first[self.library] = 0.0
        found = []
        for i in range(len(self.keys)):
            members = np.flatnonzero(self.case == i)
            chosen = members[np.argsort(first[members], kind="stable")[:top]]
            found.append(self.us[chosen].min() / self.best[i] - 1)
        return np.array(found)
