"""Compare what every kernel compiles to under several versions of Triton: `python scripts/certify_all.py [op ...]`.

    --versions 3.6.0,3.7.1,3.9.0   versions to compare; the installed one is used as it is, the others are installed by pip
                                   (the wheel alone, several hundred MB each) in .data/triton/<version>
    --spaces                       compile the config spaces too, not only the examples; takes some minutes per version
    --jobs N                       number of processes

Prints the capability flags of each version, then every case in which the versions differ in something that matters: whether it
compiles, spills, blocks per SM, tensor-core and TMA instructions, the widest vectors. Certificates are written to
.data/certificates/<version>.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
UNITS = ("mma", "wgmma", "tcgen05", "tma_loads", "tma_stores")
FLAGS = """
import json, dataclasses
from tilewright.asm.features import features
print(json.dumps(dataclasses.asdict(features())))
"""


def environment(version: str) -> dict[str, str]:
    """The process environment in which `import triton` gives that version, which is installed first if need be."""
    if version == triton.__version__:
        return dict(os.environ)
    folder = ROOT / ".data/triton" / version
    if not (folder / f"triton-{version}.dist-info").exists():
        print(f"installing triton {version} into {folder}", file=sys.stderr, flush=True)
        pip = (
            sys.executable,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "-q",
            "--no-deps",
            "--target",
            str(folder),
        )
        if subprocess.run([*pip, f"triton=={version}"]).returncode:
            sys.exit(f"pip has no triton {version} for this machine; `pip index versions triton` lists those that there are")
    return {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def certify(version: str, ops: list[str], jobs: int, spaces: bool) -> dict[str, Any]:
    """Op -> its certificate under a version."""
    out = ROOT / ".data/certificates" / version
    command = [sys.executable, str(ROOT / "scripts/certify.py"), *ops, "--out", str(out), "--jobs", str(jobs)]
    log = subprocess.run(
        command if spaces else [*command, "--cases"], env=environment(version), cwd=ROOT, capture_output=True, text=True
    )
    if log.returncode:
        sys.exit(f"certify under triton {version} failed:\n{log.stdout}{log.stderr}")
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if not ops or path.stem in ops}
    wrong = {certificate["triton"] for certificate in found.values()} - {version}
    if wrong:
        sys.exit(f"certify under triton {version} ran {', '.join(wrong)}: is another triton before it on PYTHONPATH?")
    return found


def entries(certificate: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, case) of every case and config."""
    yield from certificate["cases"].items()
    for place, rows in certificate["configs"].items():
        for row in rows:
            yield f"{place} {' '.join(f'{k}={v}' for k, v in row['config'].items())} at {row['at']}", row


def summary(case: Mapping[str, Any] | None) -> str:
    """What matters of a case, as one cell; equal cells are equal enough."""
    if case is None:
        return "-"
    if "kernels" not in case:
        return "refused" if "refused" in case else str(case["error"])
    return "; ".join(_kernel(kernel) for kernel in case["kernels"])


def _kernel(kernel: Mapping[str, Any]) -> str:
    words = [f"{kernel['blocks_per_sm']} blocks"]
    words += [f"{kernel['spill_bytes']} spilled"] if kernel.get("spill_bytes") else []
    words += [unit.replace("_", " ") for unit in UNITS if unit in kernel]
    words += ["serialised"] if kernel.get("wgmma_serialised") else []
    if kernel.get("loads") or kernel.get("stores"):
        widest = (max(map(int, kernel.get(way, {})), default=0) for way in ("loads", "stores"))
        words.append("vectors " + "/".join(map(str, widest)))
    return ", ".join(words)


def main() -> None:
    """Certify under every version and print where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="op")
    parser.add_argument("--versions", default="3.6.0,3.7.1,3.9.0")
    parser.add_argument("--spaces", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    versions = given.versions.split(",")
    console = Console(width=None if sys.stdout.isatty() else 200)

    flags = Table("", *versions, title="what Gluon has")
    asked = [json.loads(subprocess.check_output([sys.executable, "-c", FLAGS], env=environment(v), cwd=ROOT)) for v in versions]
    for name in asked[0]:
        flags.add_row(name.replace("_", " "), *("yes" if there[name] else "no" for there in asked))
    console.print(flags)

    found = {version: certify(version, given.ops, given.jobs, given.spaces) for version in versions}
    table = Table("case", *versions, title="where they differ")
    same = 0
    for op in dict.fromkeys(op for certificates in found.values() for op in certificates):
        held = [dict(entries(found[version][op])) if op in found[version] else {} for version in versions]
        for name in dict.fromkeys(name for cases in held for name in cases):
            cells = [summary(cases.get(name)) for cases in held]
            if len(set(cells)) == 1:
                same += 1
            else:
                table.add_row(f"{op} {name}", *cells)
    console.print(table if table.row_count else "no case differs")
    console.print(f"{same} cases are the same in {', '.join(versions)}; {table.row_count} differ")


if __name__ == "__main__":
    main()
