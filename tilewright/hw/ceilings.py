"""The most that a card can do, as measured on it where somebody has, else as its maker says.

`ceilings(device)` reads, in this order: the user's own measurement (`tilewright hw --measure`, kept in the cache folder), a
measurement of that card shipped with the package, the data sheet. A share of a roofline means little without knowing which
it was, so the answer carries its source.

Data sheet numbers are dense tensor-core rates (NVIDIA A100, H100, H200, B200, L4, L40S and RTX data sheets); no kernel reaches
them, because clocks fall under load.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.hw import env
from tilewright.hw.device import Device, card_slug

__all__ = ["Ceilings", "ceilings", "path_of", "read", "save"]

SHIPPED = Path(__file__).with_name("ceilings_of")
_SCHEMA = 1
_LARGEST_FILE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Bytes and operations a second. A missing unit is one that the card does not have."""

    copy: float
    """Device memory, bytes read plus bytes written."""
    read: float
    write: float
    l2: float
    """A copy that stays in L2, bytes read plus bytes written."""
    flops: dict[str, float]
    """Operations a second, an FMA as two: "bf16", "fp16", "tf32", "fp8", "int8" (tensor cores), "fp32" (the others)."""
    source: str
    """"measured <date> on <card>, <clocks>" or "data sheet of <card>"."""

    @property
    def measured(self) -> bool:
        """Whether somebody measured them, rather than the maker."""
        return self.source.startswith("measured")


def _sheet(
    bandwidth_tb: float, l2_tb: float, fp16: float, *, fp8: float = 0, tf32: float = 0, fp32: float, int8: float = 0
) -> Any:
    t = 1e12
    flops = {
        "bf16": fp16 * t,
        "fp16": fp16 * t,
        "tf32": (tf32 or fp16 / 2) * t,
        "fp32": fp32 * t,
        "int8": (int8 or 2 * fp16) * t,
    }
    if fp8:
        flops["fp8"] = fp8 * t
    return bandwidth_tb * t, l2_tb * t, flops


_SHEETS = {
    "a100": _sheet(2.04, 5.0, 312, fp32=19.5),
    "l4": _sheet(0.30, 1.5, 121, fp8=242, fp32=30),
    "l40s": _sheet(0.86, 4.0, 362, fp8=733, fp32=92),
    "a10": _sheet(0.60, 2.0, 125, fp32=31),
    "rtx-4090": _sheet(1.01, 4.0, 165, fp8=330, fp32=83),
    "rtx-5090": _sheet(1.79, 6.0, 210, fp8=419, fp32=105),
    "h100": _sheet(3.35, 7.0, 989, fp8=1979, fp32=67),
    "h200": _sheet(4.80, 7.0, 989, fp8=1979, fp32=67),
    "b200": _sheet(8.00, 12.0, 2250, fp8=4500, fp32=75),
}
# A card that no sheet names is taken for the first of its architecture.
_BY_ARCH = {80: "a100", 86: "a10", 87: "a10", 89: "l4", 90: "h100", 100: "b200", 103: "b200", 120: "rtx-5090"}


@cache
def ceilings(device: Device) -> Ceilings:
    """The ceilings of a card, measured if possible. Reads one small file, once a process.

    Raises:
        ValueError: the device is no GPU, or its measurement file is not one (delete it, or measure again).
    """
    if device.arch == 0:
        raise ValueError(f"ceilings: got {device.name}, wanted a GPU; `--card h100` speaks of one that is not here")
    slug = card_slug(device.name)
    for folder in (_folder(), SHIPPED):
        path = folder / f"{slug}.json"
        if path.is_file():
            return read(path)
    known = slug if slug in _SHEETS else _BY_ARCH.get(device.arch)
    if known is None:
        raise ValueError(f"ceilings: no data sheet for sm_{device.arch} ({device.name}); measure it: tilewright hw --measure")
    bandwidth, l2, flops = _SHEETS[known]
    return Ceilings(copy=bandwidth, read=bandwidth, write=bandwidth, l2=l2, flops=flops, source=f"data sheet of {known}")


def path_of(device: Device) -> Path:
    """Where a measurement of this card is kept."""
    return _folder() / f"{card_slug(device.name)}.json"


def _folder() -> Path:
    return env.cache_dir() / "ceilings"


def read(path: Path) -> Ceilings:
    """A measurement file. Raises ValueError, naming the file and what to do, when it is not one."""
    help = "delete it, or measure again: tilewright hw --measure"
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, wanted at most {_LARGEST_FILE}; {help}")
    try:
        found = json.loads(path.read_text())
        if found["schema"] != _SCHEMA:
            raise ValueError(f"{path}: schema {found['schema']}, wanted {_SCHEMA}; {help}")
        c = found["ceilings"]
        numbers = {name: float(c[name]) for name in ("copy", "read", "write", "l2")}
        made = Ceilings(**numbers, flops={k: float(v) for k, v in c["flops"].items()}, source=str(c["source"]))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a measurement of ceilings ({error}); {help}") from error
    if not all(v > 0 for v in [*numbers.values(), *made.flops.values()]):
        raise ValueError(f"{path}: a ceiling that is not positive; {help}")
    return made


def save(found: Ceilings, path: Path, facts: dict[str, Any]) -> None:
    """Write a measurement with what must stand beside it (device, driver, versions, clocks, failures), atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": _SCHEMA, "ceilings": asdict(found), **facts}, indent=1) + "\n"
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)
    ceilings.cache_clear()
