"""Low-rank adapters for a `Linear` (Hu et al., "LoRA", 2021): y += scale B (A x), with a pair (A, B) for each of its parts.

    # K inputs, N outputs of a part, R rank, S adapters
    A [R, K], B [N, R];  scale = alpha / R, or alpha / sqrt(R) (Kalajdzievski, "rsLoRA", 2023)

A merged layer (q, k and v; gate and up) has a separate pair for each of its parts, as in the `peft` library.

| class         | contains                     | adapter of a token                    | gradients |
|---------------|------------------------------|---------------------------------------|-----------|
| `Lora`        | one adapter, as parameters   | always that one, unless switched off  | yes       |
| `LoraStack`   | many, as stacked buffers     | by its id in the batch; 0: none       | no        |

Not here: adapters of embeddings and heads, magnitudes (DoRA), ranks that are chosen during training.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.ops.linear_gradient import activated

__all__ = ["Lora", "LoraStack", "without_adapters"]


class Lora(nn.Module):
    """One adapter of a layer, with gradients.

    Args:
        parts: the number of rows of each part of the layer.
        pairs: part -> (A [R, K], B [N, R]), which become parameters. Nothing is added to parts without a pair.
        scales: part -> factor.
        dropout: the probability with which an element of A's input is set to zero, with a different mask for each part. It
            applies only in training mode with gradients enabled, not in evaluation and sampling.
    """

    def __init__(
        self, parts: Sequence[int], pairs: Mapping[int, tuple[Tensor, Tensor]], scales: Mapping[int, float],
        dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.parts, self.dropout, self.enabled = tuple(parts), dropout, True
        self.scales = dict(scales)
        self.a = nn.ParameterDict({str(part): nn.Parameter(a) for part, (a, _) in pairs.items()})
        self.b = nn.ParameterDict({str(part): nn.Parameter(b) for part, (_, b) in pairs.items()})

    def applies(self, adapters: Tensor | None) -> bool:
        """Whether anything is added for a batch with these adapter ids."""
        return self.enabled

    def activated(self, y: Tensor, x: Tensor, adapters: Tensor | None, activation: str) -> Tensor:
        """The activation of y [..., N of all parts] + the adapter applied to x [..., K]."""
        return activated(self._added(y, x), activation)

    def _added(self, y: Tensor, x: Tensor) -> Tensor:
        active = self.training and self.dropout > 0 and torch.is_grad_enabled()
        pieces = []
        for part, rows in enumerate(self.parts):
            if str(part) not in self.a:
                pieces.append(y.new_zeros(*y.shape[:-1], rows))
                continue
            seen = ops.dropout(x, self.dropout) if active else x
            pieces.append(ops.linear(ops.linear(seen, self.a[str(part)]), self.b[str(part)]) * self.scales[part])
        return y + (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1))

    def extra_repr(self) -> str:
        ranks = ", ".join(f"{part}: {a.shape[0]}" for part, a in self.a.items())
        return f"ranks {{{ranks}}}, dropout={self.dropout}"


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside this scope a model's `Lora` adapters add nothing, so it acts as the base model without a second copy in memory."""
    found = [module for module in model.modules() if isinstance(module, Lora) and module.enabled]
    for module in found:
        module.enabled = False
    try:
        yield
    finally:
        for module in found:
            module.enabled = True


class LoraStack(nn.Module):
    """Adapters 1 to S of a layer, each of rank at most `rank`; smaller ones are padded with zeros, which add nothing.

    a: [S, parts * rank, K]; b: [S, N of all parts, rank]; scales: [S, parts] float32. They are zero for unused adapter numbers.
    """

    a: Tensor
    b: Tensor
    scales: Tensor

    def __init__(
        self, parts: Sequence[int], features: int, *, adapters: int, rank: int, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):  # fmt: skip
        super().__init__()
        self.parts, self.rank = tuple(parts), rank
        place = {"device": device, "dtype": dtype}
        self.register_buffer("a", torch.zeros(adapters, len(parts) * rank, features, **place))
        self.register_buffer("b", torch.zeros(adapters, sum(parts), rank, **place))
        self.register_buffer("scales", torch.zeros(adapters, len(parts), dtype=torch.float32, device=device))

    def applies(self, adapters: Tensor | None) -> bool:
        """Whether anything is added for a batch with these adapter ids."""
        return adapters is not None

    def activated(self, y: Tensor, x: Tensor, adapters: Tensor | None, activation: str) -> Tensor:
        """The activation of y [T, N of all parts] + the result of each token's adapter; y may be overwritten.

        adapters: as in `Batch`. The layer's own product, y, must be the preceding launch: the first product of the adapters
        starts while it still runs.
        """
        assert adapters is not None
        h = ops.lora_shrink(x, self.a, adapters, chained=True)
        if activation == "silu_mul" and len(self.parts) == 2 and self.parts[0] == self.parts[1]:
            return ops.lora_expand_silu_mul(y, h, self.b, self.scales, adapters, chained=True)
        y = ops.lora_expand_add(y, h, self.b, self.scales, adapters, self.parts, chained=True)
        return activated(y, activation)

    @torch.no_grad()
    def put(self, index: int, pairs: Mapping[int, tuple[Tensor, Tensor]], scales: Mapping[int, float]) -> None:
        """Store an adapter as number `index` + 1 in place of the earlier one. Without pairs this removes the earlier one. The
        call does not wait for the device."""
        a, b = torch.zeros_like(self.a[index], device="cpu"), torch.zeros_like(self.b[index], device="cpu")
        factors = torch.zeros(len(self.parts))
        starts = [sum(self.parts[:part]) for part in range(len(self.parts))]
        for part, (down, up) in pairs.items():
            rank = down.shape[0]
            a[part * self.rank : part * self.rank + rank] = down
            b[starts[part] : starts[part] + self.parts[part], :rank] = up
            factors[part] = scales[part]
        for place, value in ((self.a, a), (self.b, b), (self.scales, factors)):
            place[index].copy_(value)

    def extra_repr(self) -> str:
        return f"{self.a.shape[0]} adapters of rank {self.rank} at most"
