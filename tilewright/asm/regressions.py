"""Lists what has become worse between two certificates, as text.

Worse means: a case or config that no longer compiles, spilled registers, fewer blocks on an SM, missing tensor-core or TMA
instructions, wgmma that ptxas serialises, narrower vectors. Register and instruction counts change with every compiler version;
they are in the file for information, and are not compared.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright.asm.certificate import Certificate, config_key

__all__ = ["regressions"]


def regressions(old: Certificate, new: Certificate) -> list[str]:
    """Sentences about everything that is worse in `new`, or no longer as certified; empty if all is well.

    Cases and configs that only `old` has are ignored, so that `new` may be a sample.
    """
    found = []
    for name, case in new["cases"].items():
        found += [f"{new['op']} {name}: {finding}" for finding in _findings(old["cases"].get(name), case)]
    for place, rows in new["configs"].items():
        held = {_identity(row): row for row in old["configs"].get(place, ())}
        for row in rows:
            where = f"{new['op']} {place} {_words(row['config'])} at {row['at']}"
            found += [f"{where}: {finding}" for finding in _findings(held.get(_identity(row)), row)]
    return found


def _identity(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["at"], config_key(row["config"])


def _words(config: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _findings(was: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    return ["is not certified"] if was is None else list(_worse(was, now))


def _worse(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if "kernels" not in now:
        # If it did not run before, it need not run now.
        if "kernels" in was:
            yield f"ran, now {now.get('refused') or now.get('error')}"
        return
    if "kernels" not in was:
        yield f"runs now, certified as {was.get('refused') or was.get('error')}"
        return
    if was["config"] != now["config"]:
        keys = sorted(k for k in {**was["config"], **now["config"]} if was["config"].get(k) != now["config"].get(k))
        changes = ", ".join(f"{key} {was['config'].get(key)} -> {now['config'].get(key)}" for key in keys)
        yield f"default config has changed: {changes}"
    names = [[kernel["kernel"] for kernel in case["kernels"]] for case in (was, now)]
    if names[0] != names[1]:
        yield f"launched {', '.join(names[0])}, now {', '.join(names[1])}"
        return
    for before, after in zip(was["kernels"], now["kernels"], strict=True):
        yield from (f"{after['kernel']} {finding}" for finding in _worse_kernel(before, after))


# Instructions that are essential for a kernel: their number depends on unrolling, but none at all means another kernel.
_VITAL = {"mma": "mma", "wgmma": "wgmma", "tcgen05": "tcgen05 mma", "tma_loads": "TMA load", "tma_stores": "TMA store"}


def _worse_kernel(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in ("spill_bytes", "local_bytes"):
        was, now = before.get(name, 0), after.get(name, 0)
        if now > was:
            yield f"{name} {was} -> {now} ({after['registers']} registers)"
    was, now = before.get("blocks_per_sm", 0), after.get("blocks_per_sm", 0)
    if now < was:
        yield f"blocks an SM {was} -> {now}, limited by {after['limiter']} ({_needs(before)}, now {_needs(after)})"
    for name, word in _VITAL.items():
        if name in before and name not in after:
            yield f"had {before[name]} {word} instructions, now none"
    if "wgmma_serialised" in after and "wgmma_serialised" not in before:
        yield "wgmma instructions are serialised"
    for name in ("loads", "stores"):
        was, now = (max(map(int, kernel.get(name, ())), default=0) for kernel in (before, after))
        if now < was:
            yield f"widest of the global {name}: {was} -> {now} bytes"


def _needs(kernel: Mapping[str, Any]) -> str:
    return f"{kernel['registers']} registers, {kernel.get('shared_bytes', 0)} bytes shared, {kernel['warps']} warps"
