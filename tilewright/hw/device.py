"""The properties of a device, as a frozen value. Only this module reads torch.cuda's device properties.

Cards need not be present: `device_named("h100")` has everything that a launcher or a prediction needs to know about one.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

import torch
from torch import Tensor

from tilewright.hw import env

__all__ = [
    "CARDS",
    "CARD_OF_ARCH",
    "CPU",
    "INTERPRETER",
    "Device",
    "card_slug",
    "cuda_count",
    "default_device",
    "device_named",
    "device_of",
    "free_bytes",
    "memory_bytes",
    "page_locked",
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
    """Shared memory that one block can use if it opts in, in bytes."""
    l2_bytes: int = 0
    memory_bytes: int = 0

    @property
    def runs_triton(self) -> bool:
        """Whether a Triton kernel can be launched here."""
        return self.kind != "cpu"

    @property
    def is_hopper(self) -> bool:
        """Whether it is an H100, H200 or GH200: the cards on which the order of implementations was measured."""
        return self.arch == 90

    @property
    def multiplies_by_warpgroup(self) -> bool:
        """Whether tensor cores read operands from shared memory, so that a kernel's registers are free for accumulators."""
        return self.arch in (90, 100, 103)


CPU = Device(kind="cpu", name="cpu")
# The interpreter has no hardware limits; these are the numbers of an H100.
INTERPRETER = Device(
    kind="interpret", name="triton interpreter", arch=90, sms=132, smem_bytes=232448, l2_bytes=50 << 20, memory_bytes=80 << 30
)


@cache
def device_of(index: int) -> Device:
    """The device with this CUDA index; -1 is the CPU (or Triton's interpreter on it).

    The argument is what `Tensor.get_device()` returns, so a call costs one dictionary look-up.
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
    """The number of usable CUDA devices."""
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


def page_locked(memory: Tensor) -> Callable[[], None]:
    """Lock the pages of a CPU tensor, so that a GPU copies from it while the process continues.

    Returns a function that unlocks them; call it before the memory is freed. Raises OSError if CUDA refuses; the memory is
    then unchanged.
    """
    cuda, at = torch.cuda.cudart(), memory.data_ptr()
    assert cuda is not None
    code = cuda.cudaHostRegister(at, memory.numel() * memory.element_size(), 0)
    if int(code):
        with suppress(RuntimeError):  # clears the error, which the next launch would report otherwise
            torch.ones(1, device="cuda")
        raise OSError(f"CUDA cannot lock {memory.numel() * memory.element_size()} bytes of memory: error {int(code)}")
    return lambda: cuda.cudaHostUnregister(at)


@cache
def card_slug(name: str) -> str:
    """A card's name as used in file names: "NVIDIA H100 80GB HBM3" -> "h100", "NVIDIA GeForce RTX 4090" -> "rtx-4090".

    Vendor, product line and memory are dropped. PCIe and NVL cards keep that word, "h100-pcie": they have other clocks and
    memory than the SXM module, and may have fewer SMs.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    dropped = re.compile(r"nvidia|geforce|tesla|\d+gb|hbm\w*|sxm\d*|generation")
    return "-".join(word for word in words if not dropped.fullmatch(word)) or "unknown"


def _card(name: str, arch: int, sms: int, shared_kib: int, l2_mib: int, memory_gib: int) -> Device:
    return Device(
        kind="cuda",
        name=name,
        arch=arch,
        sms=sms,
        smem_bytes=shared_kib << 10,
        l2_bytes=l2_mib << 20,
        memory_bytes=memory_gib << 30,
    )


# NVIDIA's data sheets, and the table of compute capabilities in the CUDA programming guide.
CARDS = {
    card_slug(card.name): card
    for card in (
        _card("A100 80GB", 80, 108, 163, 40, 80),
        _card("A10", 86, 72, 99, 6, 24),
        _card("L4", 89, 58, 99, 48, 24),
        _card("L40S", 89, 142, 99, 96, 48),
        _card("RTX 4090", 89, 128, 99, 72, 24),
        _card("H100 80GB", 90, 132, 227, 50, 80),
        _card("H100 PCIe", 90, 114, 227, 50, 80),
        _card("H200", 90, 132, 227, 50, 141),
        _card("B200", 100, 148, 227, 126, 180),
        _card("RTX 5090", 120, 170, 99, 96, 32),
    )
}
"""Short name -> a card, which need not be present."""

CARD_OF_ARCH = {arch: CARDS[slug] for arch, slug in ((80, "a100"), (90, "h100"), (100, "b200"))}
"""Architecture for which kernels are certified -> the card that represents it if none is attached."""


def device_named(name: str) -> Device:
    """The card with a name such as "h100", "H100" or "NVIDIA H100 80GB HBM3".

    Raises:
        ValueError: no such card is known; the message has the nearest names.
    """
    slug = card_slug(name)
    if slug not in CARDS:
        near = get_close_matches(slug, CARDS, n=2, cutoff=0.4)
        maybe = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"no card called {name!r} is known; wanted one of {', '.join(CARDS)}{maybe}")
    return CARDS[slug]
