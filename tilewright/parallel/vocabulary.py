"""Tensor parallelism of the vocabulary: the embedding, and the head together with its loss, are divided into slices of rows.

Shoeybi et al., "Megatron-LM", 2019. There are T tokens, V classes, and S slices of V / S classes:

    e[t]   = sum over slices of the embedding row of token t; it is 0 in all slices but one, so the sum is exact
    lse[t] = m + log(sum over slices s of exp(lse_s[t] - m)),  m = max over s of lse_s[t],  lse_s of the logits of slice s
    dx[t]  = sum over slices of dlogits_s[t] w_s

Sums follow the order of the tree (reduce.py), so their bits depend on S, but not on which rank holds which slice. As in
`ops.linear_cross_entropy`, only the logits of a chunk of rows exist at a time: they are computed, overwritten by their
gradients, and freed. To compute the loss of a chunk, the ranks exchange two numbers per row and slice, or three with label
smoothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilewright import ops
from tilewright.kernels.elementwise.scale_in_place import scale_in_place_op
from tilewright.kernels.gemm.linear import add_product, matmul
from tilewright.kernels.softmax.cross_entropy import cross_entropy_gradient_in_place_op, cross_entropy_op
from tilewright.nn import Embedding, Linear
from tilewright.ops.cross_entropy import LossOptions, check_targets, loss_options
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.reduce import tree
from tilewright.parallel.tensor import fan, join

__all__ = ["SlicedEmbedding", "SlicedHead", "plain_vocabulary"]

_ROWS = 2048


def plain_vocabulary(model: Any) -> bool:
    """Whether a decoder's embedding and head can be divided: they must be the plain layers, without a bias or a padding
    index."""
    plain = type(model.embed) is Embedding and model.embed.padding_idx is None
    return plain and type(model.head) is Linear and model.head.bias is None


class SlicedEmbedding(nn.Module):
    """An embedding table, of which this rank holds some slices of rows.

    Args:
        slices: this rank's slices, all with the same number of rows; the first one is slice `first` of the table.
        ranks: the ranks that hold the slices.
        cut: whether the result contains only this rank's tokens.
    """

    def __init__(self, slices: Sequence[Tensor], first: int, ranks: Ranks, cut: bool):
        super().__init__()
        self.slices = nn.ParameterList(slices)
        self._first, self._ranks, self._cut = first, ranks, cut and ranks.size > 1

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, E], or if `cut` only the rows of this rank's tokens."""
        found = []
        for place, weight in enumerate(self.slices):
            rows = weight.shape[0]
            local = ids - (self._first + place) * rows
            # For a token of another slice, any row may be read, because the result is set to 0. The rows read are spread over
            # the slice, so that no row's gradient is a sum of thousands of zeros.
            read = ops.embedding(local.remainder(rows), weight)
            found.append(read.masked_fill(((local < 0) | (local >= rows))[:, None], 0.0))
        return join(found, self._ranks, self._cut)


class _Slices(NamedTuple):
    """The arguments of a loss except its operands.

    first: index of the first slice on this rank.
    """

    ranks: Ranks
    first: int
    options: LossOptions


