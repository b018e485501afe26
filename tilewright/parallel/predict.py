"""Predicts the memory of a rank by formula, before anything is allocated.

    P_c, P_w   elements of a block that tp divides, and that it does not; L layers of the rank; E elements of embedding, norm,
    head P_x        elements of a block's experts
    N = L (P_c / tp + P_w + P_x / ep) + E        embedding and head in E: / tp, if slices divide the vocabulary

    weights    bytes of the dtype * N;                    zero 3: blocks / dp
    optimizer  (moments + 4 for master weights) * N;      zero 1 to 3: / dp, plus the updated rows of what every rank stores
    whole
                                                          float32: no separate master weights, if it updates all of the weights
    gradients  (bytes of the dtype + 4 for sums) * N;     sums: 1, or one for each level of the tree; zero 2 and 3: sums / dp;
                                                          with the tree experts have ep of them, one for each rank's tokens
    activations  bytes of the dtype * tokens / cp * layers * passes in flight * (what tp divides / tp + the rest, / tp with sp)

Temporary memory of an update (a gathered block, a bucket of an exchange, logits) comes on top.
"""

import math
from dataclasses import dataclass
from typing import Any

from tilewright.nn.shard import SHARDS, Replicate, Row
from tilewright.parallel.clock import simulated
from tilewright.parallel.plan import Plan
from tilewright.parallel.vocabulary import plain_vocabulary

__all__ = ["RankBytes", "Sizes", "predicted", "sizes_of"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of elements of a model.

    cut, whole: of a block, what tp divides and what nothing divides. experts: what ep distributes.
    embed, norm, head: outside of the blocks; head is 0 if it is tied to the embedding.
    vocabulary: rows of embedding and head that tp divides; 0 if it does not.
    """

    layers: int
    cut: int
    whole: int
    embed: int
    norm: int
    head: int
    experts: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """The bytes of a rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations")
        return f"{self.total / 2**30:.2f} GiB ({', '.join(f'{name} {getattr(self, name) / 2**30:.2f}' for name in names)})"


def sizes_of(model: Any) -> Sizes:
    """The sizes of a decoder, which may be on "meta"."""
    block, cut = model.blocks[0], 0
    for layer in (block.attn, block.ffn):
        for name, shard in SHARDS.get(type(layer), {}).items():
            part = getattr(layer, name)
            if part is None or isinstance(shard, Replicate):
                continue
            tensors = list(part.parameters()) if hasattr(part, "parameters") else [part]
            cut += sum(t.numel() for t in tensors if not (isinstance(shard, Row) and t.dim() == 1))
    tied = model.head.weight is model.embed.weight
    experts = sum(p.numel() for name, p in block.ffn.named_parameters() if name.startswith("experts_"))
    return Sizes(
        layers=len(model.blocks), cut=cut, whole=sum(p.numel() for p in block.parameters()) - cut - experts, experts=experts,
        embed=model.embed.weight.numel(), norm=sum(p.numel() for p in model.norm.parameters()),
        head=0 if tied else sum(p.numel() for p in model.head.parameters()),
        vocabulary=model.embed.weight.shape[0] if plain_vocabulary(model) else 0,
    )  # fmt: skip


def predicted(
    plan: Plan, sizes: Sizes, stage: int, *, item: int, moments: float, micro_batches: int, tree: bool, tokens: int,
    cut_width: int, whole_width: int,
) -> RankBytes:  # fmt: skip
    """Bytes of a rank at place `stage` along pp.

    Args:
        item: bytes of an element of weights.
        moments: bytes of the optimizer for each element, without master weights.
        micro_batches: of an update, over all replicas.
        tree: whether sums follow the tree.
        tokens: of a micro-batch.
        cut_width, whole_width: elements per token that a layer keeps for the backward pass, divided by tp or not.
    """
    parts = [stage + turn * plan.pp for turn in range(plan.virtual)]
    layers = sum(len(plan.layers_of(part, sizes.layers)) for part in parts)
    blocks = layers * (sizes.cut // plan.tp + sizes.whole + (sizes.experts if plan.ep == 1 else 0))
    dealt = layers * sizes.experts // plan.ep if plan.ep > 1 else 0
    first, last = 0 in parts, plan.parts - 1 in parts
    through = plan.tp if sizes.vocabulary and sizes.vocabulary % plan.slices == 0 else 1
    embed, head = sizes.embed // through, sizes.head // through
    own_head = head or (0 if first else embed)
    ends = (embed if first else 0) + (sizes.norm + own_head if last else 0)
    # A tied head is used in two places, and has a gradient for each.
    used = ends + (embed if first and last and not sizes.head else 0)
    share = plan.dp if plan.zero else 1
    third = plan.dp if plan.zero == 3 else 1
    # Copies that are updated apart from the weights in use: rows of whole weights. Otherwise float32 master weights are the
    # weights.
    copied = (blocks if plan.zero in (1, 2) else 0) + (ends if plan.zero else 0)
    own = micro_batches // plan.dp
    levels = 1 + math.ceil(math.log2(own)) if tree else 1
    sums = (blocks + used) / (plan.dp if plan.dealt else 1)
    held = simulated(plan, own).held[stage] / plan.virtual if plan.pp > 1 else 1
    width = cut_width / plan.tp + whole_width / (plan.tp if plan.sp else 1)
    copies = plan.ep if tree else 1

    def state(elements: int, copied: int) -> float:
        return moments * elements + (4 * copied if item == 4 else 4 * elements + item * copied)

    return RankBytes(
        weights=int(item * (blocks / third + ends + dealt)),
        gradients=int(item * (blocks + used) + 4 * levels * sums + (item + 4 * levels) * dealt * copies),
        optimizer=int(
            state(blocks + ends, copied) / share
            + state(dealt, dealt if plan.zero else 0) / (plan.expert_replicas if plan.zero else 1)
        ),
        activations=int(item * tokens / plan.cp * layers * held * width),
    )  # fmt: skip
