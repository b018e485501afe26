"""Writes certificates: compiles an op's examples, and all configs of its spaces, for cards that need not be present.

A case is an example with the default config, so every implementation and every kind of argument is compiled. A config is
compiled on the first of the op's representatives that accepts it. Tasks run in forked processes, each with a time limit; a
config that makes the compiler run for minutes, or crash, becomes a line in the certificate.

Implementations that call a vendor library launch no Triton kernel and have no case; those without anything to choose have no
configs.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any, NamedTuple

import triton

from tilewright.asm.certificate import Certificate, config_key
from tilewright.asm.compile import Binary, CompileFailed, record
from tilewright.asm.facts import facts, ptxas_version
from tilewright.asm.pool import run_limited
from tilewright.asm.representatives import representatives
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH

__all__ = ["certify", "configs_of", "sampled"]

Keep = Callable[[str, str], bool]
"""(implementation/sm_90, config_key) -> whether to compile that config."""


class _Task(NamedTuple):
    """One case or one config to compile, and its place in the certificate."""

    impl: Any
    args: tuple[Any, ...]
    arch: int
    config: Mapping[str, Any]
    case: str | None
    """The case's name, or None for a config of the space."""
    at: str
    """The representative's label."""


def certify(
    op: Any,
    inputs: Any,
    archs: Iterable[int] = tuple(CARD_OF_ARCH),
    *,
    labels: Iterable[str] | None = None,
    keep: Keep = lambda place, key: True,
    workers: int = 0,
    limit_s: float = 120.0,
) -> Certificate:
    """Compile an op's examples and spaces with every implementation for every architecture.

    Args:
        op: a `tilewright.op.Op`.
        inputs: () -> a new `tilewright.op.Inputs`, from which the examples make their arguments.
        archs: architectures in `tilewright.hw.device.CARD_OF_ARCH`.
        labels: only the examples with these labels; default: all.
        keep: decides which configs to compile; default: all.
        workers: number of processes; 0 compiles in this process, without a time limit.
        limit_s: most seconds for a task.

    Raises:
        RuntimeError: Triton interprets kernels in this process.
    """
    if env.interpreting():
        raise RuntimeError("certify: Triton interprets kernels in this process and compiles none; unset TRITON_INTERPRET")
    archs = tuple(archs)
    cases: dict[str, Any] = {}
    configs: dict[str, list[dict[str, Any]]] = {}
    tasks = [*_cases(op, inputs, archs, labels, cases), *_configs(op, inputs, archs, keep)]
    found: list[dict[str, Any] | None] = [None] * len(tasks)
    for number, value in _outcomes(tasks, workers, limit_s):
        found[number] = value
    for task, value in zip(tasks, found, strict=True):
        if value is None:
            cases.pop(task.case or "", None)
        elif task.case is not None:
            cases[task.case] = {"config": _plain(task.config), **value}
        else:
            row = {"at": task.at, "config": _plain(task.config), **_brief(value)}
            configs.setdefault(_place(task.impl, task.arch), []).append(row)
    ptxas = {f"sm_{arch}": ptxas_version(arch) for arch in archs}
    return {"op": op.name, "triton": triton.__version__, "ptxas": ptxas, "cases": cases, "configs": configs}


def configs_of(op: Any, inputs: Any, archs: Iterable[int] = tuple(CARD_OF_ARCH)) -> dict[str, list[tuple[str, str]]]:
    """implementation/sm_90 -> (representative, config_key) of every config that `certify` would compile; compiles nothing."""
    found: dict[str, list[tuple[str, str]]] = {}
    for task in _configs(op, inputs, tuple(archs), lambda place, key: True):
        found.setdefault(_place(task.impl, task.arch), []).append((task.at, config_key(task.config)))
    return found