class SlicedHead(nn.Module):
    """The last layer, of which this rank holds some slices of rows. It computes a loss and does not return logits.

    Args:
        slices: this rank's slices, all with the same number of rows; the first one is slice `first` of the weight.
        ranks: the ranks that hold the slices.
    """

    def __init__(self, slices: Sequence[Tensor], first: int, ranks: Ranks):
        super().__init__()
        self.slices = nn.ParameterList(slices)
        self.first, self.ranks = first, ranks

    def loss(
        self, x: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Tensor:
        """The sum of the losses of all rows, the same on every rank: `ops.linear_cross_entropy` with reduction "sum".

        Args:
            x: [T, E], the same on every rank. Its gradient is the same on every rank, too.
            targets: [T] int64.

        Raises:
            ValueError: as `ops.linear_cross_entropy`.
        """
        options = loss_options("SlicedHead", ignore_index, label_smoothing, z_loss, "sum")
        count = len(self.slices)
        classes = self.slices[0].shape[0] * count * self.ranks.size
        check_targets("SlicedHead", targets, x.shape[:1], classes, ignore_index, False)
        copies = fan(x, self.ranks, count)
        place = _Slices(self.ranks, self.first, options)
        return _Loss.apply(place, targets, count, *copies, *self.slices)  # pyright: ignore[reportReturnType]


class _Loss(torch.autograd.Function):
    """x for each slice here, and the slices -> the loss. The forward pass computes the gradients too, for one backward pass."""

    @staticmethod
    def forward(ctx: Any, place: _Slices, targets: Tensor, count: int, *operands: Tensor) -> Tensor:
        xs, weights = operands[:count], operands[count:]
        wanted = any(ctx.needs_input_grad)
        dxs = [torch.empty_like(x) for x in xs]
        dws: list[Tensor | None] = [None] * count
        loss = torch.zeros((), dtype=torch.float32, device=targets.device)
        for start in range(0, targets.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            logits = [matmul(x[rows], w.mT) for x, w in zip(xs, weights)]
            losses = _to_gradients(logits, targets[rows], place, wanted)
            loss += losses.sum()
            for index in range(count if wanted else 0):
                dxs[index][rows] = matmul(logits[index], weights[index])
                dws[index] = add_product(dws[index], logits[index].mT, xs[index][rows])
        made = [torch.zeros_like(w) if dw is None else dw.to(w.dtype) for dw, w in zip(dws, weights)] if wanted else []
        ctx.grads = [*dxs, *made] if wanted else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.grads is None:
            raise RuntimeError(
                "SlicedHead: a first backward pass has used up the gradients; compute the loss again before a second one"
            )
        made, ctx.grads = ctx.grads, None
        for grad in made:
            scale_in_place_op(grad, grads[0])
        return None, None, None, *made


def _to_gradients(logits: Sequence[Tensor], targets: Tensor, place: _Slices, wanted: bool) -> Tensor:
    """The losses of rows, float32. If gradients are `wanted`, they overwrite the logits of the slices on this rank."""
    (ignore, smoothing, z_loss), width = place.options.kernel, logits[0].shape[1]
    columns, inside, chosen, sums = [], [], [], []
    for index, slice_ in enumerate(logits):
        local = targets - (place.first + index) * width
        inside.append((local >= 0) & (local < width))
        columns.append(local.remainder(width))
        chosen.append(slice_.gather(1, columns[-1][:, None])[:, 0].float())
        # For any target class, the cross-entropy plus the logit of that class is the logarithm of the sum of exponentials.
        sums.append(cross_entropy_op(slice_, columns[-1], -1, 0.0, 0.0) + chosen[-1])
    there = [torch.where(own, value, 0.0) for own, value in zip(inside, chosen)]
    totals = [slice_.sum(1, dtype=torch.float32) for slice_ in logits] if smoothing else []
    parts = [torch.stack(some) for some in zip(sums, there, totals)] if smoothing else [
        torch.stack(some) for some in zip(sums, there)
    ]  # fmt: skip
    every = place.ranks.all_gather(torch.stack(parts))
    highest = every[:, 0].amax(0)
    lse = highest + tree((every[:, 0] - highest).exp().unbind()).log()
    counts = targets != ignore
    losses = lse + z_loss * lse.square() - (1 - smoothing) * tree(every[:, 1].unbind())
    classes = width * every.shape[0]
    if smoothing:
        losses = losses - smoothing / classes * tree(every[:, 2].unbind())
    if wanted:
        grow = torch.where(counts, 1 + 2 * z_loss * lse, 0.0)
        for slice_, own, column, value, lse_s in zip(logits, inside, columns, chosen, sums):
            cross_entropy_gradient_in_place_op(slice_, column, (grow * (lse_s - lse).exp()).contiguous(), -1, 0.0, 0.0)
            if smoothing:
                slice_ -= (smoothing / classes * counts)[:, None]
            # The kernel computed the entry of the column in `column` for a softmax over this slice only.
            exact = grow * (value - lse).exp() - torch.where(counts, smoothing / classes + (1 - smoothing) * own, 0.0)
            slice_.scatter_(1, column[:, None], exact[:, None].to(slice_.dtype))
    return torch.where(counts, losses, 0.0)
