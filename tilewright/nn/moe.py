"""A mixture of experts: the router sends each token to a few experts; shared experts (DeepSeek) process every token.

    # T tokens, E features, X routed experts, K of them for each token, I width of an expert
    y = shared(x) + sum of w_i expert_i(x) over the K chosen experts i

Tokens are sorted by expert on the device, and each expert multiplies its own tokens. Weights of experts without tokens are not
read, nothing waits for the host, and a step can be captured as a CUDA graph (`ops/experts.py`). Sums over a token's experts are
float32. Experts, router and input have gradients; the choice of experts has none.

Not here: dropped tokens, a balancing loss. For experts on several devices see parallel/expert.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.expert_linear import ExpertLinear
from tilewright.nn.ffn import GatedMLP
from tilewright.nn.filling import parameter, uniform
from tilewright.nn.linear import Linear

__all__ = ["METHODS", "MoE", "Routing", "with_shared"]

METHODS = ("greedy", "group_limited_greedy", "noaux_tc", "biased_softmax")
_BIASED = ("noaux_tc", "biased_softmax")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token's experts are chosen.

    method: "greedy": the largest values of a softmax. "group_limited_greedy": the same within the groups that have the largest
        maxima (DeepSeek-V2). "noaux_tc": the largest sigmoids within the groups with the largest sums of their two best; a bias
        is added for the choice only (DeepSeek-V3). "biased_softmax": the largest of a softmax plus such a bias (ERNIE 4.5).
    experts: X, the number of routed experts.
    chosen: K, the number of experts for each token.
    groups: the number of groups into which the experts are divided; 1 for "greedy" and "biased_softmax".
    chosen_groups: the number of groups from which experts may be chosen.
    normalise: divide the K weights by their sum.
    scale: factor on the weights.
    """

    method: str
    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1
    normalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"routing method {self.method!r} is not supported; supported: {', '.join(METHODS)}")
        if self.experts % self.groups or not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(
                f"routing: experts is {self.experts}, groups is {self.groups} and chosen_groups is "
                f"{self.chosen_groups}; groups must divide experts, and chosen_groups must be 1 to groups"
            )
        per = self.experts // self.groups
        if not 1 <= self.chosen <= self.chosen_groups * per:
            raise ValueError(
                f"routing: {self.chosen} experts cannot be chosen from {self.chosen_groups} groups of {per} experts"
            )
        if self.method == "noaux_tc" and per < 2:
            raise ValueError(
                "routing: method noaux_tc sums the best two experts of each group, so each group needs at least two experts"
            )

    @property
    def biased(self) -> bool:
        """Whether the choice, and not the weights, depends on a bias, which has no gradient."""
        return self.method in _BIASED

    def choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits [T, X] float32, bias [X] for methods with one -> (weights [T, K] float32, experts [T, K] int32)."""
        grouped = self.method in ("group_limited_greedy", "noaux_tc")
        if self.method == "biased_softmax":
            # Their sigmoids are the softmax. The bounds keep them finite, and far enough from 0 and 1 to be exact.
            shares = ops.softmax(logits).clamp(1e-30, 1 - 2**-24)
            logits = shares.log() - torch.log1p(-shares)
        return ops.route_experts(
            logits,
            self.chosen,
            bias=bias,
            softmax=not self.biased,
            groups=self.groups if grouped else 1,
            chosen_groups=self.chosen_groups if grouped else 1,
            normalise=self.normalise,
            scale=self.scale,
        )


class _Router(nn.Module):
    """Computes logits with a weight [X, E] in the model's dtype and chooses experts; a bias, if any, is [X] float32."""

    def __init__(self, routing: Routing, features: int, device: torch.device | str | None, dtype: torch.dtype | None):
        super().__init__()
        self.routing = routing
        self.weight = parameter(routing.experts, features, fill=uniform(features), device=device, dtype=dtype)
        self.bias = None
        if routing.biased:
            self.bias = parameter(routing.experts, fill=nn.init.zeros_, device=device, dtype=torch.float32)

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> (weights [T, K] float32, experts [T, K])."""
        return self.routing.choose(ops.linear(x_TE.float(), self.weight.float()), self.bias)


class MoE(nn.Module):
    """Shared and routed gated feed-forward layers.

    Args:
        features: E, of input and output.
        inner: I, width of a routed expert.
        shared: the total width of the shared experts; 0 for none.
        shared_gate: whether their output has a factor, the sigmoid of another product with the token (Qwen2's mixtures).
        routing: how the routed experts are chosen.
        activation: "silu_mul" or "gelu_mul".
    """

    def __init__(
        self,
        features: int,
        inner: int,
        *,
        shared: int,
        routing: Routing,
        shared_gate: bool = False,
        activation: str = "silu_mul",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.activation = activation
        self.router = _Router(routing, features, device, dtype)
        self.shared = GatedMLP(features, shared, activation=activation, device=device, dtype=dtype) if shared else None
        self.shared_gate = None
        if shared and shared_gate:
            self.shared_gate = parameter(1, features, fill=uniform(features), device=device, dtype=dtype)
        self.experts_gate_up = ExpertLinear(routing.experts, (inner, inner), features, device=device, dtype=dtype)
        self.experts_down = ExpertLinear(routing.experts, (features,), inner, device=device, dtype=dtype)

    @property
    def reader(self) -> Linear | None:
        """None, because several layers read the input."""
        return None

    def forward(self, x_TE: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, E] -> [T, E]. adapters: as in `Batch`; only the shared experts use them."""
        weights, experts = self.router(x_TE)
        order = ops.sort_by_expert(experts, self.experts_down.experts)
        inner = self.experts_gate_up(x_TE, order, self.activation, gather=True)
        routed = ops.combine_tokens(self.experts_down(inner, order), order, weights)
        return with_shared(self, x_TE, routed, adapters)


def with_shared(layer: Any, x_TE: Tensor, routed: Tensor, adapters: Tensor | None) -> Tensor:
    """The output of the routed experts, plus that of the shared ones of a layer with `shared` and `shared_gate` as `MoE`."""
    if layer.shared is None:
        return routed
    shared = layer.shared(x_TE, adapters)
    if layer.shared_gate is not None:
        factor = torch.sigmoid(ops.linear(x_TE.float(), layer.shared_gate.float()))
        shared = (shared * factor).to(shared.dtype)
    return shared + routed
