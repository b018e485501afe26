"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) over a paged cache of latents.

    # T tokens, E model features, H heads, N dims of a query that are not rotated, R rank of the latent, D rotated dims,
    # V value dim, P pages, S tokens per page
    latent c = norm(W_dkv x)  [R],   key' = rotated(W_kr x)  [D], one for all heads; the cache has these R + D numbers per token
    k_h = (W_uk,h c, key'),   v_h = W_uv,h c,   q_h = (W_uq,h x', rotated(W_qr,h x')),   x' = x or norm(W_dq x)

There are two ways to compute the same attention. Absorbed: q_h is mapped into the latent space (W_uk,h^T q_h) and attends to
the cache itself; the result is multiplied by W_uv,h. A cached number is read once for all heads. Expanded: k_h and v_h of all
keys are computed first. A pair of query and key then costs N + D + V multiplications per head instead of 2 R + D, and the
expansion costs R (N + V) per key and head. With DeepSeek's sizes the expanded form is cheaper if a key meets at least 170
queries, which is the average in a prompt of 340 tokens. It is used for steps whose sequences have at least `expand_from` tokens
on average, and whose block tables have room for at most twice the tokens of the step. The host knows both numbers, and the
second limits the memory of the expanded keys. In the invariant scope the expanded form is never used, because prefill and
decode must compute in the same way.

Not here: tensor parallelism, quantised W_uk and W_uv, caches of 8 bits.
"""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.batch import Batch
from tilewright.nn.filling import parameter, uniform
from tilewright.nn.linear import Linear
from tilewright.nn.norm import RMSNorm
from tilewright.nn.rope import Rope
from tilewright.op import scope
from tilewright.ops.linear import QuantizedActivation

__all__ = ["MLA"]

EXPAND_FROM = 384
"""Number of tokens per sequence from which expanded keys are cheaper, by the counts of multiplications above."""


class MLA(nn.Module):
    """Project down, normalise and rotate, write the latent to the cache, attend (absorbed or expanded), project back.

    Args:
        features: E.
        heads: H.
        nope_dim: N, dims of a query head and a key head that are not rotated.
        rope_dim: D, even.
        value_dim: V.
        kv_rank: R.
        q_rank: rank of the queries' own down-projection; None: queries are projected directly.
        rope: the table of angles for D dims, shared by all layers.
        scale: factor on scores; None for 1 / sqrt(N + D).
        bias: whether the down-projections and the output projection have one.
        norm_eps: eps of the norms of the latents.
        expand_from: the average number of tokens per sequence from which a step expands its keys.
    """

    def __init__(
        self,
        features: int,
        *,
        heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        kv_rank: int,
        q_rank: int | None,
        rope: Rope,
        scale: float | None = None,
        bias: bool = False,
        norm_eps: float = 1e-6,
        expand_from: int = EXPAND_FROM,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.heads, self.nope_dim, self.rope_dim, self.value_dim, self.kv_rank = heads, nope_dim, rope_dim, value_dim, kv_rank
        self.scale = (nope_dim + rope_dim) ** -0.5 if scale is None else scale
        self.rope, self.expand_from = rope, expand_from
        place = {"device": device, "dtype": dtype}
        query = heads * (nope_dim + rope_dim)
        self.down_sizes = (query if q_rank is None else q_rank, kv_rank + rope_dim)
        # The direct projection of queries has no bias, but the down-projections may have one. A merged layer has either
        # biases for all its parts or none.
        if q_rank is None and bias:
            raise ValueError(
                "MLA: bias=True needs q_rank, because without it queries and latents come from one merged layer, in "
                "which only the latents would have a bias"
            )
        down = Linear(features, self.down_sizes, bias=bias, **place)
        self.down = self.q_norm = self.q_up = self.q_and_down = None
        if q_rank is None:
            self.q_and_down = down
        else:
            self.down = down
            self.q_norm = RMSNorm(q_rank, eps=norm_eps, **place)
            self.q_up = Linear(q_rank, query, bias=False, **place)
        self.kv_norm = RMSNorm(kv_rank, eps=norm_eps, **place)
        # Not a Linear, because W_uk and W_uv of each head are applied from different sides.
        self.kv_up = parameter(heads * (nope_dim + value_dim), kv_rank, fill=uniform(kv_rank), **place)
        self.out = Linear(heads * value_dim, features, bias=bias, **place)

    @property
    def reader(self) -> Linear:
        """The only linear layer that reads the input."""
        reader = self.q_and_down if self.down is None else self.down
        assert reader is not None
        return reader

    def forward(self, x_TE: Tensor | QuantizedActivation, batch: Batch, cache: Tensor) -> Tensor:
        """[T, E], or the same quantised -> [T, E]. cache: this layer's, [P, S, R + D]; the step's tokens are written to it."""
        q, kv = self.reader(x_TE).split_with_sizes(self.down_sizes, 1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        q_THD = q.unflatten(1, (self.heads, -1))
        plain, turned = q_THD.split_with_sizes((self.nope_dim, self.rope_dim), 2)
        attend = self._expanded if self._expands(batch, cache) else self._absorbed
        o_THV = attend(plain, turned, kv, batch, cache)
        return self.out(o_THV.flatten(1))

    def _expands(self, batch: Batch, cache: Tensor) -> bool:
        tokens, (seqs, pages) = batch.positions.shape[0], batch.block_table.shape
        room = seqs * pages * cache.shape[1]
        return tokens >= self.expand_from * seqs and room <= 2 * tokens and not scope().invariant

    def _up(self) -> tuple[Tensor, Tensor]:
        """(W_uk [H, N, R], W_uv [H, V, R])."""
        k_up, v_up = self.kv_up.unflatten(0, (self.heads, -1)).split_with_sizes((self.nope_dim, self.value_dim), 1)
        return k_up, v_up

    def _write(self, lead: Tensor, turned: Tensor, kv: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        return ops.mla_rope_write(
            lead, turned, kv, self.kv_norm.weight, batch.positions, self.rope.cos_sin, cache, batch.slots,
            eps=self.kv_norm.eps_of(kv), interleaved=self.rope.interleaved,
        )  # fmt: skip

    def _absorbed(self, plain: Tensor, turned: Tensor, kv: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        k_up, v_up = self._up()
        lead = ops.matmul(plain.transpose(0, 1), k_up).transpose(0, 1)
        o_THR = ops.mla_attention(
            self._write(lead, turned, kv, batch, cache), cache, batch.block_table, batch.kv_lens, batch.cu_q, batch.max_q_len,
            rank=self.kv_rank, scale=self.scale,
        )  # fmt: skip
        return ops.matmul(o_THR.transpose(0, 1), v_up.mT).transpose(0, 1)

    def _expanded(self, plain: Tensor, turned: Tensor, kv: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        q_THD = self._write(plain, turned, kv, batch, cache)
        held, cu_k = self._held(batch, cache)
        latent, key = held.split_with_sizes((self.kv_rank, self.rope_dim), 1)
        up = ops.linear(latent.contiguous(), self.kv_up).unflatten(1, (self.heads, -1))
        k, v = up.split_with_sizes((self.nope_dim, self.value_dim), 2)
        k = torch.cat((k, key[:, None].expand(-1, self.heads, -1)), 2)
        longest = min(batch.block_table.shape[1] * cache.shape[1], held.shape[0])
        o = ops.attention(
            q_THD, k, v, causal=True, scale=self.scale, cu_q=batch.cu_q, cu_k=cu_k, max_q=batch.max_q_len, max_k=longest
        )
        assert isinstance(o, Tensor)
        return o

    def _held(self, batch: Batch, cache: Tensor) -> tuple[Tensor, Tensor]:
        """(the cached rows of all sequences, packed [rows, R + D]; where each sequence starts, [B + 1]).

        On a GPU the number of rows follows from the shape of the block table, so that the host does not wait for the device.
        Rows that the sequences do not need are copies of other rows, which no query sees.
        """
        seqs, pages = batch.block_table.shape
        page_size = cache.shape[1]
        cu_k = torch.zeros_like(batch.cu_q)
        cu_k[1:] = batch.kv_lens.cumsum(0)
        # On a CPU the values are available without waiting, and `ops.attention` does not accept surplus rows there.
        count = int(cu_k[-1]) if cache.device.type == "cpu" else seqs * pages * page_size
        room = torch.arange(count, device=cache.device)
        # Padding sequences have no tokens, so a row belongs to the last of the sequences that start at or before it.
        seq = (torch.searchsorted(cu_k, room, right=True) - 1).clamp(0, seqs - 1)
        at = (room - cu_k[seq]).clamp(max=pages * page_size - 1)
        used = room < cu_k[-1]
        page = torch.where(used, batch.block_table[seq, at // page_size], 0)
        rows = cache.view(-1, cache.shape[2])[page * page_size + torch.where(used, at % page_size, 0)]
        return rows, cu_k

    def extra_repr(self) -> str:
        return f"{self.heads} heads of {self.nope_dim} + {self.rope_dim}, values {self.value_dim}, latent {self.kv_rank}"
