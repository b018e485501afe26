"""The order of int4 codes in `mixed_linear`: 16 consecutive bytes are one thread's share of a tensor core operand.

A row is stored in chunks of 128 codes (64 bytes). The last chunk is padded with code 8, which stands for zero. In a chunk

    32-bit word 4 t + c  (t and c from 0 to 3)  contains the codes of columns 32 c + 8 i + 2 t + j  (i from 0 to 3, j 0 or 1)
    the code of i and j is at bits 4 i + 16 j of this word

Four threads share a row of the operand `a` of mma and wgmma. Of every 16 columns, thread t holds columns 2 t, 2 t + 1, 2 t + 8
and 2 t + 9. So a thread loads the words of one t, and (word >> 4 i) & 0x000f000f is a pair of codes at the positions that one
of its registers needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.formats import pack_int4, unpack_int4

__all__ = ["CHUNK", "prepare", "restore", "unpack"]

CHUNK = 128
_LOW_HALVES = 0x0F0F0F0F0F0F0F0F


def prepare(codes: Tensor) -> Tensor:
    """uint8 codes [N, K / 2] as `formats.pack_int4` packs them -> [N, 64 * ceil(K / 128)] in the order above, contiguous.

    Raises:
        ValueError: codes are not uint8 with two dimensions.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"prepare: wanted uint8 [N, K / 2], got {codes.dtype} {list(codes.shape)}")
    filled = F.pad(codes, (0, -codes.shape[1] % (CHUNK // 2)), value=0x88)
    # A column index consists of c, i / 2, i % 2, t, j. In memory the order is t, c, j, i / 2, i % 2: the halves of a byte
    # differ in i % 2.
    columns = unpack_int4(filled).unflatten(1, (-1, 4, 2, 2, 4, 2))
    return pack_int4(columns.permute(0, 1, 5, 2, 6, 3, 4).flatten(1).contiguous())


def restore(codes: Tensor, k: int) -> Tensor:
    """The inverse of `prepare` for rows of k columns: [N, k / 2]."""
    return pack_int4(unpack(codes, codes.shape[1] * 2))[:, : k // 2]


def unpack(codes: Tensor, k: int) -> Tensor:
    """The result of `prepare` as numbers from 0 to 15, [N, k], in the order of columns.

    On a CPU this takes a large part of a product's time.
    """
    rows, chunks = codes.shape[0], codes.shape[1] * 2 // CHUNK
    words = codes.contiguous().view(torch.int32).view(rows, chunks, 4, 4).mT.contiguous()  # c, t
    # Bytes 0 and 2 of a word have i 0 and 1, bytes 1 and 3 have i 2 and 3. The two bytes of a pair are j = 0 and 1 of one t.
    bytes_of_i = torch.stack([_pair(words), _pair(words >> 8)], 3)  # c, i / 2, t
    eights = bytes_of_i.view(torch.int64)  # all of t and j, i % 2 in the halves of each byte
    return torch.cat((eights & _LOW_HALVES, eights >> 4 & _LOW_HALVES), -1).view(torch.uint8).view(rows, chunks * CHUNK)[:, :k]


def _pair(words: Tensor) -> Tensor:
    """Bytes 0 and 2 of each int32, as an int16."""
    even = words & 0x00FF00FF
    return (even | even >> 8).to(torch.int16)
