"""Estimates how a library's matrix product fills a card, for the tiles that such libraries are known to use.

The kernel that a vendor's library chooses is not visible from outside. Its large products have tiles of 128 x 256, 256 x 128
and 128 x 128 (NVIDIA, "Matrix Multiplication Background User's Guide"), one block per tile and one block per SM. Under this
assumption the waves follow from the sizes alone, and so do the nearby sizes at which they change. Splitting the summed
dimension, which a library may do if there are few tiles, is not modelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.hw.waves import Waves, waves

__all__ = ["TILES", "Product", "alignment_cliffs", "tile_waves", "wave_cliffs"]

TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of the result that one block computes."""

_STEP = 128
"""A common divisor of the sides of all tiles."""
_FAR = 0.25
"""Cliffs further away than this share of a size are not near."""
_VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Product:
    """y [M, N] = x [M, K] @ weight [N, K]^T, `batch` times."""

    m: int
    n: int
    k: int
    batch: int = 1
    element_bytes: int = 2

    def sizes(self) -> dict[str, int]:
        """Name of each dimension -> its size."""
        return {"M": self.m, "N": self.n, "K": self.k}


def tile_waves(product: Product, tile: tuple[int, int], sms: int) -> Waves:
    """The waves of a product in tiles of so many rows and columns, with one block per SM."""
    rows, columns = tile
    return waves(product.batch * -(-product.m // rows) * -(-product.n // columns), sms=sms)


def wave_cliffs(product: Product, sms: int) -> Iterator[str]:
    """For each tile, the nearest smaller and larger sizes with a different number of waves.

    M and N are changed together if they are equal, else one by one. If there are many waves, one more makes little difference:
    only sizes at which the number changes by at least a tenth are listed.
    """
    for tile in TILES:
        now = tile_waves(product, tile, sms)
        for name in ("MN",) if product.m == product.n else ("M", "N"):
            for up in (False, True):
                other = _next(product, tile, sms, name, up)
                if other is None:
                    continue
                then = tile_waves(other, tile, sms)
                size = other.m if "M" in name else other.n
                yield (
                    f"{'='.join(name)}={size}: {then.blocks} tiles of {tile[0]} x {tile[1]}, {_count(then)} instead of "
                    f"{_count(now)}: {then.waves / now.waves:.2f} times the time for {_work(other) / _work(product):.2f} times "
                    "the work"
                )


def _next(product: Product, tile: tuple[int, int], sms: int, name: str, up: bool) -> Product | None:
    """The nearest product with clearly more or fewer waves; None if none is near."""
    now = tile_waves(product, tile, sms).waves
    size = product.m if "M" in name else product.n
    # The number of tiles changes only at multiples of their sides, and one beyond.
    first = -(-size // _STEP) * _STEP + 1 if up else (size - 1) // _STEP * _STEP
    end = round(size * (1 + _FAR)) + 1 if up else max(round(size * (1 - _FAR)), 1) - 1
    for other in range(first, end, _STEP if up else -_STEP):
        changed = replace(product, **{side.lower(): other for side in name})
        if abs(tile_waves(changed, tile, sms).waves - now) >= max(1, 0.1 * now):
            return changed
    return None


def _work(product: Product) -> float:
    return float(product.m) * product.n


def _count(found: Waves) -> str:
    return f"{found.waves} wave{'s' if found.waves != 1 else ''}"


def alignment_cliffs(product: Product) -> Iterator[str]:
    """Sizes next to this one for which rows start at multiples of 16 bytes and here do not, or the reverse.

    K is the distance between the operands' rows, N the distance between the rows of the result.
    """
    elements = _VECTOR_BYTES // product.element_bytes
    for name, whose in (("K", "rows of x and of the weight"), ("N", "rows of the result")):
        size = product.sizes()[name]
        if size % elements:
            low, high = size // elements * elements, -(-size // elements) * elements
            near = f"{name}={low} and {name}={high}" if low else f"{name}={high}"
            yield f"{near}: {whose} start at multiples of {_VECTOR_BYTES} bytes, as those of {name}={size} do not"
        else:
            yield f"{name}={size - 1} and {name}={size + 1}: {whose} no longer start at multiples of {_VECTOR_BYTES} bytes"
