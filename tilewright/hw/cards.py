"""Cards that may be asked about without being here: what a launcher or a prediction needs to know of them.

From NVIDIA's data sheets and the CUDA programming guide (table of compute capabilities).
"""

from difflib import get_close_matches

from tilewright.hw.device import Device, card_slug

__all__ = ["BY_ARCH", "NAMED", "device_named"]


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


NAMED = {
    card_slug(card.name): card
    for card in (
        _card("A100 80GB", 80, 108, 163, 40, 80),
        _card("A10", 86, 72, 99, 6, 24),
        _card("L4", 89, 58, 99, 48, 24),
        _card("L40S", 89, 142, 99, 96, 48),
        _card("RTX 4090", 89, 128, 99, 72, 24),
        _card("H100 80GB", 90, 132, 227, 50, 80),
        _card("H200", 90, 132, 227, 50, 141),
        _card("B200", 100, 148, 227, 126, 180),
        _card("RTX 5090", 120, 170, 99, 96, 32),
    )
}
"""Slug -> the card."""

BY_ARCH = {80: NAMED["a100"], 90: NAMED["h100"], 100: NAMED["b200"]}
"""Architecture that kernels are certified for -> the card that stands for it where nothing is attached."""


def device_named(name: str) -> Device:
    """The card of that name: "h100", "H100", "NVIDIA H100 80GB HBM3".

    Raises:
        ValueError: no such card is known; the nearest names are told.
    """
    slug = card_slug(name)
    if slug not in NAMED:
        near = get_close_matches(slug, NAMED, n=2, cutoff=0.4)
        maybe = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"no card called {name!r} is known; wanted one of {', '.join(NAMED)}{maybe}")
    return NAMED[slug]
