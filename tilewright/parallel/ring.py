"""Ring attention (context parallelism): keys and values are sent from rank to rank; queries stay on their rank.

Liu et al., "Ring Attention with Blockwise Transformers", 2023. Chunk i of C tokens attends to the chunks j <= i:

    out_i = sum over j of exp(lse_ij - lse_i) out_ij,   lse_i = log of the sum over j of exp(lse_ij)      j = i, i - 1, ... 0
    dq_i  = sum over j of dq_ij                                                                           j = i, i - 1, ... 0
    dk_j  = sum over i of dk_ij, and dv_j in the same way                                                 i = j, j + 1, ...

The sums are in float32 and in the order shown, which is the order in which the chunks arrive in a ring. A single process that
holds all chunks goes through the same pairs in the same order, so its results are bitwise the same as those of several ranks.
Documents may begin and end anywhere: the chunks of a pair i > j share at most one document, and in this document every query of
chunk i attends to every key of chunk j. A chunk is a contiguous range of tokens. With long documents, the last rank therefore
has the most work. Attention windows are not supported.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright import ops
from tilewright.kernels.attention.attention import attention as forward_attention
from tilewright.kernels.attention.backward.backward import attention_backward_op
from tilewright.kernels.attention.checks import window_bounds
from tilewright.nn.keys_values import Heads
from tilewright.parallel.context import fan_weight
from tilewright.parallel.ranks import Ranks

__all__ = ["Ring"]

# T tokens, C tokens of a chunk, H query heads, G key/value heads, D head dim


class Ring(NamedTuple):
    """Attention over all chunks; the keys and values go around the ring.

    Args:
        inner: a `PackedKeysValues`.
        ranks: the ranks of the ring, with one chunk each; a single rank holds all chunks.
        chunks: the number of chunks.
    """

    inner: Any
    ranks: Ranks
    chunks: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, heads: Heads) -> Tensor:
        """As `KeysValues.attend`, with the inputs and the output of this rank's tokens only."""
        alone = self.ranks.size == 1
        here = range(self.chunks) if alone else range(self.ranks.rank, self.ranks.rank + 1)
        norms = [fan_weight(weight, len(here)) for weight in (heads.q_norm, heads.k_norm, heads.sinks)]
        positions = batch.positions.tensor_split(self.chunks)
        qs, ks, vs = (x.tensor_split(len(here)) for x in (q, k, v))
        turned = []
        for place, index in enumerate(here):
            one, other = qs[place], ks[place]
            if norms[0][place] is not None:
                one, other = (ops.rms_norm(x, norms[n][place], heads.norm_eps) for n, x in enumerate((one, other)))
            turned.append(ops.rope(one, other, positions[index], heads.rope.cos_sin, heads.rope.interleaved))
        place = _Place(self.ranks, here, self.chunks, batch.cu_q, batch.max_q_len, heads, self.inner.deterministic)
        sinks = [] if heads.sinks is None else norms[2]
        made: Any = _Attention.apply(place, *(q for q, _ in turned), *(k for _, k in turned), *vs, *sinks)
        return torch.cat(made)


class _Place(NamedTuple):
    """All arguments except the operands: the chunks on this rank, where documents begin, and how scores are changed."""

    ranks: Ranks
    here: range
    chunks: int
    cu: Tensor
    longest: int
    heads: Heads
    deterministic: bool

    def pairs(self, step: int) -> list[tuple[int, int, int]]:
        """The pairs of one step: (index of the query chunk on this rank, query chunk, key chunk)."""
        return [(at, i, i - step) for at, i in enumerate(self.here) if i >= step]

    def lengths(self, i: int, j: int, size: int) -> tuple[Tensor, Tensor, int]:
        """For a pair of chunks: the starts of the query sequences, the starts of the key sequences, and the greatest length."""
        if i == j:
            cu = (self.cu - i * size).clamp(0, size).int()
            return cu, cu, min(size, self.longest)
        first, none, all_ = i * size, self.cu.new_zeros(()), self.cu.new_full((), size)
        begin = self.cu.where(self.cu <= first, 0).amax()
        end = self.cu.where(self.cu > first, self.chunks * size).amin()
        queries, keys = (end - first).clamp(0, size), (begin - j * size).clamp(0, size)
        # Three sequences: keys of other documents, the shared document, and queries of other documents.
        return torch.stack((none, none, queries, all_)).int(), torch.stack((none, keys, all_, all_)).int(), size


