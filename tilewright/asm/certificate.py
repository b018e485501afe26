"""Certificates: the compilation results of all kernels of an op for every card, kept in git and read without a compiler.

There is one JSON file per op, with two parts. `cases`: implementation/example/sm_90 -> the default config and the facts of
every kernel that the call launches, or the reason why it cannot run there. `configs`: implementation/sm_90 -> every config of
the whole space, one line each, with the facts that decide whether it is worth a measurement (registers, spills, shared memory,
blocks per SM), or why it does not compile. `tilewright.asm.certify` writes them; `tilewright.asm.regressions` finds what has
become worse.

A config is certified on a few representative problems (`tilewright.asm.representatives`), in bf16 if the space does not depend
on the dtype. Its facts on another problem of the same kernel are similar, but not equal.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "Certificate", "ConfigFacts", "config_facts", "config_key", "load", "save"]

FOLDER = Path(__file__).with_name("certificates")

Certificate = dict[str, Any]
"""{"op", "triton", "ptxas", "cases", "configs"}.

A case is {"config", "kernels"}, {"config", "error"} or {"refused"}; `configs` holds lists of {"at", "config", "kernels"} and
{"at", "config", "error"}, where "at" names the representative. A kernel's fact that is absent is 0, "" or false.
"""


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """One config of one implementation on one architecture: the worst of the kernels that it launched when it was certified."""

    warps: int
    """Warps of a block of the first kernel."""
    registers: int
    """Registers of a thread, the maximum over the kernels."""
    spill_bytes: int
    shared_bytes: int
    """Dynamic shared memory of a block in bytes, the maximum over the kernels."""
    blocks_per_sm: int
    """Blocks that fit on an SM at once, the minimum over the kernels."""
    limiter: str
    """The resource that limits the blocks of that kernel: "registers", "shared memory", "warps" or "blocks"; or "too big"."""
    error: str | None
    """The reason why it does not compile or cannot be launched; all numbers are 0 then."""


def config_key(config: Mapping[str, Any]) -> str:
    """A config as one string that does not depend on the order of its choices: sorted JSON."""
    return json.dumps(dict(config), sort_keys=True)


@cache
def config_facts(op_name: str, impl_name: str, arch: int) -> Mapping[str, ConfigFacts]:
    """`config_key` -> facts of every certified config; empty when the op, implementation or architecture has none.

    Reads the op's file once, then costs a dictionary look-up. Architectures without a certificate of their own take that of
    the nearest one below in the same family (sm_86 and sm_89 that of sm_80, sm_103 that of sm_100) with its numbers as they
    are: registers differ little, shared memory and blocks an SM do, so ask `tilewright.hw.occupancy` for those.
    """
    try:
        held = _read(op_name)["configs"]
    except FileNotFoundError:
        return {}
    rows = held.get(f"{impl_name}/sm_{_CERTIFIED_AS.get(arch, arch)}", ())
    return {config_key(row["config"]): _config_facts(row) for row in rows}


_CERTIFIED_AS = {86: 80, 87: 80, 89: 80, 103: 100}
_read = cache(lambda name: load(name))


def _config_facts(row: Mapping[str, Any]) -> ConfigFacts:
    """The facts of a config's line."""
    kernels = row.get("kernels")
    if not kernels:
        return ConfigFacts(warps=0, registers=0, spill_bytes=0, shared_bytes=0, blocks_per_sm=0, limiter="", error=row["error"])
    least = min(kernels, key=lambda kernel: kernel["blocks_per_sm"])
    return ConfigFacts(
        warps=kernels[0]["warps"],
        registers=max(kernel["registers"] for kernel in kernels),
        spill_bytes=max(kernel.get("spill_bytes", 0) for kernel in kernels),
        shared_bytes=max(kernel.get("shared_bytes", 0) for kernel in kernels),
        blocks_per_sm=least["blocks_per_sm"],
        limiter=least["limiter"],
        error=None,
    )


def save(certificate: Certificate, folder: Path = FOLDER) -> Path:
    """Write `<folder>/<op>.json` with one case or config on each line, so that git shows what has changed."""
    head = "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in certificate.items() if k not in ("cases", "configs"))
    cases = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in certificate["cases"].items())
    spaces = ",\n".join(
        f"{json.dumps(k)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]" for k, rows in certificate["configs"].items()
    )
    path = folder / f"{certificate['op']}.json"
    path.write_text(f'{{\n{head}"cases": {{\n{cases}\n}},\n"configs": {{\n{spaces}\n}}\n}}\n')
    return path


def load(name: str, folder: Path = FOLDER) -> Certificate:
    """Read the certificate of an op. Raises FileNotFoundError if there is none; the message says how to make it."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{name} has no certificate: there is no {path}; write it with `make certify` and commit it")
    return json.loads(path.read_text())
