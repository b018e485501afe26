"""The order in which `mixed_linear` takes int4 codes: one that lets a thread use what one load of 16 bytes gives it.

A row is stored in chunks of 128 codes, 64 bytes, the last one filled up with code 8, which stands for zero. Within a chunk

    32-bit word 4 t + c  (t and c of 0 to 3)  holds the codes of columns 32 c + 8 t + 0 ... 7
    of these, the one of column e stands at bits 4 (e / 2) + 16 (e % 2)

The four threads that share a row of a tensor core's operand each load the words of one t, and with them, 16 bytes at once, the
elements of x that belong to them (c for c); (word >> 4 i) & 0x000f000f is a pair of neighbouring codes as a 32-bit register of
two 16-bit numbers wants them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.formats import pack_int4, unpack_int4

__all__ = ["CHUNK", "prepare", "restore"]

CHUNK = 128


def prepare(codes: Tensor) -> Tensor:
    """uint8 codes [N, K / 2] as `formats.pack_int4` packs them -> [N, 64 * ceil(K / 128)] in the order above, contiguous.

    Raises:
        ValueError: codes are not uint8 with two dimensions.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"prepare: wanted uint8 [N, K / 2], got {codes.dtype} {list(codes.shape)}")
    filled = F.pad(codes, (0, -codes.shape[1] % (CHUNK // 2)), value=0x88)
    # Columns are c, t, e / 2, e % 2; in memory a byte's two halves have e / 2 of one parity: t, c, e % 2, e / 4, e / 2 % 2.
    columns = unpack_int4(filled).unflatten(1, (-1, 4, 4, 2, 2, 2))
    return pack_int4(columns.permute(0, 1, 3, 2, 6, 4, 5).flatten(1).contiguous())


def restore(codes: Tensor, k: int) -> Tensor:
    """The inverse of `prepare` for a row of k columns: [N, k / 2]."""
    words = unpack_int4(codes).unflatten(1, (-1, 4, 4, 2, 2, 2))
    return pack_int4(words.permute(0, 1, 3, 2, 5, 6, 4).flatten(1).contiguous())[:, : k // 2]
