"""What the machine can do, as one frozen value per device. The only reader of torch.cuda's device properties."""

import re
from dataclasses import dataclass
from functools import cache

import torch

from tilewright.hw import env

__all__ = [
    "CPU",
    "INTERPRETER",
    "Device",
    "card_slug",
    "cuda_count",
    "default_device",
    "device_of",
    "free_bytes",
    "memory_bytes",
    "pci_id",
]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One processor. `kind` is "cuda", "cpu", or "interpret" (CPU tensors through Triton's interpreter)."""

    kind: str
    name: str
    arch: int = 0
    """Compute capability as one number (90 = sm_90); 0 without a GPU."""
    sms: int = 1
    smem_bytes: int = 0
    """Shared memory that one block can opt in to."""
    l2_bytes: int = 0
    memory_bytes: int = 0

    @property
    def runs_triton(self) -> bool:
        """Whether a Triton kernel can be launched here."""
        return self.kind != "cpu"


CPU = Device(kind="cpu", name="cpu")
# The interpreter imposes no hardware limit; shared memory is that of an H100. Few SMs: a default grid is sized by them.
INTERPRETER = Device(
    kind="interpret", name="triton interpreter", arch=90, sms=132, smem_bytes=232448, l2_bytes=50 << 20, memory_bytes=80 << 30
)


@cache
def device_of(index: int) -> Device:
    """The device with this CUDA index; -1 is the CPU (or Triton's interpreter on it).

    The number is what `Tensor.get_device()` returns, so a call costs one dictionary look-up.
    """
    if index < 0:
        return INTERPRETER if env.interpreting() else CPU
    p = torch.cuda.get_device_properties(index)
    return Device(
        kind="cuda",
        name=p.name,
        arch=10 * p.major + p.minor,
        sms=p.multi_processor_count,
        smem_bytes=getattr(p, "shared_memory_per_block_optin", 0),
        l2_bytes=p.L2_cache_size,
        memory_bytes=p.total_memory,
    )


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def cuda_count() -> int:
    """CUDA devices that can be used."""
    return torch.cuda.device_count()


def pci_id(index: int) -> str:
    """The PCI address of a CUDA device, as the system writes it: "0000:1b:00.0"."""
    p = torch.cuda.get_device_properties(index)
    return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a CUDA device, in bytes."""
    return torch.cuda.mem_get_info(device)[0]


def memory_bytes(device: torch.device) -> int:
    """All memory of a CUDA device, in bytes."""
    return torch.cuda.mem_get_info(device)[1]


@cache
def card_slug(name: str) -> str:
    """A card's name as files are called by it: "NVIDIA H100 80GB HBM3" -> "h100", "NVIDIA GeForce RTX 4090" -> "rtx-4090".

    Vendor, product line, memory and form factor are dropped: cards that share a slug share an architecture.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    dropped = re.compile(r"nvidia|geforce|tesla|\d+gb|hbm\w*|pcie|sxm\d*|nvl|generation")
    return "-".join(word for word in words if not dropped.fullmatch(word)) or "unknown"
