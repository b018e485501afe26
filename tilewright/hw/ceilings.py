"""The highest rates of a card: measured, or from its data sheet if the card was not measured.

`ceilings(device)` looks in this order: the user's own measurement (`tilewright hw --measure`, kept in the cache folder), a
measurement of that card shipped with the package, the data sheet. A share of a roofline means little without the roofline's
source, so the answer includes the source.

A measurement is used for cards with the same name, number of SMs and memory. If it lacks a unit, the data sheet's number is
used for this unit, and is marked.

Data sheet numbers are dense tensor-core rates with 32-bit sums (NVIDIA A100, H100, H200, B200, L4, L40S and RTX data sheets).
No kernel reaches them, because clocks fall under load. Data sheets do not state L2 bandwidth: those numbers are estimates.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tilewright.hw import env
from tilewright.hw.device import Device, card_slug

__all__ = ["Ceilings", "ceilings", "data_sheet", "folder", "path_of", "read", "save", "write_json"]

SHIPPED = Path(__file__).with_name("ceilings_of")
_SCHEMA = 1
_LARGEST_FILE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Bytes and operations per second. A missing unit is one that the card does not have."""

    copy: float
    """Device memory: bytes read plus bytes written per second."""
    read: float
    write: float
    l2: float
    """A copy that stays in L2: bytes read plus bytes written per second."""
    flops: dict[str, float]
    """Operations per second, an FMA counted as two: "bf16", "fp16", "tf32", "fp8", "int8" (tensor cores), "fp32" (others)."""
    source: str
    """"measured <date> on <card>, <clocks>" or "data sheet of <card>"."""
    unmeasured: tuple[str, ...] = ()
    """Units of `flops` whose number is from the data sheet, although the other units were measured."""

    @property
    def measured(self) -> bool:
        """Whether the ceilings were measured; otherwise they are from the data sheet."""
        return self.source.startswith("measured")

    def source_of(self, what: str) -> str:
        """The source of one number: "copy", "l2" ..., or a unit of `flops`."""
        return "data sheet" if what in self.unmeasured else self.source


def _sheet(
    card: str,
    bandwidth_tb: float,
    l2_tb: float,
    fp16: float,
    *,
    fp32: float,
    fp8: float | None = None,
    int8: float | None = None,
) -> Ceilings:
    tera = {"bf16": fp16, "fp16": fp16, "tf32": fp16 / 2, "fp32": fp32, "int8": int8 or 2 * fp16, "fp8": fp8}
    memory = bandwidth_tb * 1e12
    return Ceilings(
        copy=memory,
        read=memory,
        write=memory,
        l2=l2_tb * 1e12,
        flops={unit: value * 1e12 for unit, value in tera.items() if value is not None},
        source=f"data sheet of {card}",
    )


_SHEETS = {
    "a100": _sheet("A100 SXM 80GB", 2.04, 5.0, 312, fp32=19.5),
    "a100-pcie": _sheet("A100 PCIe 80GB", 1.94, 5.0, 312, fp32=19.5),
    "a10": _sheet("A10", 0.60, 2.0, 125, fp32=31),
    "l4": _sheet("L4", 0.30, 1.5, 121, fp8=242, fp32=30),
    "l40s": _sheet("L40S", 0.86, 4.0, 362, fp8=733, int8=733, fp32=92),
    "rtx-4090": _sheet("RTX 4090", 1.01, 4.0, 165, fp8=330, int8=661, fp32=83),
    "rtx-5090": _sheet("RTX 5090", 1.79, 6.0, 210, fp8=419, int8=838, fp32=105),
    "h100": _sheet("H100 SXM", 3.35, 7.0, 989, fp8=1979, fp32=67),
    "h100-pcie": _sheet("H100 PCIe", 2.04, 5.5, 756, fp8=1513, fp32=51),
    "h100-nvl": _sheet("H100 NVL", 3.94, 6.5, 835, fp8=1671, fp32=60),
    "h200": _sheet("H200 SXM", 4.80, 7.0, 989, fp8=1979, fp32=67),
    "h200-nvl": _sheet("H200 NVL", 4.80, 6.5, 835, fp8=1671, fp32=60),
    "b200": _sheet("B200", 8.00, 12.0, 2250, fp8=4500, fp32=75),
}
# A card without a data sheet here is treated as this card of its architecture.
_BY_ARCH = {80: "a100", 86: "a10", 87: "a10", 89: "l4", 90: "h100", 100: "b200", 103: "b200", 120: "rtx-5090"}