def sampled(certificate: Certificate, count: int) -> Keep:
    """Keep `count` configs in each place: of those that are certified without spills, the ones with the lowest hashes.

    So the choice is always the same. Configs that spill or do not compile take longest and can hardly become worse.
    """
    kept = {}
    for place, rows in certificate["configs"].items():
        good = (row for row in rows if not any("spill_bytes" in kernel for kernel in row.get("kernels", ({"spill_bytes": 0},))))
        kept[place] = sorted((config_key(row["config"]) for row in good), key=lambda key: sha256(key.encode()).digest())[:count]
    return lambda place, key: key in kept.get(place, ())


def _cases(
    op: Any, inputs: Any, archs: tuple[int, ...], labels: Iterable[str] | None, cases: dict[str, Any]
) -> Iterator[_Task]:
    """The tasks of the examples. Refusals are recorded immediately, so that the order of the cases is kept."""
    for example in op.examples:
        if labels is not None and example.label not in labels:
            continue
        args = example.make(inputs())
        for impl in op.impls:
            for arch in archs:
                name, problem = f"{impl.name}/{example.label}/sm_{arch}", op.problem(*args)
                if reason := impl.refusal(CARD_OF_ARCH[arch], problem):
                    cases[name] = {"refused": reason}
                else:
                    cases[name] = {}
                    yield _Task(impl, args, arch, impl.space.default(CARD_OF_ARCH[arch], problem), name, example.label)


def _configs(op: Any, inputs: Any, archs: tuple[int, ...], keep: Keep) -> Iterator[_Task]:
    """The tasks of the spaces, in the order of their axes."""
    if not any(impl.space.axes for impl in op.impls):
        return
    problems = [(label, args, op.problem(*args)) for label, args in representatives(op, inputs)]
    for impl in op.impls:
        for arch in archs if impl.space.axes else ():
            taken = set()
            for label, args, problem in problems:
                if impl.refusal(CARD_OF_ARCH[arch], problem):
                    continue
                for config in impl.space.configs(CARD_OF_ARCH[arch], problem):
                    key = config_key(config)
                    if key not in taken and keep(_place(impl, arch), key):
                        yield _Task(impl, args, arch, config, None, label)
                    taken.add(key)


def _outcomes(tasks: list[_Task], workers: int, limit_s: float) -> Iterator[tuple[int, dict[str, Any] | None]]:
    if not workers:
        yield from ((number, _compile(task)) for number, task in enumerate(tasks))
        return
    for outcome in run_limited(lambda number: _compile(tasks[number]), len(tasks), workers=workers, limit_s=limit_s):
        yield outcome.task, outcome.value if outcome.error is None else {"error": f"compiling {outcome.error}"}


def _compile(task: _Task) -> dict[str, Any] | None:
    """{"kernels": ...} or {"error": ...}; None if the launch needs no kernel."""
    try:
        binaries = record(task.impl, task.config, task.args, task.arch)
    except CompileFailed as error:
        return {"error": str(error)}
    available = CARD_OF_ARCH[task.arch].smem_bytes
    for binary in binaries:
        if binary.shared_bytes > available:
            wanted = f"{binary.kernel} needs {binary.shared_bytes} bytes of shared memory, sm_{task.arch} has {available}"
            return {"error": wanted}
    return {"kernels": [_facts(binary) for binary in binaries]} if binaries else None


_FACTS: dict[str, dict[str, Any]] = {}


def _facts(binary: Binary) -> dict[str, Any]:
    """The facts as JSON values, without zeros; they are computed once for tasks with the same kernel."""
    if binary.key not in _FACTS:
        found = _plain(asdict(facts(binary)))
        _FACTS[binary.key] = {k: v for k, v in found.items() if v or k == "blocks_per_sm"}
    return _FACTS[binary.key]


def _brief(value: dict[str, Any]) -> dict[str, Any]:
    """The facts in a config's line. Vector widths are left out: they are in the cases and do not depend on a config."""
    if "kernels" not in value:
        return value
    return {"kernels": [{k: v for k, v in kernel.items() if k not in ("loads", "stores")} for kernel in value["kernels"]]}


def _place(impl: Any, arch: int) -> str:
    return f"{impl.name}/sm_{arch}"


def _plain(value: Any) -> Any:
    """The value as it is read back from JSON: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))
