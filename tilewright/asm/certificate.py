"""Certificates: what the kernels of every op compile to on every card, kept in git and compared without a GPU.

One JSON file an op, one line a case: `implementation/example/sm_90` -> the default config and the facts of every kernel that
the call launches, or the reason why it cannot run there. `certify` compiles them, `regressions` says in words what got worse:
a case that no longer compiles, spilled registers, tensor-core or TMA instructions that vanished, narrower vectors. Register
counts and instruction counts move with every compiler version; they are in the file to be read, not compared.

Implementations that call a vendor library launch no Triton kernel and have no case. Not certified: configs other than the
default, and problems other than the op's examples.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from tilewright.asm.compile import CARDS, Binary, CompileFailed, record
from tilewright.asm.facts import facts, ptxas_version

__all__ = ["FOLDER", "Certificate", "certify", "load", "regressions", "save"]

FOLDER = Path(__file__).with_name("certificates")

Certificate = dict[str, Any]
"""{"op", "triton", "ptxas", "cases"}; a case is {"config", "kernels"}, {"config", "error"} or {"refused"}."""


def certify(op: Any, inputs: Any, archs: Iterable[int] = tuple(CARDS), labels: Iterable[str] | None = None) -> Certificate:
    """Compile an op's examples with every implementation for every architecture.

    Args:
        op: a `tilewright.op.Op`.
        inputs: () -> a fresh `tilewright.op.Inputs`, what the examples draw their arguments from.
        archs: of `tilewright.asm.compile.CARDS`.
        labels: only the examples with these labels; all by default.

    Raises:
        RuntimeError: Triton interprets kernels in this process.
    """
    archs = tuple(archs)
    cases = {}
    for example in op.examples:
        if labels is not None and example.label not in labels:
            continue
        args = example.make(inputs())
        for impl in op.impls:
            for arch in archs:
                case = _case(op, impl, args, arch)
                if case is not None:
                    cases[f"{impl.name}/{example.label}/sm_{arch}"] = case
    ptxas = {f"sm_{arch}": ptxas_version(arch) for arch in archs}
    return {"op": op.name, "triton": triton.__version__, "ptxas": ptxas, "cases": cases}


def _case(op: Any, impl: Any, args: tuple[Any, ...], arch: int) -> dict[str, Any] | None:
    card, problem = CARDS[arch], op.problem(*args)
    if reason := impl.refusal(card, problem):
        return {"refused": reason}
    choices = impl.space.default(card, problem)
    config = json.loads(json.dumps(dict(choices)))
    try:
        binaries = record(impl, choices, args, arch)
    except CompileFailed as error:
        return {"config": config, "error": str(error)}
    for binary in binaries:
        if binary.shared_bytes > card.smem_bytes:
            wanted = f"{binary.kernel} needs {binary.shared_bytes} bytes of shared memory, sm_{arch} has {card.smem_bytes}"
            return {"config": config, "error": wanted}
    return {"config": config, "kernels": [_facts(b) for b in binaries]} if binaries else None


_FACTS: dict[str, dict[str, Any]] = {}


def _facts(binary: Binary) -> dict[str, Any]:
    """The facts as JSON has them, without the zeros; examples that share a kernel share them too."""
    if binary.key not in _FACTS:
        found = asdict(facts(binary))
        _FACTS[binary.key] = json.loads(json.dumps({name: value for name, value in found.items() if value}))
    return _FACTS[binary.key]


def save(certificate: Certificate, folder: Path = FOLDER) -> Path:
    """Write `<folder>/<op>.json`, one case a line so that git shows what moved. A fact that is absent is 0."""
    head = "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in certificate.items() if k != "cases")
    body = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in certificate["cases"].items())
    path = folder / f"{certificate['op']}.json"
    path.write_text(f'{{\n{head}"cases": {{\n{body}\n}}\n}}\n')
    return path


def load(name: str, folder: Path = FOLDER) -> Certificate:
    """The certificate of an op. Raises FileNotFoundError with what to do when it has none."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{name} has no certificate: got no {path}; write it with `make certify` and commit it")
    return json.loads(path.read_text())


def regressions(old: Certificate, new: Certificate) -> list[str]:
    """What is worse in `new`, or no longer what was certified: one sentence a finding, none when all is well.

    Cases that only `old` has are not looked at, so that `new` may be a sample.
    """
    findings = []
    for name, case in new["cases"].items():
        was = old["cases"].get(name)
        if was is None:
            findings.append(f"{name}: is not certified")
        else:
            findings += [f"{name}: {finding}" for finding in _worse(was, case)]
    return [f"{new['op']} {finding}" for finding in findings]


def _worse(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if "kernels" not in now:
        # What it could not do before it need not do now.
        return [f"ran, now {now.get('refused') or now.get('error')}"] if "kernels" in was else []
    if "kernels" not in was:
        return [f"runs now, certified as {was.get('refused') or was.get('error')}"]
    findings = []
    if was["config"] != now["config"]:
        keys = sorted(k for k in {**was["config"], **now["config"]} if was["config"].get(k) != now["config"].get(k))
        changes = ", ".join(f"{key} {was['config'].get(key)} -> {now['config'].get(key)}" for key in keys)
        findings.append(f"default config has changed: {changes}")
    names = [[kernel["kernel"] for kernel in case["kernels"]] for case in (was, now)]
    if names[0] != names[1]:
        return [*findings, f"launched {', '.join(names[0])}, now {', '.join(names[1])}"]
    for before, after in zip(was["kernels"], now["kernels"]):
        findings += [f"{after['kernel']} {finding}" for finding in _worse_kernel(before, after)]
    return findings


# Instructions by which a kernel stands or falls: fewer is a matter of unrolling, none is another kernel.
_VITAL = {"mma": "mma", "wgmma": "wgmma", "tcgen05": "tcgen05 mma", "tma_loads": "TMA load", "tma_stores": "TMA store"}


def _worse_kernel(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    findings = []
    for field in ("spill_bytes", "local_bytes"):
        was, now = before.get(field, 0), after.get(field, 0)
        if now > was:
            findings.append(f"{field} {was} -> {now} ({after['registers']} registers)")
    for field, word in _VITAL.items():
        if field in before and field not in after:
            findings.append(f"had {before[field]} {word} instructions, now none")
    if "wgmma_serialised" in after and "wgmma_serialised" not in before:
        findings.append("wgmma instructions are serialised")
    for field in ("loads", "stores"):
        was, now = (max(map(int, kernel.get(field, ())), default=0) for kernel in (before, after))
        if now < was:
            findings.append(f"widest of the global {field}: {was} -> {now} bytes")
    return findings