class _Passed:
    """Tensors of chunks that go around the ring: all of them on a single rank, otherwise the one that is here now."""

    def __init__(self, ranks: Ranks, tensors: Sequence[Tensor]):
        self._ranks, self._tensors, self._coming = ranks, list(tensors), None

    def of(self, chunk: int) -> Tensor:
        """The tensor of a chunk; it must be here at this step."""
        return self._tensors[chunk if self._ranks.size == 1 else 0]

    def start(self) -> None:
        """Start sending the tensor to the next rank."""
        if self._ranks.size > 1:
            self._coming = self._ranks.shift(self._tensors[0])

    def finish(self) -> None:
        """Wait for the tensor of the previous rank."""
        if self._coming is not None:
            self._tensors[0], self._coming = self._coming(), None

    def held(self) -> list[Tensor]:
        """The tensors that are here now."""
        return self._tensors


class _Attention(torch.autograd.Function):
    """q, k and v of each chunk on this rank, and sinks if there are any -> the attention output of each chunk."""

    @staticmethod
    def forward(ctx: Any, place: _Place, *operands: Tensor) -> tuple[Tensor, ...]:
        count = len(place.here)
        qs, ks, vs, sinks = (operands[n * count : (n + 1) * count] for n in range(4))
        kvs = [torch.stack(pair) for pair in zip(ks, vs)]
        going = _Passed(place.ranks, kvs)
        found: list[tuple[Tensor, Tensor]] = []
        for step in range(place.chunks):
            if step + 1 < place.chunks:
                going.start()
            for at, i, j in place.pairs(step):
                k, v = going.of(j)
                cu_q, cu_k, longest = place.lengths(i, j, k.shape[0])
                out, lse = forward_attention(
                    qs[at], k, v, causal=i == j, scale=place.heads.scale, cu_q=cu_q, cu_k=cu_k, max_q=longest, max_k=longest,
                    return_lse=True, softcap=place.heads.softcap, sinks=sinks[at] if sinks and i == j else None,
                )  # fmt: skip
                if i == j:
                    found.append((out.float(), lse))
                else:
                    found[at] = _merged(*found[at], out, lse)
            going.finish()
        outs = [out.to(q.dtype) for (out, _), q in zip(found, qs)]
        ctx.place, ctx.with_sinks = place, bool(sinks)
        ctx.save_for_backward(*qs, *kvs, *outs, *(lse for _, lse in found), *sinks)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        place, count = ctx.place, len(ctx.place.here)
        qs, kvs, outs, lses, sinks = (ctx.saved_tensors[n * count : (n + 1) * count] for n in range(5))
        going, sums = (_Passed(place.ranks, some) for some in (kvs, [torch.zeros_like(kv, dtype=torch.float32) for kv in kvs]))
        dqs, dsinks = [torch.zeros_like(q, dtype=torch.float32) for q in qs], [torch.zeros_like(s) for s in sinks]
        for step in range(place.chunks):
            if step + 1 < place.chunks:
                going.start()
            for at, i, j in place.pairs(step):
                k, v = going.of(j)
                cu_q, cu_k, longest = place.lengths(i, j, k.shape[0])
                dq, dk, dv, dsink = attention_backward_op(
                    grads[at].contiguous(), qs[at], k, v, outs[at], lses[at].contiguous(), cu_q, cu_k, longest, longest,
                    place.heads.scale, i == j, place.deterministic, *window_bounds(None, i == j), 0, None, place.heads.softcap,
                    sinks[at] if sinks and i == j else None, None,
                )  # fmt: skip
                dqs[at] += dq
                sums.of(j).add_(torch.stack((dk, dv)))
                if sinks and i == j:
                    dsinks[at] = dsink.to(sinks[at].dtype)
            going.finish()
            sums.start()  # after one step per chunk, the sums are back at their rank
            sums.finish()
        dkvs = [total.to(kv.dtype) for total, kv in zip(sums.held(), kvs)]
        made = [dq.to(q.dtype) for dq, q in zip(dqs, qs)]
        return None, *made, *(dkv[0] for dkv in dkvs), *(dkv[1] for dkv in dkvs), *dsinks


def _merged(out: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the outputs over two sets of keys: out [C, H, D] float32, and its lse [H, C]."""
    both = torch.logaddexp(lse, lse_more)
    before, behind = ((part - both).exp().mT[..., None] for part in (lse, lse_more))
    return out * before + more.float() * behind, both