@cache
def ceilings(device: Device) -> Ceilings:
    """The ceilings of a card, measured if possible. Reads one small file, once per process.

    Raises:
        ValueError: the device is not a GPU, there are no data for it, or its measurement file is invalid (delete it, or measure
            again).
    """
    if device.arch == 0:
        raise ValueError(f"ceilings: needs a GPU, got {device.name}; to use another machine's card, pass e.g. `--card h100`")
    slug, sheet = card_slug(device.name), data_sheet(device)
    for place in (folder(), SHIPPED):
        path = place / f"{slug}.json"
        if path.is_file():
            measured, facts = read(path)
            if _same_model(facts, device):
                return _completed(measured, sheet)
    if sheet is None:
        raise ValueError(f"ceilings: no data sheet for sm_{device.arch} ({device.name}); measure it: tilewright hw --measure")
    return sheet


def data_sheet(device: Device) -> Ceilings | None:
    """The data sheet of a card, even if the card was measured: published MFU figures refer to it. None: there is none."""
    return _SHEETS.get(card_slug(device.name)) or _SHEETS.get(_BY_ARCH.get(device.arch, ""))


def folder() -> Path:
    """The folder of this user's measurements."""
    return env.cache_dir() / "ceilings"


def path_of(device: Device) -> Path:
    """The file with the measurement of this card."""
    return folder() / f"{card_slug(device.name)}.json"


def _same_model(facts: dict[str, int], device: Device) -> bool:
    """Whether a measurement fits this card: an A100 has 40 or 80 GB, and a MIG slice has fewer SMs."""
    memory = facts.get("memory_bytes", device.memory_bytes)
    return facts.get("sms", device.sms) == device.sms and abs(memory - device.memory_bytes) <= 0.1 * device.memory_bytes


def _completed(measured: Ceilings, sheet: Ceilings | None) -> Ceilings:
    more = {unit: value for unit, value in sheet.flops.items() if unit not in measured.flops} if sheet else {}
    return replace(measured, flops={**measured.flops, **more}, unmeasured=tuple(more))


def read(path: Path) -> tuple[Ceilings, dict[str, int]]:
    """A file's ceilings, and its card's "sms" and "memory_bytes". Raises ValueError, with a remedy, if the file is invalid."""
    help = "delete it, or measure again: tilewright hw --measure"
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, wanted at most {_LARGEST_FILE}; {help}")
    try:
        found = json.loads(path.read_text())
        if found["schema"] != _SCHEMA:
            raise ValueError(f"schema {found['schema']}, wanted {_SCHEMA}")
        c = found["ceilings"]
        made = Ceilings(
            copy=float(c["copy"]),
            read=float(c["read"]),
            write=float(c["write"]),
            l2=float(c["l2"]),
            flops={unit: float(value) for unit, value in c["flops"].items()},
            source=str(c["source"]),
        )
        facts = {name: int(found[name]) for name in ("sms", "memory_bytes") if name in found}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a measurement of ceilings ({error}); {help}") from error
    if not all(0 < value < math.inf for value in (made.copy, made.read, made.write, made.l2, *made.flops.values())):
        raise ValueError(f"{path}: a ceiling that is not a positive number; {help}")
    return made, facts


def save(found: Ceilings, path: Path, facts: dict[str, Any]) -> None:
    """Write a measurement and its conditions (device, versions, clocks, failures). Raises OSError."""
    written = {name: value for name, value in asdict(found).items() if name != "unmeasured"}
    write_json(path, {"schema": _SCHEMA, "ceilings": written, **facts})
    ceilings.cache_clear()


def write_json(path: Path, content: Any) -> None:
    """Write a file atomically: a concurrent reader sees the old or the new content, complete. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
        beside = Path(file.name)
        try:
            file.write(json.dumps(content, indent=1) + "\n")
            file.close()
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
