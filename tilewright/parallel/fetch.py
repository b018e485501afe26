"""ZeRO-3: each replica stores only some rows of a layer's weights. The other rows are fetched while the layer needs them.

In the forward pass, a layer's weights are gathered, used and freed. Where autograd saves a view of these weights, only the
shape, strides and offset of the view are stored. The weights are gathered again in the backward pass. Of the gradients, which
are summed over replicas in float32, each replica keeps its own rows.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tilewright.parallel.ranks import Ranks
from tilewright.parallel.replicate import RowShards, over_chunks

__all__ = ["Fetched"]

_ALIGN = 16
"""Alignment of each tensor in the gathered memory, in elements, so that products read it in the same way as a separate
tensor."""


class Fetched(nn.Module):
    """A module whose parameters (`rows`, in the order of the module's parameters) are this replica's rows of the weights.

    Args:
        module: the module with its complete weights, whose memory is freed.
        shards: which replica stores which rows.
        chunks: the ranks that hold the other tokens of the same micro-batches.
    """

    def __init__(self, module: nn.Module, shards: RowShards, chunks: Ranks):
        super().__init__()
        self.names = [name for name, _ in module.named_parameters()]
        self.rows = nn.ParameterList([shards.own(p.detach()).clone() for p in module.parameters()])
        self._shapes = [p.shape for p in module.parameters()]
        self._shards, self._chunks, self._again, self.sums = shards, chunks, None, []
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._module = (module,)  # in a tuple, so that `parameters` does not find the module's parameters

    @property
    def sums(self) -> list[Tensor]:
        """This replica's rows of the gradients of the last backward pass, summed over replicas. Reading them removes them."""
        found, self._sums = self._sums, []
        return found

    @sums.setter
    def sums(self, value: list[Tensor]) -> None:
        self._sums = value

    def forward(self, *given: Any) -> Any:
        """As the module's `forward`."""
        flat = self._gathered()
        place = flat.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != place:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else torch.as_strided(self._once_more(), *saved)

        wholes: Any = _Fetch.apply(self, flat, *self.rows)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return functional_call(self._module[0], dict(zip(self.names, wholes)), given)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter as a view of the gathered memory."""
        found, at = [], 0
        for shape in self._shapes:
            found.append(flat[at : at + shape.numel()].view(shape))
            at += -(-shape.numel() // _ALIGN) * _ALIGN
        return found

    def received(self, grads: tuple[Tensor, ...]) -> None:
        """Sum the gradients over replicas, store this replica's rows of the sums, and free the gathered weights."""
        self._again = None
        self._sums = self._shards.reduce_scatter([grad.float() for grad in over_chunks(grads, self._chunks)])

    def _gathered(self) -> Tensor:
        size = sum(-(-shape.numel() // _ALIGN) * _ALIGN for shape in self._shapes)
        flat = torch.empty(size, dtype=self.rows[0].dtype, device=self.rows[0].device)
        self._shards.all_gather([row.detach() for row in self.rows], self.views(flat))
        return flat

    def _once_more(self) -> Tensor:
        if self._again is None:
            self._again = self._gathered()
        return self._again


class _Fetch(torch.autograd.Function):
    """Returns the complete weights. The backward pass gives their gradients to `Fetched.received` and not to autograd, because
    they must be float32 for every dtype of the weights."""

    @staticmethod
    def forward(ctx: Any, layer: Fetched, flat: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        return tuple(layer.views(flat))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.layer.received(grads)
        return (None, None, *([None] * len(grads)))
