"""Predicts the memory of a rank by formula, before anything is allocated.

    P_c   elements of a block that tp divides
    P_w   elements of a block that nothing divides
    P_x   elements of a block's experts
    L     layers of the rank
    E     elements of the embedding, the final norm and the head, as far as the rank holds them;
          embedding and head / tp, if slices divide the vocabulary
    N     = L (P_c / tp + P_w + P_x / ep) + E

    weights      bytes of the dtype * N
                 zero 3: blocks / dp
    optimizer    (moments + 4 for master weights) * N
                 zero 1 to 3: / dp, plus a copy of the updated rows of those weights that every rank stores whole
                 float32: no separate master weights, if the rank updates all of its weights
    gradients    (bytes of the dtype + 4 for sums) * N
                 sums: one, or with the tree one for each of its levels; zero 2 and 3: sums / dp
                 with the tree, experts have ep gradients, one for the tokens of each rank
    activations  bytes of the dtype * tokens / cp * layers * passes in flight * width per token
                 width: what tp divides / tp + the rest; with sp the rest / tp

An update also needs temporary memory, which is not included: a gathered block, a bucket of an exchange, logits.
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

    cut, whole: elements of a block that tp divides, and elements of a block that nothing divides.
    experts: elements of a block that ep distributes.
    embed, norm, head: elements outside of the blocks; head is 0 if it is tied to the embedding.
    vocabulary: rows of the embedding and the head that tp can divide; 0 if it cannot.
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
    """The bytes that a rank needs, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all fields."""
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
    """The bytes that the rank at place `stage` along pp needs.

    Args:
        item: bytes per element of the weights.
        moments: bytes per element of the optimizer state, without master weights.
        micro_batches: number per update, over all replicas.
        tree: whether sums follow the order of the tree.
        tokens: number per micro-batch.
        cut_width, whole_width: elements per token that a layer keeps for the backward pass: those that tp divides, and the
            rest.
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
    # A tied head is used in two places. Each use has a separate gradient.
    used = ends + (embed if first and last and not sizes.head else 0)
    share = plan.dp if plan.zero else 1
    third = plan.dp if plan.zero == 3 else 1
    # Updated copies that are separate from the weights in use: with ZeRO, rows of weights that every rank stores whole.
    # Otherwise, float32 weights are their own master weights.
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
